"""The words of the protocol as types: worker ids, views, registrations, and the ledger keys they live under."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.errors import ProtocolError

# Keys of a run in the ledger. All are relative to the run; an implementation may add a prefix of its own.
KEY_CONFIG = "config"  # what every worker of the run must agree on; created by the first
KEY_NUMERICS = "numerics"  # fingerprint of the first worker's arithmetic
KEY_KEYS = "keys"  # fingerprint of the run's keys: a host that has others is told so
KEY_SIZE = "size/"  # + host: {"workers": N}, how many workers this host should have; a view has their sum
KEY_HOSTS = "host/"  # + host: its agent, under the agent's lease
KEY_VIEW = "view"  # the current view
KEY_OWN_VIEWS = "own-view/"  # + id: the view of a worker that is by itself, under its lease
KEY_WORKERS = "worker/"  # + id: a registration, under the worker's lease
KEY_ROLLS = "roll/"  # + id: whom this worker could reach when its view had broken, under its lease
KEY_DEAD = "dead/"  # + id: the agent saw this worker's process end
KEY_CHECKPOINT = "checkpoint"  # {"step": N, "uri": ...}: the newest that is committed
KEY_STOP = "stop"  # {"reason": ...}: finish the step and leave in order
KEY_SAVE = "save"  # {"reason": ..., "at": ...}: save after the next step; each change of it asks once
KEY_SCRIPT_ENDED = "script-ended"  # {"worker": ...}: of a run of collectives; who comes later is not needed
KEY_DATA_SERVICE = "data-service/"  # + what: dispatchers and workers of Horovod's data service, and that it is over
KEY_DONE = "done"  # {"step": N, "digest": ...}: the run is finished
KEY_LIARS = "liar/"  # + id: {"step": N, "what": ..., "host": ...}: the others found this worker's bits wrong
KEY_REWINDS = "rewinds"  # how often the run went back, how far, and which steps it passes: core/rewinds.py
KEY_RUN = "run"  # {"id": ...}: of this run and no other, also of no other by its name; created by the first worker
KEY_ORIGIN = "origin"  # {"step": N}: where the run began; 0 unless it was given a checkpoint of another
KEY_INCARNATIONS = "incarnation/"  # + slot or slot@host: how many workers this slot has had
KEY_SERVERS = "server/"  # + id: a parameter server's registration, under its lease
KEY_DEAD_SERVERS = "dead-server/"  # + id: {"start": N}: the agent saw this server's process end
KEY_SLICES = "slices"  # {"slices": N, "fingerprint": ...}: how the parameters are cut; created by the first worker
KEY_SLICE = "slice/"  # + name: who replicates this slice, and under which epoch
KEY_TABLES = "table/"  # + name: {"shards": N, "settings": ...}: an embedding table; created by the first worker
KEY_ROWS_SENT = "rows-sent/"  # + worker: {"step": N}: its updates of tables are acknowledged, at a checkpoint of N
KEY_TARGETS = "slice-target/"  # + name: who should; the slice's primary sees to it
KEY_LEAVING = "leaving-server/"  # + id: {}: its host leaves the run; its slices move to others first
KEY_SLOW_SERVERS = "slow-server/"  # + id: {"by": host, "times": ..., "reason": ...}: others lead its slices
KEY_STARTED_OVER = "started-over"  # {"number": N, "step": S}: slices were lost N times, and all began anew from step S
EVERY_START = 1 << 30  # of a server that is given up: all processes that it has had, and will have


@dataclass(frozen=True)
class View:
    """An agreed membership. Numbers grow by one; members are worker ids in rank order."""

    number: int
    members: tuple[str, ...]
    reason: str = ""
    late: tuple[tuple[str, int], ...] = ()  # who was left behind and is not back, and the view that left it behind

    def rank(self, worker: str) -> int:
        return self.members.index(worker)

    def encode(self) -> bytes:
        late = {"late": dict(self.late)} if self.late else {}
        return encode_json({"number": self.number, "members": list(self.members), "reason": self.reason, **late})

    @classmethod
    def decode(cls, data: bytes) -> View:
        fields = decode_json(data)
        try:
            late = tuple((str(id), int(number)) for id, number in fields.get("late", {}).items())
            return cls(int(fields["number"]), tuple(map(str, fields["members"])), str(fields["reason"]), late)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ProtocolError(f"not a view: {data[:80]!r}") from error


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What a worker says of itself in the ledger. `pid_started` guards against a reused process id."""

    id: str
    host: str
    pid: int
    pid_started: int
    address: str  # "unix:/path" or "tcp:host:port"
    fingerprint: str  # of this machine's arithmetic
    local: str = ""  # "unix:/path" for workers of the same host, where `address` is for those of others

    def encode(self) -> bytes:
        return encode_json(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Registration:
        fields = decode_json(data)
        try:
            return cls(
                id=str(fields["id"]),
                host=str(fields["host"]),
                pid=int(fields["pid"]),
                pid_started=int(fields["pid_started"]),
                address=str(fields["address"]),
                fingerprint=str(fields["fingerprint"]),
                local=str(fields.get("local", "")),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"not a registration: {data[:80]!r}") from error


def worker_id(slot: int, incarnation: int, host: str = "") -> str:
    """`w3.2` is the second worker that slot 3 has had; in a run on several hosts, `w3.2@alpha`."""
    return f"w{slot}.{incarnation}@{host}" if host else f"w{slot}.{incarnation}"


def is_worker(who: str) -> bool:
    """Whether a writer of events is one: agents and parameter servers write, too."""
    return who.startswith("w")


def slot_of(worker: str) -> int:
    return int(worker[1:].partition(".")[0])


def incarnation_of(worker: str) -> int:
    return int(worker.partition("@")[0].partition(".")[2])


def is_server(name: str) -> bool:
    """Whether it names a parameter server, `s0.2@alpha`, and not a worker."""
    return name.startswith("s")


def host_of(worker: str) -> str:
    """The host in its name; empty in a run on one host."""
    return worker.partition("@")[2]


def encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def decode_json(data: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"not a JSON object: {data[:80]!r}")
    return value


def decode_whole(data: bytes, name: str, default: int = 0) -> int:
    """A whole number from 0 on, out of an object."""
    value = decode_json(data).get(name, default)
    if type(value) is not int or value < 0:
        raise ProtocolError(f"{name} is {value!r:.40}, not a whole number")
    return value
