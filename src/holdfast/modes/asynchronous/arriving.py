"""How a worker comes by the run's state in the asynchronous mode, and how a checkpoint does: both from the servers.

The first worker creates the slices, with what it finds in storage or with its own initial state; the others attach. A
checkpoint is a state of all slices in which every update is whole, and says which units of data are not in it.
Belongs to the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.core.errors import PeerError
from holdfast.modes.asynchronous.exchange import UpdateExchange
from holdfast.modes.asynchronous.extras import TravellingExtras
from holdfast.modes.asynchronous.given_steps import GivenSteps
from holdfast.modes.asynchronous.served_state import ServedState
from holdfast.servers.port import Piece, Versions
from holdfast.servers.slicing import Segment
from holdfast.servers.units_port import ServerLines, UnitsPosition

OPEN_S = 60.0  # for servers that start
CAPTURE_S = 120.0  # for all attempts to capture a state and read it: failing over takes a second
CAPTURES = 3  # that the table of units has gone beyond
GRACE_S = 30.0  # for the exchange to be through with what it was told before, and with the last attempt
BEGUN_S = 20.0  # for whoever creates the slices to say with which unit the run begins
LOOK_S = 0.05
EXTRAS_S = 15.0  # for the others' extras: as long as their next step takes


@dataclass(frozen=True)
class Arrival:
    """`step`: where this worker's loop begins; None: at the beginning, with the state that the script has built."""

    step: int | None
    clock: int
    created: bool


def arrive(
    lines: ServerLines,
    state: ServedState,
    data: GivenSteps,
    staged: Sequence[torch.Tensor],
    *,
    extras: TravellingExtras,
    search: Callable[[], int | None],
    wait: Callable[[float], None],
) -> Arrival:
    """`search` looks for a checkpoint and puts it in place. It is asked only where the servers have nothing yet."""
    found: list[int | None] = []

    def initial(segment: Segment) -> Piece:
        if not found:
            found.append(search())
        return state.initial(segment)

    created = lines.parameters.open(state.layout, initial, timeout_s=OPEN_S)
    if created:
        step = found[0] if found else search()
        unit, left = data.begins_at if step is not None else (0, ())
        lines.units.begin(max(unit, step or 0), left)
    standing = _begun(lines, wait)
    step = standing.next if standing.next or not created else None
    if not created and (brought := _wished(lines, extras, wait)) is not None:
        step = brought
    clock = lines.parameters.join()
    lines.parameters.pull(staged).wait(OPEN_S)
    state.load(staged)
    return Arrival(step, clock, created)


def _wished(lines: ServerLines, extras: TravellingExtras, wait: Callable[[float], None]) -> int | None:
    """Somebody's extras are in place, after so many steps; None: nobody has brought any."""
    wish, left_s = lines.units.wish(), EXTRAS_S
    while (found := lines.units.extras(wish)) is None and left_s > 0:
        wait(LOOK_S)
        left_s -= LOOK_S
    if found is None or not found.text:
        return None
    extras.load(found.text)
    return found.step


def _begun(lines: ServerLines, wait: Callable[[float], None]) -> UnitsPosition:
    left_s = BEGUN_S
    while left_s > 0:
        standing = lines.units.standing()
        if standing is not None and standing.begun:
            return standing
        wait(LOOK_S)
        left_s -= LOOK_S
    raise PeerError("the worker that created the parameter servers' slices was lost before the run had begun")


def collect(lines: ServerLines, exchange: UpdateExchange, state: ServedState, data: GivenSteps) -> Versions:
    """A consistent state of all slices is in the model and its optimizers: for whoever saves it now.

    What a primary has captured ends with it, so a capture that cannot be read is made again. PeerError if none could.
    """

    def capture() -> tuple[Versions, UnitsPosition]:
        give_up, beyond, why = time.monotonic() + CAPTURE_S, 0, ""
        while beyond < CAPTURES and (left_s := give_up - time.monotonic()) > 0:
            try:
                taken = lines.parameters.capture(timeout_s=left_s)
                try:
                    standing = lines.units.standing(taken.clocks)
                    if standing is not None and time.monotonic() < give_up:
                        state.fill_in(taken.pieces())  # the training thread waits for it
                        return taken.versions, standing
                    beyond, why = beyond + 1, "the workers are too fast for it"
                finally:
                    taken.close()
            except PeerError as error:
                why = error.message
                time.sleep(LOOK_S)
        raise PeerError(f"no state of all slices could be had: {why}")

    versions, standing = exchange.call(capture, CAPTURE_S + GRACE_S)
    data.begins_at = standing.next, standing.left
    return versions
