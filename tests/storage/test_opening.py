"""From what a user writes to a storage: what is possible opens, everything else gets a sentence that says what is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.storage import Storage, Stored, check_uri, open_storage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.object_store import ObjectStorage
from holdfast.core.errors import ConfigError

from .storage_contract import write


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's credentials, and nothing that would be asked for them."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("form", ["{0}", "file://{0}", "file://localhost{0}", "FILE://{0}", "{0}/"])
def test_directories(tmp_path: Path, form: str) -> None:
    uri = form.format(tmp_path / "checkpoints")
    storage: Storage = open_storage(uri)
    assert isinstance(storage, LocalStorage)
    assert storage.uri == uri
    write(storage, "a/b", b"x")
    assert (tmp_path / "checkpoints" / "a" / "b").read_bytes() == b"x"
    assert storage.list() == [Stored("a/b", 1)]
    storage.close()


def test_paths_with_odd_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for uri, path in {
        "relative": "relative",
        "a/s3://b": "a/s3:/b",
        "ü %20 ?x#y": "ü %20 ?x#y",
        f"file://{tmp_path}/a%20b%3Fc": "a b?c",
        "~/checkpoints": "home/checkpoints",
        "c:windows": "c:windows",
    }.items():
        write(open_storage(uri), "a", b"x")
        assert (tmp_path / path / "a").is_file(), uri


def test_checking_makes_nothing(tmp_path: Path) -> None:
    check_uri(str(tmp_path / "checkpoints"))
    check_uri("s3://bucket/prefix?endpoint=http://127.0.0.1:1&region=here")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket",
        "s3://bucket/",
        "S3://bucket/a/b/",
        "s3://bucket/run?endpoint=https://minio.example:9000&region=eu-central-1&timeout_s=30",
        "s3://bucket/run%20one",
        "gs://bucket/run",
        "gs://bucket/run?endpoint=http://127.0.0.1:1",
    ],
)
def test_object_stores(uri: str) -> None:
    storage = open_storage(uri)
    assert isinstance(storage, ObjectStorage)
    assert storage.uri == uri


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        check_uri("az://container/run")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    check_uri("az://container/run")


@pytest.mark.parametrize(
    "uri, said",
    [
        ("", "file:///directory"),
        ("a\0b", "file:///directory"),
        ("ftp://host/directory", "s3://bucket/prefix"),
        ("https://host/directory", "hdfs://host:port/directory"),
        ("memory://", "s3://bucket/prefix"),
        ("://x", "s3://bucket/prefix"),
        ("file://other/directory", "file:///the/directory"),
        ("file://", "file:///the/directory"),
        ("file:///a?b=c", "file:///the/directory"),
        ("file:///a%00b", "file:///the/directory"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://buc ket/prefix", "s3://bucket/prefix"),
        ("s3://bucket:99/prefix", "s3://bucket/prefix"),
        ("s3://bucket/a/../b", "s3://bucket/prefix"),
        ("s3://bucket/a//b", "s3://bucket/prefix"),
        ("s3://bucket/%00", "s3://bucket/prefix"),
        ("s3://bucket/a#b", "s3://bucket/prefix"),
        ("s3://key:secret@bucket/prefix", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/prefix?secret_access_key=hush", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/prefix?AWS_ACCESS_KEY_ID=hush", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/prefix?X-Amz-Signature=hush", "AWS_SECRET_ACCESS_KEY"),
        ("gs://bucket/prefix?token=hush", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/prefix?sig=hush", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("s3://bucket/prefix?color=red", "endpoint, region, timeout_s"),
        ("gs://bucket/prefix?region=here", "endpoint, timeout_s"),
        ("s3://bucket/prefix?endpoint=host:9000", "endpoint=https://host:port"),
        ("s3://bucket/prefix?endpoint=http://user:hush@host:9000", "endpoint=https://host:port"),
        ("s3://bucket/prefix?endpoint=", "endpoint=https://host:port"),
        ("s3://bucket/prefix?timeout_s=soon", "seconds"),
        ("s3://bucket/prefix?timeout_s=0", "seconds"),
        ("s3://bucket/prefix?timeout_s=nan", "seconds"),
        ("hdfs://", "hdfs://"),
    ],
    ids=str,
)
def test_everything_else_gets_a_sentence(uri: str, said: str) -> None:
    for call in (open_storage, check_uri):
        with pytest.raises(ConfigError) as caught:
            call(uri)
        assert said in caught.value.hint
        assert "\n" not in caught.value.message
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "package, uri, extra", [("obstore", "s3://bucket/run", "s3"), ("hdfs_native", "hdfs://127.0.0.1:1/run", "hdfs")]
)
def test_a_missing_package_is_named(package: str, uri: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from holdfast.checkpoint.storage import open_storage\n"
        f"open_storage({uri!r})"
    )
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert tried.stderr.endswith(f"hint: pip install 'holdfast[{extra}]'\n"), tried.stderr


def test_no_client_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom holdfast.checkpoint.storage import open_storage\n"
        "open_storage(sys.argv[1]).list()\n"
        "sys.exit(bool({'obstore', 'hdfs_native', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
