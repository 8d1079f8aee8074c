"""What a server tells of itself now and then: its slices, the length of its logs, and how long the others take.

`ServerAccount` belongs to the server's thread. How long another server takes is the time from sending it entries, or a
sign of life, until its confirmation is here: the network, its disk and its own haste are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.servers.replica import Replica

TELL_S = 2.0
ANYWAY_S = 20.0  # also where nothing has changed
KEPT = 64  # of the newest confirmations of each server
SLICES_TOLD_MAX = 64


class ServerAccount:
    """server.Account. `tell` is given the fields of the event `serving`."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda fields: None) -> None:
        self._tell = tell
        self._after_s: dict[str, deque[float]] = {}
        self._tell_at = self._anyway_at = 0.0
        self._told: dict[str, Any] = {}
        self._acknowledged = 0  # by slices that are not here any more

    def confirmed(self, peer: str, after_s: float) -> None:
        self._after_s.setdefault(peer, deque(maxlen=KEPT)).append(after_s)

    def dropped(self, replica: Replica) -> None:
        """It is no replica here any more; what it acknowledged counts."""
        self._acknowledged += replica.acknowledged

    def look(self, now: float, replicas: Mapping[str, Replica], log_bytes: int) -> None:
        """Tell it if it is time for that, and something is to be said."""
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_S
        fields = self._fields(replicas, log_bytes)
        lags_s = fields.pop("lags_s")
        if fields != self._told or now >= self._anyway_at:
            self._told, self._anyway_at = fields, now + ANYWAY_S
            self._tell({**fields, "lags_s": lags_s})

    def _fields(self, replicas: Mapping[str, Replica], log_bytes: int) -> dict[str, Any]:
        lags_s = {peer: round(median(times), 5) for peer, times in sorted(self._after_s.items()) if times}
        self._after_s.clear()  # only what is new counts: a server that is gone is not told of for ever
        entries = 0
        slices: dict[str, list[Any]] = {}
        for name, replica in sorted(replicas.items()):
            length = len(replica.machine.copy.tail)
            entries += length
            if len(slices) < SLICES_TOLD_MAX:
                slices[name] = ["primary" if replica.leads else "replica", replica.machine.epoch, length]
        return {
            "slices": slices,
            "leads": sum(replica.leads for replica in replicas.values()),
            "entries": entries,
            "log_bytes": log_bytes,
            "updates": self._acknowledged + sum(replica.acknowledged for replica in replicas.values()),
            "lags_s": lags_s,
        }
