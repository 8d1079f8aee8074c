"""How a worker without state gets it from its peers' memory: a few of them, dialled at once."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration, slot_of
from holdfast.net.greeting import Hello
from holdfast.net.wires import Wires
from holdfast.state.snapshot import Holder, Snapshot
from holdfast.state.transfer import fetch

SNAPSHOT = "snapshot"  # the purpose of these connections; a Hello's number is the view's
SOURCES_MAX = 2  # peers that a joiner fetches from at once


class Fetcher:
    def __init__(self, me: str, wires: Wires, holder: Holder, *, gradient_bytes: int) -> None:
        self._me = me
        self._wires = wires
        self._holder = holder
        # Optimizers keep a few numbers per parameter, extras a copy or two: more than this is no snapshot of ours.
        self._bytes_max = 16 * gradient_bytes + (1 << 30)

    def fetch(
        self, view: int, step: int, sources: Sequence[str], registrations: Mapping[str, Registration]
    ) -> Snapshot | None:
        """The snapshot of `step`, its parameters where they live; None if nobody answers.

        PeerError or IntegrityError: it was begun, and what is in the parameters now cannot be used.
        """
        dialled = self._dial(view, sources, registrations)
        if not dialled:
            return None
        try:
            return fetch(
                list(dialled.values()),
                bytes_max=self._bytes_max,
                expect_step=step,
                names=list(dialled),
                place=self._holder.place,
                kernel=self._wires.kernel,
            )
        finally:
            for sock in dialled.values():
                sock.close()

    def _dial(
        self, view: int, sources: Sequence[str], registrations: Mapping[str, Registration]
    ) -> dict[str, socket.socket]:
        """Not the same ones for every joiner: each must hash its state, and they share one memory."""
        first = slot_of(self._me) % len(sources)
        dialled: dict[str, socket.socket] = {}
        for source in [*sources[first:], *sources[:first]]:
            registration = registrations.get(source)
            if registration is None or len(dialled) == SOURCES_MAX:
                continue
            with suppress(PeerError):
                dialled[source] = self._wires.ask(registration, Hello(SNAPSHOT, view, self._me))
        return dialled
