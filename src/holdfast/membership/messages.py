"""What goes into the machine and what comes out: messages between members, events, effects."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.words import View
from holdfast.membership.auditing import NOTHING, Finding, Said
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Report

MARKS = 1 << 64  # so many marks of saves there are

# ---- messages between members. The group that carries them belongs to one view, whose number is on each.


@dataclass(frozen=True, slots=True)
class Ready:
    """My sums for this step are whole. `change`: another view is due or there; `leaving`, `stop`: after this step.

    `save`: a checkpoint is due after this step; `saving`: not from me, I am still writing an earlier one.
    `mark`: chance, from which all make one mark for the save. `pace`: the seconds that a shard takes me; 0: not known.
    """

    step: int
    shards: tuple[int, ...]
    change: bool = False
    leaving: bool = False
    stop: str = ""
    save: bool = False
    saving: bool = False
    pace: float = 0.0
    said: Said = NOTHING  # what is compared with what the others say, before anything is added
    mark: int = 0
    over: str = ""  # my script wants no further steps, and why: see stopping.py


@dataclass(frozen=True, slots=True)
class Done:
    """My slice of the sum is there for all to read."""

    step: int


@dataclass(frozen=True, slots=True)
class GivenMean:
    """The reduced gradient of a step, for a member that missed it."""

    step: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """I have the state of this step: I read nobody's memory any more."""

    step: int


@dataclass(frozen=True, slots=True)
class Over:
    """My script wants to stop before this step, and why: see stopping.py."""

    step: int
    reason: str


Message = Report | Ready | Done | GivenMean | Fetched | Over
ScriptPlace = tuple[int, int, int, int]  # in a script: see engine/sharing.py


@dataclass(frozen=True, slots=True)
class Shared:
    """What a worker's script has come to outside the shards: by name, at a place in the script. Not for the machine."""

    place: ScriptPlace
    items: tuple[tuple[str, object], ...]


STORED_MAX = 1 << 14  # of one view


@dataclass(frozen=True, slots=True)
class Stored:
    """What a library sets while the view's process group is built: see engine/carrying.py. Not for the machine."""

    key: str
    value: bytes


# ---- events


@dataclass(frozen=True, slots=True)
class LedgerSaw:
    state: LedgerState


@dataclass(frozen=True, slots=True)
class Heard:
    view: int
    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class PeerLost:
    view: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Computed:
    """The user's loop is through with the shards it was given. What is beside the step: as in Ready.

    `shards`: where steps need not be whole, those of this one whose sums are there, whatever it was given.
    """

    step: int
    save: bool = False
    saving: bool = False
    pace: float = 0.0
    said: Said = NOTHING
    mark: int = 0
    shards: tuple[int, ...] | None = None
    over: str = ""


@dataclass(frozen=True, slots=True)
class Reduced:
    step: int


@dataclass(frozen=True, slots=True)
class ReductionFailed:
    """Adding did not come to an end, whatever was heard before: a peer broke off, or has moved on."""

    step: int
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """`save`: the script's lines for it came to something that is to be saved at once, on every worker."""

    step: int
    save: bool = False


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The script wants to stop before this step, which its loop has not taken up."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepRefused:
    """The loop does not take up the step that it was given, since the script wants to stop: do all want that?"""

    step: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The snapshot of a view's plan is in place."""

    step: int


@dataclass(frozen=True, slots=True)
class SourcesDiffer:
    """The sources of a view's plan offer different states of this step. Nothing was written."""

    step: int


@dataclass(frozen=True, slots=True)
class Restored:
    """Storage was searched, as asked. `step`: of the state that is now in place; None: there is no checkpoint."""

    step: int | None


@dataclass(frozen=True, slots=True)
class Knocked:
    """What came of a knock. Comes once for each, `within_s` of it."""

    number: int
    reached: tuple[str, ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Caught:
    """The mean of the step that I was left behind in was asked for. `found`: it is here."""

    step: int
    found: bool


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    LedgerSaw
    | Heard
    | PeerLost
    | Computed
    | Reduced
    | ReductionFailed
    | Applied
    | StopAsked
    | StepRefused
    | Loaded
    | SourcesDiffer
    | Restored
    | Knocked
    | Caught
    | LeaveAsked
    | Tick
)


