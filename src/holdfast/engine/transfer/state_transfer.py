"""How a worker comes by the training's state, hands it to joiners and has it saved: what the machine's effects ask for.

Owns the desk on which a snapshot lies for joiners. Belongs to the thread of the user's loop; what comes of an effect is
returned as an event for the machine, or as the worker's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.core.errors import IntegrityError, PeerError, StatesDiffer
from holdfast.core.words import Registration, View
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.engine.transfer.fetching import Fetcher
from holdfast.engine.transfer.snapshot_desk import SnapshotDesk
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.modes.capture import GradientCapture
from holdfast.state.snapshot import Holder


class StateTransfer:
    def __init__(
        self,
        capture: GradientCapture,
        holder: Holder,
        *,
        desk: SnapshotDesk,
        fetcher: Fetcher,
        checkpoints: NoCheckpoints,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capture = capture
        self.holder = holder
        self.desk = desk
        self.checkpoints = checkpoints
        self._fetcher = fetcher
        self._events = events
        self._clock = clock

    def serve(self, view: View, effect: m.Serve) -> None:
        self.capture.layout()
        self.desk.offer(view.number, self.holder.capture(effect.step))

    def fetch(self, view: View, effect: m.Fetch, registrations: Mapping[str, Registration]) -> m.Event | m.End:
        started = self._clock()
        self.checkpoints.wait_copied()  # who was left behind may still be saving what it had before
        try:
            snapshot = self._fetcher.fetch(view.number, effect.step, effect.sources, registrations)
        except StatesDiffer as error:
            self._events.write("warning", text=error.message)
            return m.SourcesDiffer(effect.step)
        except (PeerError, IntegrityError) as error:
            # Parameters are received where they live: what was begun cannot be used, neither now nor as a start.
            return m.End("evicted", f"the snapshot did not arrive: {error.message}")
        if snapshot is None:
            return m.PeerLost(view.number, effect.sources[0], "it cannot be reached")
        self.holder.restore(snapshot, adopt=True)
        self.capture.buffers.rebase()
        self.checkpoints.arrived(effect.step)
        duration_s = round(self._clock() - started, 4)
        self._events.write("joined", view=view.number, step=effect.step, duration_s=duration_s, bytes=snapshot.nbytes)
        return m.Loaded(effect.step)

    def search(self, *, wanted: bool) -> m.Restored | None:
        """Look for a checkpoint. None: nothing is known yet, or another view has come meanwhile (not `wanted`)."""
        if not wanted:
            self.checkpoints.search_at(None)
            return None
        found = self.checkpoints.search()
        if found is not None:
            self.capture.buffers.rebase()
        return found
