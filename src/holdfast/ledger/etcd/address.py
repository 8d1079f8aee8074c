"""How an etcd is named, and with what one proves oneself to it: URLs, and credentials from environment and files.

A URL is etcd://HOST[:PORT],HOST[:PORT],… or, with TLS, etcds://…. It stands in process lists and logs, so it never
contains a password.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import ConfigError

PORT = 2379
ENDPOINTS_MAX = 64
SECRET_BYTES_MAX = 64 * 1024
USER, PASSWORD, PASSWORD_FILE = "HOLDFAST_LEDGER_USER", "HOLDFAST_LEDGER_PASSWORD", "HOLDFAST_LEDGER_PASSWORD_FILE"
CA, CERT, KEY = "HOLDFAST_LEDGER_CA", "HOLDFAST_LEDGER_CERT", "HOLDFAST_LEDGER_KEY"
_EXAMPLE = "for example etcd://a:2379,b:2379,c:2379, or etcds:// for TLS"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+))(?::(\d{1,5}))?", re.ASCII)
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class EtcdUrl:
    tls: bool
    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class Credentials:
    """What a client proves itself with. Secrets are not part of its repr."""

    user: str = ""
    password: str = field(default="", repr=False)
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)


def parse_url(url: str) -> EtcdUrl:
    """Raises ConfigError, in whose message a password that was written into the URL does not appear."""
    scheme, separator, rest = url.partition("://")
    if "@" in url or "?" in url:
        raise ConfigError(
            "a ledger's URL must not contain a user or password, since everybody can read it in the process list",
            hint=f"set {USER} and {PASSWORD_FILE} instead",
        )
    if not separator or scheme not in ("etcd", "etcds"):
        raise ConfigError(f"{url[:200]!r} does not name a ledger", hint=_EXAMPLE)
    names = rest.rstrip("/").split(",")
    if len(names) > ENDPOINTS_MAX:
        raise ConfigError(f"the ledger's URL names {len(names)} endpoints", hint=f"at most {ENDPOINTS_MAX}")
    addresses = tuple(_parse_address(name, url) for name in names)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"the ledger's URL names an endpoint twice: {url[:200]}", hint="name each member once")
    return EtcdUrl(scheme == "etcds", addresses)


def read_credentials(url: EtcdUrl, environ: Mapping[str, str]) -> Credentials:
    """Raises ConfigError if a file cannot be read or the parts do not fit together."""
    user = environ.get(USER, "")
    password = environ.get(PASSWORD, "")
    if environ.get(PASSWORD_FILE):
        if password:
            raise ConfigError(f"both {PASSWORD} and {PASSWORD_FILE} are set", hint="keep the file and unset the other")
        try:
            password = _read(environ[PASSWORD_FILE], PASSWORD_FILE).decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{PASSWORD_FILE} names a file that is not text", hint="put the password into it, on one line"
            ) from error
    if bool(user) != bool(password):
        missing = f"{PASSWORD_FILE} is not" if user else f"{USER} is not"
        raise ConfigError(
            f"{USER if user else 'a password of the ledger'} is set, but {missing}", hint="a user needs both"
        )
    if not url.tls:
        for name in (CA, CERT, KEY):
            if environ.get(name):
                raise ConfigError(f"{name} is set, but etcd:// is without TLS", hint="write etcds:// in --ledger")
        return Credentials(user, password)
    return Credentials(user, password, *_read_certificates(environ))


def check_run(run: str) -> None:
    if not _RUN.fullmatch(run):
        raise ConfigError(
            f"{run[:80]!r} cannot be the name of a run",
            hint="use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )


def _parse_address(text: str, url: str) -> Address:
    match = _HOST.fullmatch(text)
    port = int(match[3] or PORT) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(f"{text[:80]!r} in {url[:200]!r} is not HOST or HOST:PORT", hint=_EXAMPLE)
    return Address(match[1] or match[2], port)


def _read_certificates(environ: Mapping[str, str]) -> tuple[bytes | None, bytes | None, bytes | None]:
    """The PEM files, tried with the ssl module first: its reasons are better than grpc's, which come later."""
    ca, cert, key = (environ.get(name, "") for name in (CA, CERT, KEY))
    if bool(cert) != bool(key):
        present, missing = (CERT, KEY) if cert else (KEY, CERT)
        raise ConfigError(f"{present} is set, but {missing} is not", hint="a certificate and its key go together")
    contents = tuple(_read(path, name) if path else None for path, name in ((ca, CA), (cert, CERT), (key, KEY)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca:
            context.load_verify_locations(cafile=ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{CA} does not name a file with certificates: {ca}", hint="it must be PEM") from error
    try:
        if cert:
            context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{cert} and {key} are not a certificate and its key", hint=f"check {CERT} and {KEY}; both are PEM"
        ) from error
    return contents[0], contents[1], contents[2]


def _no_password() -> str:
    """Without this a key that is encrypted would make openssl ask on the terminal."""
    return ""


def _read(path: str, name: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror})", hint=f"check {name}") from error
    if len(data) > SECRET_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {SECRET_BYTES_MAX} bytes", hint=f"check {name}")
    return data
