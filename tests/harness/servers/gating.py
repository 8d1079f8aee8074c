"""Cuts around one server's process: from other servers, and from the ledger. A file says which.

What passes a cut is not lost but late, as over TCP: nothing is read from or written to a connection while it is cut,
and the ledger does not answer. So the process sees neither an error nor an end.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from holdfast.core.errors import LedgerUnavailable
from holdfast.ledger.port import Change, Ledger, Watch
from holdfast.servers.connections import Inbound
from holdfast.servers.links import Link
from holdfast.servers.server import SliceServer

LEDGER = "ledger"
LOOK_S = 0.01


class Gate:
    """Read by any thread of the server's process; written by the test's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = 0.0
        self._cut: frozenset[str] = frozenset()

    def cut(self, others: set[str]) -> None:
        partial = self._path.with_suffix(".new")
        partial.write_text(json.dumps(sorted(others)))
        partial.replace(self._path)

    def is_cut(self, other: str) -> bool:
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._cut = frozenset(json.loads(self._path.read_text())) if self._path.exists() else frozenset()
        return other in self._cut

    def stand_before(self) -> None:
        """Let nothing of this process pass while it is cut."""
        flush, attend = SliceServer._flush_link, SliceServer._attend

        def gated_flush(server: SliceServer, link: Link) -> None:
            if not self.is_cut(link.server):
                flush(server, link)

        def gated_attend(server: SliceServer, inbound: Inbound, mask: int) -> None:
            if self.is_cut(inbound.sender):
                time.sleep(0.001)  # it stays readable
            else:
                attend(server, inbound, mask)

        SliceServer._flush_link = gated_flush  # type: ignore[method-assign,assignment]
        SliceServer._attend = gated_attend  # type: ignore[method-assign,assignment]


class GatedLedger:
    """port.Ledger that does not answer while it is cut off."""

    def __init__(self, ledger: Ledger, gate: Gate) -> None:
        self._ledger = ledger
        self._gate = gate

    def _check(self) -> None:
        if self._gate.is_cut(LEDGER):
            raise LedgerUnavailable("it is cut off")

    def __getattr__(self, name: str) -> Any:
        if name != "close":
            self._check()
        return getattr(self._ledger, name)

    def watch(self, prefix: str, *, revision: int) -> Watch:
        self._check()
        return GatedWatch(self._ledger.watch(prefix, revision=revision), self._check)


class GatedWatch:
    def __init__(self, watch: Watch, check: Any) -> None:
        self._watch = watch
        self._check = check
        self._late: tuple[Change, ...] = ()

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        self._late += self._watch.next(min(timeout_s, 0.1))
        self._check()
        changes, self._late = self._late, ()
        return changes

    def close(self) -> None:
        self._watch.close()
