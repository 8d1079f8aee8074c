"""The record of rewinds: how often a run went back, how far, and which steps it passes since. Pure.

It lives under one key of the ledger and only grows, by compare-and-set, so that members that see the same and ask for
the same become one entry. A worker reads it once, when it joins: whoever finds a longer record later has a state that
the run has gone back from, and ends. A checkpoint says how many rewinds its worker knew of, and so it can be told for
ever which ones the run has gone back from: those that are above an entry that was made after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.core.words import decode_json, encode_json

RECORDS_MAX = 64
PASSED_MAX = 1024  # steps, in one record
REASON_MAX = 300
WHERE_MAX = 300
DIGEST_MAX = 64
DIVERGED = "diverged"  # the kind of those that join's non_finite asks for


@dataclass(frozen=True, kw_only=True)
class Clue:
    """What workers differed in, so that it is known again if it comes back."""

    step: int
    where: str
    digest: str  # what the one who was wrong said

    def bounded(self) -> Clue:
        return Clue(step=self.step, where=self.where[:WHERE_MAX], digest=self.digest[:DIGEST_MAX])

    def fields(self) -> dict[str, Any]:
        return {"step": self.step, "where": self.where, "digest": self.digest}

    @classmethod
    def of(cls, fields: Any) -> Clue:
        return cls(step=int(fields["step"]), where=str(fields["where"]), digest=str(fields["digest"]))


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """One of them. `back_to`: the run goes on from a state of at most so many applied steps."""

    back_to: int
    passed: tuple[int, ...]  # steps that are numbered and committed, but neither computed nor applied from now on
    reason: str
    kind: str = DIVERGED  # who asks: bounds are counted for each kind
    evict: tuple[str, ...] = ()  # workers that the asker does not trust any more
    clue: Clue | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "back_to": self.back_to,
            "passed": list(self.passed),
            "reason": self.reason[:REASON_MAX],
            "kind": self.kind,
            "evict": list(self.evict),
            **({"clue": self.clue.fields()} if self.clue is not None else {}),
        }

    @classmethod
    def of(cls, fields: Any) -> Rewind:
        try:
            found = cls(
                back_to=int(fields["back_to"]),
                passed=tuple(map(int, fields["passed"])),
                reason=str(fields["reason"]),
                kind=str(fields["kind"]),
                evict=tuple(map(str, fields["evict"])),
                clue=Clue.of(fields["clue"]) if "clue" in fields else None,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"not a rewind: {fields!r:.80}") from error
        if found.back_to < 0 or len(found.passed) > PASSED_MAX or any(step < 0 for step in found.passed):
            raise ProtocolError(f"not a rewind: {fields!r:.80}")
        return found


@dataclass(frozen=True)
class Rewinds:
    """All of a run, oldest first."""

    records: tuple[Rewind, ...] = ()

    @property
    def number(self) -> int:
        return len(self.records)

    @property
    def passed(self) -> frozenset[int]:
        """Steps that this run does not train on, whichever record says so: a later rewind may go back before them."""
        return frozenset(step for record in self.records for step in record.passed)

    @property
    def evicted(self) -> frozenset[str]:
        return frozenset(worker for record in self.records for worker in record.evict)

    def count(self, kind: str) -> int:
        return sum(record.kind == kind for record in self.records)

    def believes(self, step: int, known: int) -> bool:
        """Whether a state after `step` steps, of a worker that knew of `known` rewinds, is still one of this run."""
        return all(step <= record.back_to for record in self.records[known:])

    def with_(self, record: Rewind) -> Rewinds:
        return Rewinds((*self.records, record))

    def encode(self) -> bytes:
        return encode_json({"rewinds": [record.fields() for record in self.records]})

    @classmethod
    def decode(cls, data: bytes) -> Rewinds:
        listed = decode_json(data).get("rewinds")
        if not isinstance(listed, list) or len(listed) > RECORDS_MAX:
            raise ProtocolError(f"not a record of rewinds: {data[:80]!r}")
        return cls(tuple(map(Rewind.of, listed)))
