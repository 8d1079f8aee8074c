"""The phases of a worker and where each may lead: the table that the machine obeys and the diagram is drawn from."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Phase(Enum):
    WAITING = "waiting"  # not in the view: a joiner or a spare
    FORMING = "forming"  # in a view whose members are telling each other where they stand
    LOADING = "loading"  # fetching the snapshot from peers
    COMPARING = "comparing"  # without state, while those who have it compare theirs
    RECEIVING = "receiving"  # being sent the reduced gradient of a step that others have applied
    COMPUTING = "computing"  # the user's loop has the shards
    STOPPING = "stopping"  # its script wants to stop before this step; asking whether all members want that
    GATHERING = "gathering"  # all own shards are summed; waiting for the others' Ready
    REDUCING = "reducing"  # sums are being added; waiting for the others' Done
    APPLYING = "applying"  # the user's loop has the reduced gradient
    TURNING = "turning"  # between two steps, a moment for the ledger to show the view that is due
    BEHIND = "behind"  # the others went on without it; it asks them for the mean of the step it is in
    BROKEN = "broken"  # the view's group is gone; a new view is due
    ENDED = "ended"


# Where each phase may lead. The diagram in ARCHITECTURE.md is drawn from this table.
TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.WAITING: frozenset({Phase.FORMING, Phase.ENDED}),
    Phase.FORMING: frozenset(
        {Phase.LOADING, Phase.COMPARING, Phase.RECEIVING, Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}
    ),
    Phase.LOADING: frozenset({Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}),
    Phase.COMPARING: frozenset({Phase.BROKEN, Phase.ENDED}),
    Phase.RECEIVING: frozenset({Phase.APPLYING, Phase.BROKEN, Phase.ENDED}),
    Phase.COMPUTING: frozenset({Phase.STOPPING, Phase.GATHERING, Phase.BROKEN, Phase.ENDED}),
    Phase.STOPPING: frozenset({Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}),
    Phase.GATHERING: frozenset({Phase.REDUCING, Phase.BROKEN, Phase.ENDED}),
    Phase.REDUCING: frozenset({Phase.APPLYING, Phase.BROKEN, Phase.ENDED}),
    Phase.APPLYING: frozenset({Phase.COMPUTING, Phase.TURNING, Phase.BROKEN, Phase.WAITING, Phase.ENDED}),
    Phase.TURNING: frozenset({Phase.COMPUTING, Phase.BROKEN, Phase.ENDED}),
    Phase.BEHIND: frozenset({Phase.APPLYING, Phase.ENDED}),
    Phase.BROKEN: frozenset({Phase.FORMING, Phase.BEHIND, Phase.WAITING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
# Phases in which the machine waits for its peers. In COMPUTING and APPLYING the user's loop has the word.
PEER_PHASES: Final = frozenset(
    {
        Phase.FORMING,
        Phase.LOADING,
        Phase.COMPARING,
        Phase.RECEIVING,
        Phase.STOPPING,
        Phase.GATHERING,
        Phase.REDUCING,
        Phase.TURNING,
    }
)
# Phases in the middle of a step. A newer view that is already agreed on can wait for the step's end.
STEP_PHASES: Final = frozenset({Phase.COMPUTING, Phase.STOPPING, Phase.GATHERING, Phase.REDUCING, Phase.APPLYING})
