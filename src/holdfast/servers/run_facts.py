"""What a server knows of its run from the ledger: slices, servers, and who is gone. Pure but for being changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import ProtocolError
from holdfast.core.words import (
    KEY_DEAD,
    KEY_DEAD_SERVERS,
    KEY_SERVERS,
    KEY_SLICE,
    KEY_STARTED_OVER,
    KEY_TARGETS,
    KEY_WORKERS,
    Registration,
    decode_json,
    decode_whole,
    incarnation_of,
)
from holdfast.log.configuration import Configuration
from holdfast.servers.ledger_line import LedgerValue
from holdfast.servers.log_codec import decode_configuration
from holdfast.servers.placing import Target

GONE_MAX = 1024  # workers that are remembered as gone; the log remembers them for good


def author_of(worker: str) -> tuple[str, int]:
    """Under which name and incarnation a worker's updates are in the log: `w3.2@alpha` is the second `w3@alpha`."""
    try:
        incarnation = incarnation_of(worker)
    except ValueError as error:
        raise ProtocolError(f"{worker[:40]!r} is no worker's name") from error
    name, _, rest = worker.partition(".")
    host = rest.partition("@")[2]
    return (f"{name}@{host}" if host else name), incarnation


@dataclass
class Learned:
    configured: list[tuple[str, Configuration, int]] = field(default_factory=list)
    exited: list[tuple[str, int]] = field(default_factory=list)


class RunFacts:
    def __init__(self) -> None:
        self.servers: dict[str, Registration] = {}  # those that are registered now
        self.configurations: dict[str, tuple[Configuration, int]] = {}
        self.targets: dict[str, Target] = {}
        self.gone: dict[tuple[str, int], None] = {}  # workers, the oldest first
        self.started_over = 0  # how often slices were lost, and all began anew
        self._keys: set[str] = set()

    def learn(self, value: LedgerValue) -> Learned:
        """ProtocolError for an entry that cannot be read; nothing is changed then."""
        learned = Learned()
        key, data = value.key, value.value
        (self._keys.discard if data is None else self._keys.add)(key)
        if key.startswith(KEY_SLICE) and data is not None:
            name, configuration = key[len(KEY_SLICE) :], decode_configuration(decode_json(data))
            self.configurations[name] = (configuration, value.revision)
            learned.configured.append((name, configuration, value.revision))
        elif key.startswith(KEY_TARGETS):
            name = key[len(KEY_TARGETS) :]
            if data is None:
                self.targets.pop(name, None)
            else:
                self.targets[name] = Target.decode(data)
        elif key.startswith(KEY_SERVERS):
            if data is None:
                self.servers.pop(key[len(KEY_SERVERS) :], None)
            else:
                registration = Registration.decode(data)
                self.servers[registration.id] = registration
        elif key.startswith(KEY_DEAD_SERVERS) and data is not None:
            learned.exited.append((key[len(KEY_DEAD_SERVERS) :], decode_whole(data, "start", 1)))
        elif key == KEY_STARTED_OVER and data is not None:
            self.started_over = decode_whole(data, "number")
        elif (key.startswith(KEY_DEAD) and data is not None) or (key.startswith(KEY_WORKERS) and data is None):
            self._note_gone(author_of(key.partition("/")[2]))
        return learned

    def _note_gone(self, author: tuple[str, int]) -> None:
        self.gone[author] = None
        while len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]

    def missing_from(self, values: Sequence[LedgerValue]) -> list[LedgerValue]:
        """What was there when it was last read, and is not there any more."""
        present = {one.key for one in values}
        return [LedgerValue(key, None, 0) for key in sorted(self._keys - present)]
