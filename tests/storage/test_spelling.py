"""Near-misses of a URI are refused with the right spelling; paths of every kind are let through."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.checkpoint.storage.opening import check_there, open_storage
from holdfast.checkpoint.storage.spelling import check_spelling
from holdfast.core.errors import ConfigError


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("s3//bucket/run", "write s3://bucket/run"),
        ("s3:/bucket/run", "write s3://bucket/run"),
        ("s3:bucket/run", "write s3://bucket/run"),
        ("s3;//bucket/run", "write s3://bucket/run"),
        ("s3.//bucket/run", "write s3://bucket/run"),
        ("S3:/bucket/run", "write s3://bucket/run"),
        ("s3a://bucket/run", "write s3://bucket/run"),
        ("s4://bucket/run", "write s3://bucket/run"),
        ("gcs://bucket/run", "write gs://bucket/run"),
        ("gs//bucket", "write gs://bucket"),
        ("abfss://container/run", "write az://container/run"),
        ("file:/x/y", "write file:///x/y"),
        ("file//x/y", "write file:///x/y"),
        ("hdfs:/x/y", "write hdfs://host:port/x/y"),
        ("hdfs//namenode:9000/x", "write hdfs://namenode:9000/x"),
        ("hfds://namenode:9000/x", "write hdfs://namenode:9000/x"),
        ("ftp://host/x", "possible are a directory, file:///directory"),
        ("http://host/x", "possible are"),
        ("foo:/bar", "for a directory of that name write ./foo:/bar"),
        (" s3://bucket/run", "leave the space out"),
        ("s3://bucket/run\n", "leave the space out"),
    ],
)
def test_a_near_miss_is_refused_with_the_right_spelling(uri: str, hint: str) -> None:
    for refuse in (check_spelling, open_storage, lambda uri: CheckpointSettings(uri=uri).at_home()):
        with pytest.raises(ConfigError) as caught:
            refuse(uri)
        assert hint in caught.value.hint, (uri, caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "checkpoints",
        "s3",
        "s3/run",
        "s3.old/run",
        "./s3//bucket",
        "/data/s3:/x",
        "../x",
        "~/x",
        "run-1:2",
        "a.b//c",
        "12:30/x",
        "file:///x",
        "FILE:///x",
        "file://localhost/x",
        "s3://bucket",
        "S3://bucket/x",
        "gs://b/x",
        "az://c/x",
        "hdfs://h:1/x",
        "hdfs:///x",
        "",
    ],
)
def test_what_is_right_or_a_path_passes(uri: str) -> None:
    check_spelling(uri)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        check_spelling("s3:/user:hush@bucket/x")
    assert "hush" not in str(caught.value)


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    check_there(str(tmp_path))
    check_there(f"file://{tmp_path}")
    check_there("s3://bucket/nowhere")
    (tmp_path / "file").write_text("")
    for uri, sentence in (
        (str(tmp_path / "none"), "there is no directory"),
        (f"file://{tmp_path}/none", "there is no directory"),
        (str(tmp_path / "file"), "is a file"),
        (str(tmp_path / "file" / "x"), "cannot be looked into: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_there(uri)
