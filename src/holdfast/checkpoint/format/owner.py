"""Whose a place for checkpoints is: a record beside them, so that two runs never write into one place.

Records are numbered, `owner-000001.json`, and the one with the highest number holds. One is made only where no such
name is, which storage does for one of several at once: so of two runs that want a place at the same time, one gets it,
and a run whose place was taken finds a higher number before its next commit. Old ones are deleted.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass, replace

from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import NotStored, ProtocolError, StorageRefused

PREFIX = "owner-"
RECORD_BYTES_MAX = 64 * 1024
PROBE_BYTES = 512
_NAME = re.compile(r"owner-(\d{6})\.json")


@dataclass(frozen=True, kw_only=True)
class Owner:
    run: str  # its name; empty for a run of one
    id: str  # of this run and no other, also of no other by that name
    host: str = ""
    pid: int = 0  # of a run of one
    pid_started: int = 0
    directory: str = ""  # of a run with an agent
    created_s: float = 0.0
    released: bool = False  # whoever comes next may have the place, with what is there

    def encode(self) -> bytes:
        return json.dumps({"format": "holdfast/1", **asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Owner:
        try:
            fields = json.loads(data)
            known = {name: fields[name] for name in cls.__dataclass_fields__}
            owner = cls(**known)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"not an owner's record: {data[:80]!r}") from error
        kinds = {"pid": int, "pid_started": int, "released": bool, "created_s": (int, float)}
        if not all(isinstance(value, kinds.get(name, str)) for name, value in known.items()):  # type: ignore[arg-type]
            raise ProtocolError(f"not an owner's record: {data[:80]!r}")
        return owner

    @property
    def words(self) -> str:
        name = f"the run {self.run}" if self.run else "a run without a name"
        return f"{name} on {self.host}" if self.host else name


def newest_owner(storage: Storage) -> tuple[int, Owner | None]:
    """The number that holds, and whose it is; (0, None): nobody's. StorageRefused if that cannot be told."""
    numbers = sorted(int(found[1]) for entry in storage.list(PREFIX) if (found := _NAME.fullmatch(entry.name)))
    if not numbers:
        return 0, None
    name = _name(numbers[-1])
    try:
        return numbers[-1], Owner.decode(storage.read(name, RECORD_BYTES_MAX))
    except NotStored:
        return newest_owner(storage)  # a newer one has come meanwhile, and this one was deleted
    except ProtocolError as error:
        hint = f"delete {name} there, if no run uses the place"
        raise StorageRefused(f"{storage.uri}/{name} does not say whose the place is", hint=hint) from error


def create_owner(storage: Storage, number: int, owner: Owner) -> bool:
    """Make this the record that holds; False: somebody else was faster."""
    if not storage.create(_name(number), owner.encode()):
        return False
    for entry in storage.list(PREFIX):
        found = _NAME.fullmatch(entry.name)
        if found and int(found[1]) < number:
            storage.delete(entry.name)
    return True


def release(storage: Storage) -> Owner | None:
    """Let the next run that comes have the place. Whose it was; None: nobody's."""
    while True:
        number, owner = newest_owner(storage)
        if owner is None or owner.released:
            return owner
        if create_owner(storage, number + 1, replace(owner, released=True)):
            return owner


def probe(storage: Storage) -> None:
    """Write something small, find it and delete it: whether checkpoints can be kept shows only so. StorageError if not.

    There are stores that say yes to every write into a bucket whose name they do not take, and show nothing of it.
    """
    name = f"probe-{secrets.token_hex(8)}"
    storage.write(name, memoryview(bytes(PROBE_BYTES)))
    listed = any(entry.name == name for entry in storage.list(name))
    storage.delete(name)
    if not listed:
        raise StorageRefused(
            f"{storage.uri} took a file and does not list it, so checkpoints would not be found there",
            hint="look whether the bucket was created properly and its name is a valid one, or choose another place",
        )


def _name(number: int) -> str:
    return f"{PREFIX}{number:06d}.json"
