"""What goes into the machine of a replica and what comes out: the log's entries, messages, events, effects.

A payload is a reference: the bytes are the runtime's, which moves them along with the entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.log.configuration import Configuration, LogEnd

Payload = str | int
NOTHING = LogEnd(0, 0)

# ---- what a log consists of


STORES_NO_MORE = "store no more for now"  # what a replica decides whose disk has failed or is full


@dataclass(frozen=True, slots=True)
class Update:
    """Sequences of a worker's incarnation begin at 1. Incarnations of a worker's name only grow.

    `nbytes` is how large the payload is: logs, and what is under way to a replica, are bounded by it too.
    """

    worker: str
    incarnation: int
    sequence: int
    payload: Payload
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """The first entry of an epoch. When a majority has it, everything before it is committed."""

    primary: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """This incarnation of a worker is gone: its sequences need not be remembered, and nothing of it is taken."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Entry:
    epoch: int
    index: int
    content: Update | Opened | Forgotten


@dataclass(frozen=True, slots=True)
class Remembered:
    """A worker's row of the table of updates that are in the log: see deduplication.py."""

    worker: str
    incarnation: int
    gone: bool
    contiguous: int
    indices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after everything up to `end`, and the table that belongs to it. The state itself is the runtime's."""

    end: LogEnd = NOTHING
    remembered: tuple[Remembered, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """What a replica finds of its own when it starts again."""

    snapshot: Snapshot = Snapshot()
    entries: tuple[Entry, ...] = ()
    promised: int = 0


# ---- messages between the replicas of a slice


@dataclass(frozen=True, slots=True)
class Append:
    """From the primary. `sent_at` is its own clock's, and comes back to it: the lease is counted from there.

    `start` says which process it is: a server that kept what it stored starts again under its name.
    """

    epoch: int
    start: int
    sent_at: float
    previous: LogEnd
    entries: tuple[Entry, ...]
    committed: int


@dataclass(frozen=True, slots=True)
class Appended:
    """To the primary: I hold your log up to here, as durably as promised, and help nobody to depose you for a while."""

    epoch: int
    sent_at: float
    matched: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """To the primary: what you sent does not follow on what I have. Try after `try_after`."""

    epoch: int
    sent_at: float
    try_after: int


@dataclass(frozen=True, slots=True)
class Offer:
    """From the primary: the entries that you need next are gone; take this snapshot."""

    epoch: int
    start: int
    sent_at: float
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Seal:
    """From a candidate: take nothing of this epoch any more, and say where your log ends.

    `released`: the primary is known to have ended or resigned, so that its lease binds nobody.
    """

    epoch: int
    released: bool


@dataclass(frozen=True, slots=True)
class Sealed:
    epoch: int
    end: LogEnd


@dataclass(frozen=True, slots=True)
class Fenced:
    """To a primary: I have sealed your epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Resigned:
    """From a primary: I lead no more in this epoch, and serve no reads."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Configured:
    """The ledger has this: you seem not to know. Whoever is cut off from the ledger learns of it so."""

    configuration: Configuration
    revision: int


Message = Append | Appended | Mismatch | Offer | Seal | Sealed | Fenced | Resigned | Configured


# ---- events


@dataclass(frozen=True, slots=True)
class LedgerSaw:
    configuration: Configuration
    revision: int


@dataclass(frozen=True, slots=True)
class Heard:
    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Pushed:
    """`client` is where the answer goes."""

    client: str
    update: Update


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """`fresh`: an answer that may be old is of no use."""

    client: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class Persisted:
    """Everything up to this ticket is stored, as durably as the effect asked for."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Nothing from this ticket on, up to the newest one handed out, is stored; what came before is."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The snapshot that `TakeSnapshot` asked for is held, as durably as the log is."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotFetched:
    """The snapshot that `FetchSnapshot` asked for, or a newer one, is held here, as durably as the log is.

    `asked` is what was asked for.
    """

    snapshot: Snapshot
    asked: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """It was not taken or not fetched. It is asked for again when it is due again."""

    snapshot: Snapshot
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """Somebody who must know says that this process of a server has ended."""

    server: str
    start: int


@dataclass(frozen=True, slots=True)
class LedgerReached:
    """Whether the ledger answers. It may be wrong: nothing hangs on it but when the next epoch is sought."""

    answers: bool


@dataclass(frozen=True, slots=True)
class WorkerGone:
    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class AddReplica:
    server: str


@dataclass(frozen=True, slots=True)
class RemoveReplica:
    server: str


@dataclass(frozen=True, slots=True)
class HandOver:
    server: str


@dataclass(frozen=True, slots=True)
class StopAdding:
    """A replica that is being added is gone, or is not wanted any more."""

    server: str


@dataclass(frozen=True, slots=True)
class CutLog:
    """There is no room for more: drop what every replica that is heard of has, and keep nothing for the late."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Wish = AddReplica | RemoveReplica | HandOver
Event = (
    LedgerSaw
    | Heard
    | Pushed
    | ReadAsked
    | Persisted
    | StoreFailed
    | SnapshotTaken
    | SnapshotFetched
    | SnapshotFailed
    | Exited
    | LedgerReached
    | WorkerGone
    | Wish
    | StopAdding
    | CutLog
    | Tick
)


# ---- effects, performed in order


@dataclass(frozen=True, slots=True)
class Send:
    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Put these entries into the stored log. Whatever it has from the first one's index on is replaced."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Promise:
    """Remember that nothing of epochs up to this one is taken any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Rebase:
    """The stored log begins anew after this end, which a snapshot covers."""

    end: LogEnd


@dataclass(frozen=True, slots=True)
class Store:
    """Answered by Persisted or StoreFailed. `durable`: only once it is on disk; otherwise memory is enough."""

    ticket: int
    operation: Write | Promise | Rebase
    durable: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Committed: in log order, each once."""

    index: int
    update: Update


@dataclass(frozen=True, slots=True)
class Forget:
    """Committed: this worker is gone. In log order, as updates are."""

    index: int
    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    client: str
    update: Update
    index: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Not now or not here: the outcome is open, and the update may be sent again, to `primary` where it is known.

    `final`: the worker is known to be gone, and nothing more of it will be taken.
    """

    client: str
    update: Update
    reason: str
    primary: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Serve:
    """Answer with the state as it is now, after everything applied up to `index`."""

    client: str
    index: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class RefuseRead:
    client: str
    reason: str
    primary: str


@dataclass(frozen=True, slots=True)
class Propose:
    """Compare-and-set in the ledger. What came of it is heard as LedgerSaw; who is not sure, reads."""

    configuration: Configuration
    expected_revision: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Of the state as it is now, before anything more is applied."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    peer: str
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Restore:
    """The state becomes that of this snapshot, which is held here."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """The stored log up to this index is not needed any more."""

    through: int


@dataclass(frozen=True, slots=True)
class Retire:
    """This server replicates the slice no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """A decision, for the event log."""

    decision: str
    reason: str


Effect = (
    Send
    | Store
    | Apply
    | Forget
    | Acknowledge
    | Refuse
    | Serve
    | RefuseRead
    | Propose
    | TakeSnapshot
    | FetchSnapshot
    | Restore
    | DropPrefix
    | Retire
    | Tell
)