# ---- effects


@dataclass(frozen=True, slots=True)
class Register:
    """Take a lease and register: our registration is not in the ledger, and nobody has gone on without us.

    Who is in a view is registered only while the ledger's view is still the one that it knows. Else a newer one may
    have left it out, and the others would take it in again though it still computes in the old one.
    """

    while_view: int | None = None  # the revision of that view; None: we are in none, or are expected back


@dataclass(frozen=True, slots=True)
class Deregister:
    pass


@dataclass(frozen=True, slots=True)
class Propose:
    view: View
    expected: int  # revision of the view that it follows


@dataclass(frozen=True, slots=True)
class Knock:
    """Find out which of these can be reached: connect, prove ourselves, hang up. Their loops may be busy meanwhile."""

    number: int
    peers: tuple[str, ...]
    within_s: float  # who has not answered by then is missed; until then a refusal is tried again


@dataclass(frozen=True, slots=True)
class Publish:
    """Put this worker's roll into the ledger, under its lease."""

    roll: Roll


@dataclass(frozen=True, slots=True)
class Open:
    """Connect to all members of the view."""

    view: View


@dataclass(frozen=True, slots=True)
class Drop:
    """Close every connection of the view, so that the others notice at once."""

    view: int
    reason: str
    peer: str = ""  # who was lost, if that is why


@dataclass(frozen=True, slots=True)
class Broadcast:
    message: Message


@dataclass(frozen=True, slots=True)
class Give:
    """Send the kept gradient of a step."""

    to: str
    step: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Capture the state at the start of `step` and let joiners fetch it until the step commits."""

    step: int
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    step: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Nobody has the training's state: look for a checkpoint, and put the newest that is whole in place."""


@dataclass(frozen=True, slots=True)
class Save:
    """Take part in a checkpoint of the state before `step`. All who took part in the last reduction do.

    `mark` is the same for all of them and was never used before; 0: there is none. `wanted`: by the script, so it waits
    for an earlier one that is on its way, rather than be passed over.
    """

    step: int
    members: tuple[str, ...]
    mark: int = 0
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Hand these shards of the step to the user's loop; sums already held are kept.

    `audits`: others' shards, to be computed too unless they were, compared and not counted.
    """

    step: int
    shards: tuple[int, ...]
    audits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Halt:
    """All members want to stop before this step: the user's loop ends, and does not take it up."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Accuse:
    """Members disagree on what has one answer: write down who said what, and mark who was wrong."""

    finding: Finding


@dataclass(frozen=True, slots=True)
class Reduce:
    step: int
    shards: tuple[tuple[str, tuple[int, ...]], ...]  # who brings which, in rank order
    over: str = ""  # a member's script wants no further steps, and why


@dataclass(frozen=True, slots=True)
class Commit:
    """The reduced gradient is whole: the user's loop applies it."""

    step: int
    received: bool  # from a peer, rather than by taking part in the reduction


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep a copy of this step's mean, which is here, for those that were left behind in it."""

    step: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Catch:
    """Ask these for the mean of the step that I was left behind in."""

    step: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """These are late: the others go on without them. Told once, by the member that proposed it."""

    workers: tuple[str, ...]
    step: int
    waited_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """I was left behind and have the state again: `behind` steps later, `duration_s` after I noticed."""

    step: int
    behind: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class End:
    kind: str  # "evicted", "left", "stopped", "done", "corrupt", "script", "rewind"
    reason: str
    save: bool = False  # nobody may be left who has this state: it must be in storage before the process ends


Effect = (
    Register
    | Deregister
    | Propose
    | Knock
    | Publish
    | Open
    | Drop
    | Broadcast
    | Give
    | Serve
    | Fetch
    | Restore
    | Save
    | Compute
    | Halt
    | Accuse
    | Reduce
    | Commit
    | Keep
    | Catch
    | LeftBehind
    | CaughtUp
    | End
)
