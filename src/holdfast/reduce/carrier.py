"""A process group of torch for one view: it moves bytes between the members, and adds nothing.

Nobody waits in a call of torch.distributed here: what it moves is asked whether it is there. Invariants:

- All memory that a group reads and writes is its own. One that was given up may still write when whoever made the
  others give it up wakes, and then nobody reads what it has written.
- Each run of bytes says which view and step it is of, and whoever gets it looks.
- `surrender` leaves no reference here: gloo closes its sockets when the last one goes, and that may wait for a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.core.errors import PeerError
from holdfast.core.words import View
from holdfast.devices.copies import CPU, Download, Downloads, send

HEAD_BYTES = 64  # before each run: its stamp. What comes behind it begins on a cache line
BUILD_S = 30.0  # for all members to meet
MOVE_S, MOVE_BYTES_PER_S = 10.0, 20e6  # a move that takes longer has failed
GLOO = "gloo"
NOTHING = torch.empty(0, dtype=torch.uint8)


class CarrierFailed(PeerError):
    """A process group did not move what it was given."""


class Move:
    """Bytes on their way. `arrived` may be read once `is_done`, until the next move of this group."""

    def __init__(self, work: Any, out: torch.Tensor, given: torch.Tensor, downloads: Downloads | None) -> None:
        self._work = work
        self._out = out
        self._given = given  # not given back before it is sent
        self._downloads = downloads
        self._coming: Download | None = None
        self._moved = False

    def is_done(self) -> bool:
        """CarrierFailed if it will never be."""
        if not self._moved:
            try:
                if not self._work.is_completed():
                    return False
                self._work.wait()  # over already: it only says how
            except RuntimeError as error:
                raise CarrierFailed(str(error).partition("\n")[0][:300]) from None
            self._moved = True
            self._coming = self._downloads.begin([self._out]) if self._downloads is not None else None
        return self._coming is None or self._coming.is_here()

    @property
    def arrived(self) -> torch.Tensor:
        assert self._moved
        return self._coming.tensors[0] if self._coming is not None else self._out

    def surrender(self) -> list[Any]:
        held = [self._work, self._out, self._given]
        self._work, self._out, self._given = None, NOTHING, NOTHING
        return held


class Carrier:
    """See the module. `device`: where the bytes must be for this library; None: in this process's memory."""

    def __init__(self, backend: Any, rank: int, count: int, device: torch.device | None = None) -> None:
        self.rank = rank
        self.count = count
        self.patience_s = BUILD_S  # the longest that the library waits for a peer in anything that it was asked for
        self._backend = backend
        self._device = device
        self._downloads = Downloads(device) if device is not None else None
        self._rooms: dict[str, torch.Tensor] = {}
        self._move: Move | None = None

    def room(self, name: str, size: int) -> torch.Tensor:
        """Memory of this group for one purpose, the same one for every step."""
        found = self._rooms.get(name)
        if found is None or found.numel() < size:
            found = self._rooms[name] = torch.empty(size, dtype=torch.uint8)
        return found[:size]

    def all_to_all(self, mine: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> Move:
        """To each member the next so many bytes of mine, from each so many."""
        options = _c10d().AllToAllOptions()
        options.timeout = self._patience(sum(sends) + sum(receives))

        def begin(out: torch.Tensor, given: torch.Tensor) -> Any:
            return self._backend.alltoall_base(out, given, list(receives), list(sends), options)

        return self._begin(begin, mine, "gathered", sum(receives))

    def all_gather(self, mine: torch.Tensor) -> Move:
        """As many bytes of each member, in the order of ranks."""
        options = _c10d().AllgatherOptions()
        options.timeout = self._patience(mine.numel() * self.count)

        def begin(out: torch.Tensor, given: torch.Tensor) -> Any:
            return self._backend._allgather_base(out, given, options)

        return self._begin(begin, mine, "handed out", mine.numel() * self.count)

    def _begin(
        self, begin: Callable[[torch.Tensor, torch.Tensor], Any], mine: torch.Tensor, name: str, size: int
    ) -> Move:
        if self._backend is None:
            raise CarrierFailed("it was given up")
        if self._device is None:
            out, given = self.room(name, size), mine
        else:
            out = torch.empty(size, dtype=torch.uint8, device=self._device)
            given = send(mine, self._device)
        try:
            self._move = Move(begin(out, given), out, given, self._downloads)
        except RuntimeError as error:
            raise CarrierFailed(str(error).partition("\n")[0][:300]) from None
        return self._move

    def _patience(self, size: int) -> timedelta:
        """With a move of so many bytes."""
        patience_s = MOVE_S + size / MOVE_BYTES_PER_S
        self.patience_s = max(self.patience_s, patience_s)
        return timedelta(seconds=patience_s)

    def surrender(self) -> list[Any]:
        """All that keeps the group alive, for whoever ends it: the group itself first. Nothing works here any more."""
        backend, self._backend = self._backend, None
        held = [backend, self._rooms, *(self._move.surrender() if self._move is not None else [])]
        self._rooms, self._move = {}, None
        return held


class Carrying(Protocol):
    """Where a path finds the group of its view."""

    @property
    def carrier(self) -> Carrier | None:
        """None: it does not stand yet, or never will."""

    def open(self, view: View) -> None:
        """Begin to build it, if nobody has."""

    def close(self) -> None:
        """The view is over: give it up, and wait for nothing."""

    def worked(self) -> None:
        """It has moved a step's sums."""

    def failed(self, why: str) -> None:
        """It did not move what it was given. The view is given up because of that."""


def library_for(device: torch.device | None) -> tuple[str, torch.device | None]:
    """The library that moves bytes of this device, as torch names it, and where they must be for it."""
    if device is None or device.type == CPU.type:
        return GLOO, None
    name = dist.Backend.default_device_backend_map.get(device.type, GLOO)
    if name == GLOO or not dist.is_backend_available(name):
        return GLOO, None
    return name, device


def open_backend(name: str, store: Any, rank: int, count: int, address: str) -> Any:
    """A group of this library. Waits for the other members: in a thread of its own. `address`: gloo's, of this host."""
    if name == GLOO:
        gloo = _c10d().ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=BUILD_S)
        return gloo(store, rank, count, options)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None:
        if plugin.extended_api:
            raise CarrierFailed(f"{name} wants more of torch.distributed than is given to it here")
        return plugin.creator_fn(store, rank, count, timedelta(seconds=BUILD_S))
    kind = getattr(_c10d(), f"ProcessGroup{name.upper()}")
    options = kind.Options()
    options._timeout = timedelta(seconds=BUILD_S)
    return kind(store, rank, count, options)


def prefixed(store: Any, prefix: str) -> Any:
    return _c10d().PrefixStore(prefix, store)


def _c10d() -> Any:
    """What is in it has no types to speak of. Not in every build of torch, so not imported above."""
    return dist.distributed_c10d
