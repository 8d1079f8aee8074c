"""A library that moves bytes between simulated devices, as NCCL does between others: `register()` tells torch of it.

It takes memory of the device and no other, works on a stream of its own behind what the caller's stream has been given,
and nobody waits: what it moves is asked whether it is there. Gloo is the cable.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "cable"


class Moving:
    """One collective under way. It gets on when it is asked."""

    def __init__(self, stream: torch.Stream, begin: Any, out: torch.Tensor, given: torch.Tensor) -> None:
        assert out.device.type == given.device.type == "simulated", "this library is for devices"
        self._stream = stream
        self._begin = begin
        self._out = out
        self._down, self._up = (torch.Event(device=out.device) for _ in range(2))
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            self._sent = torch.empty_like(given, device="cpu", pin_memory=True).copy_(given, non_blocking=True)
            self._down.record(stream)
        self._received = torch.empty_like(out, device="cpu", pin_memory=True)
        self._work: Any = None
        self._moved = False

    def is_completed(self) -> bool:
        if self._work is None:
            if not self._down.query():
                return False
            self._work = self._begin(self._received, self._sent)
        if not self._moved:
            if not self._work.is_completed():
                return False
            self._work.wait()  # raises what went wrong
            with self._stream:
                self._out.copy_(self._received, non_blocking=True)
                self._up.record(self._stream)
            self._moved = True
        return self._up.query()

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._up)


class Library:
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self._gloo = gloo(store, rank, size, options)
        self._stream = torch.Stream(device="simulated:0")

    def alltoall_base(self, out: Any, given: Any, receives: list[int], sends: list[int], options: Any) -> Moving:
        return Moving(
            self._stream, lambda into, of: self._gloo.alltoall_base(into, of, receives, sends, options), out, given
        )

    def _allgather_base(self, out: Any, given: Any, options: Any) -> Moving:
        return Moving(self._stream, lambda into, of: self._gloo._allgather_base(into, of, options), out, given)

    def abort(self) -> None:
        self._gloo.abort()


def register() -> None:
    """In a process that has the device. Once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Library, devices=["simulated"])
