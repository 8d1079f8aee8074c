"""Who takes part, and what they have agreed on before the first round: servers and clients by their public keys, how
many servers may lie, and the rule. Its digest, the realm, is in everything that is signed, so that nothing said in
one federation counts in another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.byzantine.agreement.canonical import digest_of, pack
from holdfast.core.errors import ConfigError

KEY_BYTES = 32
DIGEST_BYTES = 32
SERVERS_MAX = 100
CLIENTS_MAX = 10_000
UPDATE_BYTES_MAX = 1 << 30
NAME_CHARACTERS_MAX = 100
FILE_BYTES_MAX = 16 * 1024 * 1024
FILE = "federation.json"


@dataclass(frozen=True, kw_only=True)
class Federation:
    """`f` servers may lie, of at least 3f+1. `hostile` is the number of clients that the rule must bear."""

    name: str
    f: int
    servers: Mapping[str, bytes]  # name -> public key
    clients: Mapping[str, bytes]
    rule: str
    hostile: int
    updates_min: int  # a round is not closed with fewer
    model: bytes  # digest of the first model
    update_bytes_max: int = 64 * 1024 * 1024

    @cached_property
    def realm(self) -> bytes:
        parties = [tuple(sorted(group.items())) for group in (self.servers, self.clients)]
        said = (self.name, self.f, *parties, self.rule, self.hostile, self.updates_min, self.model)
        return digest_of(pack(("holdfast federation 1", *said, self.update_bytes_max)))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The servers in the order in which they lead."""
        return tuple(sorted(self.servers))

    @property
    def votes_needed(self) -> int:
        """So many that any two such sets share an honest server: 2f+1 of 3f+1, and more where there are more."""
        return (len(self.servers) + self.f) // 2 + 1

    @property
    def witnesses_needed(self) -> int:
        """So many that one of them is honest."""
        return self.f + 1

    def leader(self, round: int, view: int) -> str:
        return self.order[(round + view) % len(self.order)]

    def validate(self) -> None:
        if self.f < 0 or len(self.servers) < 3 * self.f + 1:
            raise ConfigError(
                f"{len(self.servers)} servers cannot agree while f={self.f} of them lie: that takes {3 * self.f + 1}",
                hint=f"start {3 * max(self.f, 0) + 1} servers, or ask for f={max((len(self.servers) - 1) // 3, 0)}",
            )
        for what, group, most in (("servers", self.servers, SERVERS_MAX), ("clients", self.clients, CLIENTS_MAX)):
            if not 0 < len(group) <= most:
                raise ConfigError(f"a federation of {len(group)} {what}", hint=f"have from 1 to {most} of them")
            odd = [name for name, key in group.items() if not _is_name(name) or len(key) != KEY_BYTES]
            if odd:
                raise ConfigError(
                    f"{odd[0]!r:.80} of the {what} has no public key of {KEY_BYTES} bytes or no short name",
                    hint="`holdfast.byzantine.agreement.signing.PrivateKey.create` makes a key",
                )
        owners = list(self.servers.values()) + list(self.clients.values())
        if len(set(owners)) != len(owners) or self.servers.keys() & self.clients.keys():
            raise ConfigError(
                "two participants have the same key or the same name", hint="make a key for each server and client"
            )
        if not 1 <= self.updates_min <= len(self.clients):
            raise ConfigError(
                f"a round of at least {self.updates_min} updates, with {len(self.clients)} clients",
                hint="updates_min is at most the number of clients, less those that may stay away",
            )
        if len(self.model) != DIGEST_BYTES or not 0 < self.update_bytes_max <= UPDATE_BYTES_MAX:
            raise ConfigError(
                "the first model's digest or the limit of an update's bytes is out of range",
                hint=f"a SHA-256 digest, and at most {UPDATE_BYTES_MAX} bytes",
            )

    # -- as plain fields, and as a file

    def as_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        fields["model"] = self.model.hex()
        for group in ("servers", "clients"):
            fields[group] = {name: key.hex() for name, key in sorted(getattr(self, group).items())}
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Federation:
        """Raises ValueError, KeyError, TypeError or AttributeError for what is none."""
        groups: dict[str, Any] = {
            group: {str(name): bytes.fromhex(key) for name, key in fields[group].items()}
            for group in ("servers", "clients")
        }
        others = {name: kind(fields[name]) for name, kind in _PLAIN.items()}
        federation = cls(**groups, model=bytes.fromhex(fields["model"]), **others)
        federation.validate()
        return federation

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_fields(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Federation:
        try:
            with path.open("rb") as file:
                return cls.from_fields(json.loads(file.read(FILE_BYTES_MAX)))
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}", hint="name the federation's file, or its directory"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path} does not describe a federation", hint="copy the file that its servers were started with"
            ) from error


_PLAIN: dict[str, Any] = {
    "name": str,
    "f": int,
    "rule": str,
    "hostile": int,
    "updates_min": int,
    "update_bytes_max": int,
}


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
