"""A set of keys is made whole, told apart by its fingerprint, and refused in one sentence when it cannot be trusted."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError
from holdfast.trust.issuing import SKEW_DAYS, VALID_DAYS, issue
from holdfast.trust.keys import AUTHORITY, CERTIFICATE, FILES, PRIVATE_KEY, SECRET, Keys, create_keys, load_keys

DAY_S = 86400


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_set_is_for_its_owner_alone(directory: Path) -> None:
    before = os.umask(0)
    try:
        create_keys(directory.with_name("open"))
    finally:
        os.umask(before)
    for made in (directory, directory.with_name("open")):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert sorted(path.name for path in made.iterdir()) == sorted(FILES)
        assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o600}


def test_a_set_is_read_back(directory: Path) -> None:
    keys = load_keys(directory)
    assert keys.secret.hex() == (directory / SECRET).read_text().strip()
    assert len(keys.secret) == 32
    assert keys.expires is not None
    assert abs(keys.expires - time.time() - VALID_DAYS * DAY_S) < 60
    assert load_keys(str(directory)).fingerprint == keys.fingerprint


def test_the_authority_signs_nothing_more(directory: Path) -> None:
    private = [path.name for path in directory.iterdir() if "PRIVATE KEY" in path.read_text()]
    assert private == [PRIVATE_KEY]


def test_fingerprints_tell_sets_apart_and_give_nothing_away(tmp_path: Path, directory: Path) -> None:
    one, other = load_keys(directory), create_keys(tmp_path / "other")
    mixed = tmp_path / "mixed"
    create_keys(mixed)
    (mixed / SECRET).write_bytes((directory / SECRET).read_bytes())
    alone = Keys.from_secret(one.secret)
    prints = [one.fingerprint, other.fingerprint, load_keys(mixed).fingerprint, alone.fingerprint]
    assert len(set(prints)) == 4
    assert alone.fingerprint == Keys.from_secret(one.secret).fingerprint
    assert alone.client_context() is alone.server_context() is alone.expires is None
    for keys in (one, alone):
        assert keys.secret.hex() not in repr(keys) and repr(keys.secret) not in repr(keys)


def test_keys_are_never_overwritten(tmp_path: Path, directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    plain = tmp_path / "plain"
    plain.write_text("a file")
    for taken in (directory, plain):
        with pytest.raises(ConfigError, match="never overwritten") as error:
            create_keys(taken)
        assert error.value.hint
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert plain.read_text() == "a file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "plain"], "nothing is left behind"


def test_one_of_two_that_race_wins(tmp_path: Path) -> None:
    code = f"from holdfast.trust.keys import create_keys; print(create_keys({str(tmp_path / 'keys')!r}).fingerprint)"
    racers = [subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    said = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers].count(0) == 1, said
    assert load_keys(tmp_path / "keys").fingerprint in said


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    create_keys(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + (b"A" if content[at : at + 1] != b"A" else b"B") + content[at + 1 :]


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda directory: [path.unlink() for path in directory.iterdir()] + [directory.rmdir()], "there are no keys"),
        (lambda directory: (directory / SECRET).unlink(), "not complete: .*secret is missing"),
        (lambda directory: (directory / PRIVATE_KEY).unlink(), "not complete: .*key.pem is missing"),
        (lambda directory: (directory / SECRET).chmod(0o640), "secret is open to other users"),
        (lambda directory: (directory / PRIVATE_KEY).chmod(0o604), "key.pem is open to other users"),
        (lambda directory: directory.chmod(0o770), "can be changed by other users"),
        (spoil(SECRET, lambda content: b"g" + content[1:]), "secret is damaged: it is not hexadecimal"),
        (spoil(SECRET, lambda content: b"\xff" + content), "secret is damaged: it is not hexadecimal"),
        (spoil(SECRET, lambda content: content[:20] + b"\n"), "secret is damaged: 10 bytes are too few"),
        (spoil(SECRET, lambda content: content * 2000), "secret is damaged: it has more than 65536 bytes"),
        (spoil(AUTHORITY, lambda content: content[:-60]), "ca.pem is damaged"),
        (spoil(AUTHORITY, lambda content: b""), "ca.pem is damaged"),
        (spoil(CERTIFICATE, lambda content: b""), "certificate.pem or key.pem beside it is damaged"),
        (spoil(PRIVATE_KEY, lambda content: content[:-60]), "certificate.pem or key.pem beside it is damaged"),
        (spoil(PRIVATE_KEY, lambda content: flipped(content, 90)), "certificate.pem cannot be used"),
        (spoil(PRIVATE_KEY, lambda _: issue().private_key), "they do not belong together"),
        (spoil(AUTHORITY, lambda _: issue().authority), "not signed by the authority beside it"),
        (spoil(AUTHORITY, lambda content: content + issue().authority), "ca.pem is damaged: it holds 2 authorities"),
    ],
    ids=map(str, range(18)),
)
def test_a_set_that_cannot_be_trusted_is_refused(
    directory: Path, harm: Callable[[Path], object], sentence: str
) -> None:
    harm(directory)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_keys(directory)
    assert error.value.hint
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("days", "sentence"), [(-VALID_DAYS - 1, "has expired"), (SKEW_DAYS + 1, "is not valid yet"), (SKEW_DAYS - 1, "")]
)
def test_clocks(directory: Path, days: int, sentence: str) -> None:
    """A certificate made a day in our future is good: the clock of whoever made it was a little ahead."""
    issued = issue(datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days))
    for name, content in (
        (AUTHORITY, issued.authority),
        (CERTIFICATE, issued.certificate),
        (PRIVATE_KEY, issued.private_key),
    ):
        (directory / name).write_bytes(content)
    if sentence:
        with pytest.raises(ConfigError, match=sentence):
            load_keys(directory)
    else:
        assert load_keys(directory).client_context() is not None


def test_contexts_demand_a_certificate_of_this_run_and_nothing_older_than_tls_1_3(directory: Path) -> None:
    keys = load_keys(directory)
    for context in (keys.client_context(), keys.server_context()):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is context.maximum_version is ssl.TLSVersion.TLSv1_3
        assert len(context.get_ca_certs()) == 1, "the system's authorities are not ours"


def test_workers_need_no_package_for_certificates(directory: Path) -> None:
    """Reading keys loads no cryptography; making them without it says what to install."""
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from holdfast.core.errors import ConfigError\n"
        "from holdfast.trust.keys import create_keys, load_keys\n"
        f"load_keys({str(directory)!r})\n"
        "try:\n"
        f"    create_keys({str(directory.with_name('more'))!r})\n"
        "except ConfigError as error:\n"
        "    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "pip install 'holdfast[hosts]'"
