"""What the members of a run have in common and strangers have not: a secret and, between hosts, certificates.

`holdfast keys create DIR` makes a set for one run, and every host of the run has the same copy of it:

    DIR/                 mode 0700, each file in it 0600
      secret             32 random bytes in hex: proves that a connection belongs to the run (handshake.py)
      ca.pem             the run's own authority; its private key was thrown away when it had signed one certificate
      certificate.pem    that certificate, which every worker shows and every worker asks for
      key.pem            its private key

A run on one host needs no such set: it has a secret only, in its run directory, and `Keys.from_secret` holds that.
Keys are read once, when a process starts. Nothing here prints or logs a secret, and neither does `repr`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.trust.handshake import SECRET_BYTES_MIN
from holdfast.trust.tls import Certificates

SECRET = "secret"
AUTHORITY = "ca.pem"
CERTIFICATE = "certificate.pem"
PRIVATE_KEY = "key.pem"
FILES = (SECRET, AUTHORITY, CERTIFICATE, PRIVATE_KEY)
SECRET_BYTES = 32
_FILE_BYTES_MAX = 64 * 1024
_MAKE = "make a set with `holdfast keys create DIR` and copy it to every host"


@dataclass(frozen=True)
class Keys:
    """`fingerprint` tells two sets apart and gives nothing away. `expires` is in seconds since 1970."""

    secret: bytes = field(repr=False)
    fingerprint: str
    certificates: Certificates | None = field(default=None, repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> Keys:
        """Of a run on one host: connections prove themselves and are not encrypted."""
        return cls(secret, _fingerprint(secret, b""))

    @property
    def expires(self) -> float | None:
        return None if self.certificates is None else self.certificates.expires

    def client_context(self) -> ssl.SSLContext | None:
        """For connections that we make to other hosts. None: there are no certificates, so there is no TLS."""
        return None if self.certificates is None else self.certificates.client

    def server_context(self) -> ssl.SSLContext | None:
        """For connections that other hosts make to us."""
        return None if self.certificates is None else self.certificates.server


def load_keys(path: Path | str) -> Keys:
    """The set in a directory, proved to fit together. ConfigError if it is missing, open to others, damaged or old."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"there are no keys in {directory}", hint=_MAKE)
    _check_mode(directory, 0o022, "can be changed by other users", "chmod 700")
    contents = {name: _read(directory / name) for name in FILES}
    try:
        secret = bytes.fromhex(contents[SECRET].decode("ascii").strip())
    except ValueError as error:
        raise ConfigError(f"{directory / SECRET} is damaged: it is not hexadecimal", hint=_MAKE) from error
    if len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(f"{directory / SECRET} is damaged: {len(secret)} bytes are too few", hint=_MAKE)
    certificates = Certificates.load(
        authority=directory / AUTHORITY, certificate=directory / CERTIFICATE, private_key=directory / PRIVATE_KEY
    )
    return Keys(secret, _fingerprint(secret, certificates.authority), certificates)


def create_keys(path: Path | str) -> Keys:
    """Make a new set in a directory that does not exist yet or is empty, whole or not at all."""
    directory = Path(path)
    contents = {SECRET: os.urandom(SECRET_BYTES).hex().encode() + b"\n", **_certificates()}
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.new")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700)
        for name, content in contents.items():
            _write(partial / name, content)
        partial.rename(directory)  # the system refuses to, unless an empty directory or nothing is there
    except OSError as error:
        if directory.exists():
            raise ConfigError(
                f"{directory} is not an empty directory, and keys are never overwritten",
                hint="name a directory that does not exist yet",
            ) from error
        raise ConfigError(f"cannot write {directory}: {error.strerror}", hint="choose another directory") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return load_keys(directory)


def _certificates() -> dict[str, bytes]:
    try:
        from holdfast.trust.issuing import issue
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"making certificates needs the package {error.name}", hint="pip install 'holdfast[hosts]'"
        ) from error
    issued = issue()
    return {AUTHORITY: issued.authority, CERTIFICATE: issued.certificate, PRIVATE_KEY: issued.private_key}


def _check_mode(path: Path, forbidden: int, what: str, remedy: str) -> None:
    if stat.S_IMODE(path.stat().st_mode) & forbidden:
        raise ConfigError(f"{path} {what}", hint=f"{remedy} {path}; if others have read it, make new keys")


def _read(path: Path) -> bytes:
    try:
        _check_mode(path, 0o077, "is open to other users", "chmod 600")
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"the keys are not complete: {path} is missing", hint=_MAKE) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="check who owns it") from error
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} is damaged: it has more than {_FILE_BYTES_MAX} bytes", hint=_MAKE)
    return content


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - the mode must be right from the first moment
        os.fchmod(descriptor, 0o600)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _fingerprint(secret: bytes, authority: bytes) -> str:
    """Of the secret only an HMAC goes in, so the fingerprint can be published."""
    mark = hmac.new(secret, b"holdfast\0fingerprint", hashlib.sha256).digest()
    return hashlib.sha256(hashlib.sha256(authority).digest() + mark).hexdigest()[:32]
