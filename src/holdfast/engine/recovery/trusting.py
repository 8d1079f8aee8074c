"""A worker's part in finding out who is left out of steps by a robust rule: it keeps the book, and tells of it.

Belongs to the thread of the user's loop. What follows is decided by all members together, from what each says in its
Ready (membership/auditing.py): more than half of them must distrust the same worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.core.config import RunConfig
from holdfast.core.words import host_of
from holdfast.data.shards import ShardPlan
from holdfast.events import EventLog
from holdfast.membership.trusting import Distrust, TrustBook
from holdfast.reduce.aggregators import Aggregator

TELL_S = 2.0
NAMED_MAX = 64  # workers in one event; of more, the most suspect


class Trusting:
    """`book`: None where nobody is ever left out."""

    def __init__(self, book: TrustBook | None, *, me: str, events: EventLog, clock: Callable[[], float]) -> None:
        # Whether a step's shards are drawn at random, and of one size.
        self.alike: Callable[[int], bool] = lambda step: True
        self._book = book
        self._me = me
        self._events = events
        self._clock = clock
        self._tell_at = 0.0

    def committed(
        self,
        step: int,
        members: Sequence[str],
        brought: Sequence[tuple[str, tuple[int, ...]]],
        trusted: tuple[bool, ...] | None,
    ) -> None:
        """`brought`: whose shards the step was made of; `trusted`: which of these, in the order of shards."""
        book = self._book
        if book is None or trusted is None:
            return
        shards = sorted(shard for _, mine in brought for shard in mine)
        if len(trusted) != len(shards):  # a peer's memory, which it may have changed
            return
        book.count(brought, dict(zip(shards, trusted, strict=True)), alike=self.alike(step))
        here = [member for member in members if host_of(member) == host_of(self._me)]
        if here[:1] == [self._me] and self._clock() >= self._tell_at:
            self._tell_at = self._clock() + TELL_S
            self._tell(step, members, book)

    def passed(self, step: int, too_few: tuple[int, int, int]) -> None:
        """Whether this step changed nothing, since its shards were too few for the rule."""
        at, count, least = too_few
        if at == step:
            self._events.write("skipped", step=step, reason=f"{count} shards came, and the robust rule needs {least}")

    def _tell(self, step: int, members: Sequence[str], book: TrustBook) -> None:
        known = [member for member in members if member in book.accounts]
        named = sorted(known, key=lambda member: -book.accounts[member].suspicion)[:NAMED_MAX]
        self._events.write(
            "left_out",
            step=step,
            shards={member: book.accounts[member].shards for member in named},
            left_out={member: book.accounts[member].left_out for member in named},
            suspicion={member: round(book.accounts[member].suspicion, 3) for member in named},
        )

    def distrusts(self, members: Sequence[str]) -> tuple[Distrust, ...]:
        return self._book.distrusts(members) if self._book is not None else ()

    def evicted(self, step: int, worker: str, reason: str) -> None:
        """All have decided it."""
        account = self._book.accounts.get(worker) if self._book is not None else None
        told = {} if account is None else {"shards": account.shards, "left_out": account.left_out}
        self._events.write("distrusted", step=step, worker=worker, reason=reason, **told)


def book_for(aggregator: Aggregator, *, shards: int, f: int | None, whole: bool) -> TrustBook | None:
    return None if f is None else TrustBook(shards=shards, f=f, least=aggregator.least, whole=whole)


def alike_shards(config: RunConfig, plan: ShardPlan, *, whole: bool) -> Callable[[int], bool]:
    """Whether a step's shards are draws of one size from the same data: so that each is as likely to be left out."""
    if not config.shuffle or config.order or config.batches:
        return lambda step: False
    return (lambda step: plan.samples_in(step) == config.batch_size) if whole else (lambda step: True)
