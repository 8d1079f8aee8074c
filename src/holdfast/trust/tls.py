"""TLS between hosts: version 1.3 only, and both ends show a certificate of the run's own authority.

Names of hosts are not checked: hosts come and go, and the authority has signed one certificate only, so whoever shows
one that it signed is a member of the run. No other authority is known here, the system's are not loaded. Sessions are
not resumed: every connection proves itself anew.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import ConfigError

_EXPIRED, _NOT_YET = 10, 9  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and _NOT_YET_VALID
_NEW = "make new keys with `holdfast keys create DIR` and copy them to every host"


@dataclass(frozen=True)
class Certificates:
    """Both contexts of a run, ready to use. `authority` is its certificate as DER."""

    authority: bytes
    expires: float
    client: ssl.SSLContext = field(repr=False)
    server: ssl.SSLContext = field(repr=False)

    @classmethod
    def load(cls, *, authority: Path, certificate: Path, private_key: Path) -> Certificates:
        """ConfigError, in one sentence, for whatever would make connections fail later."""
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_verify_locations(cafile=authority)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"{authority} is damaged: it holds no certificate", hint=_NEW) from error
            try:
                context.load_cert_chain(certificate, private_key, password="")  # never ask the terminal for one
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"{certificate} or {private_key.name} beside it is damaged, or they do not belong together",
                    hint=_NEW,
                ) from error
            contexts.append(context)
        client, server = contexts
        server.num_tickets = 0
        found = server.get_ca_certs(binary_form=True)
        if len(found) != 1:
            raise ConfigError(f"{authority} is damaged: it holds {len(found)} authorities", hint=_NEW)
        _try_out(client, server, certificate)
        (described,) = server.get_ca_certs()
        return cls(found[0], ssl.cert_time_to_seconds(str(described["notAfter"])), client, server)


def _try_out(client: ssl.SSLContext, server: ssl.SSLContext, certificate: Path) -> None:
    """Shake hands with ourselves, in memory: what others would find wrong with us is found here."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    try:
        for end in 2 * ends:  # two turns each are enough for TLS 1.3
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise ConfigError(f"{certificate} has expired", hint=_NEW) from error
        if error.verify_code == _NOT_YET:
            raise ConfigError(f"{certificate} is not valid yet", hint="set this host's clock right") from error
        raise ConfigError(
            f"{certificate} is not signed by the authority beside it: {error.verify_message}", hint=_NEW
        ) from error
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate} cannot be used: {error.reason or error}", hint=_NEW) from error
