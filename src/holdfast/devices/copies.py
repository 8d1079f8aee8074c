"""Bytes on their way between a device and this process, and how to know that they are here.

Nobody waits in the thread that gives a device its work: what comes down goes through pinned memory, on a stream beside
the one that computes, and has come when its event says so. Invariants:

- A copy down begins after everything that its thread has given the device before.
- What is copied is kept alive until it has come: so no stream uses memory that was given back.
- Pinned memory that a copy still reads is not used for anything else: torch's allocator of it sees to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

CPU = torch.device("cpu")


class Download:
    """Tensors that are coming. `tensors` may be read once `is_here`."""

    def __init__(self, tensors: list[torch.Tensor], sources: Sequence[torch.Tensor], event: torch.Event) -> None:
        self._tensors = tensors
        self._sources: Sequence[torch.Tensor] = sources  # not given back before they are read
        self._event = event
        self._here = False

    def is_here(self) -> bool:
        """Asks the device, and does not wait."""
        if not self._here and self._event.query():
            self._arrived()
        return self._here

    def wait(self) -> None:
        if not self._here:
            self._event.synchronize()
            self._arrived()

    @property
    def tensors(self) -> list[torch.Tensor]:
        assert self._here, "they are still on their way"
        return self._tensors

    def _arrived(self) -> None:
        self._here, self._sources = True, ()


class Downloads:
    """One device's stream for what comes down from it. Each download is there when all before it are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.Stream(device=device)
        self._coming: deque[Download] = deque()  # whoever asked for one may have lost interest

    def begin(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copies of what these will be once all that this thread has given to the device is done."""
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        self.is_idle()
        self._coming.append(_begin(tensors, self._stream))
        return self._coming[-1]

    def is_idle(self) -> bool:
        """Whether all that was begun is here."""
        while self._coming and self._coming[0].is_here():
            self._coming.popleft()
        return not self._coming


def mark_on(device: torch.device) -> torch.Event:
    """Where this thread is in what it gives to the device."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event


def as_of(mark: torch.Event, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in memory of this process, as they were at that mark; those that are there already as they are.

    Waits for them, in whichever thread: nobody may change them meanwhile.
    """
    there = [tensor for tensor in tensors if tensor.device != CPU]
    if not there:
        return list(tensors)
    stream = torch.Stream(device=there[0].device)
    stream.wait_event(mark)
    download = _begin(there, stream)
    download.wait()
    arrived = iter(download.tensors)
    return [tensor if tensor.device == CPU else next(arrived) for tensor in tensors]


def here(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same in memory of this process. Waits, once for all of them."""
    device = next((tensor.device for tensor in tensors if tensor.device != CPU), None)
    return as_of(mark_on(device), tensors) if device is not None else list(tensors)


def send(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of this process on the device, in one copy that nobody waits for. The memory may be used again at once."""
    return memory.pin_memory().to(device, non_blocking=True)


def on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself if it is there, else a copy that nobody waits for."""
    if tensor.device == device or tensor.device != CPU or device.type == "meta":
        return tensor
    return send(tensor, device)


def _begin(tensors: Sequence[torch.Tensor], stream: torch.Stream) -> Download:
    event = torch.Event(device=stream.device)
    found = []
    with stream:
        for tensor in tensors:
            twin = torch.empty_like(tensor, device=CPU, pin_memory=True)
            found.append(twin.copy_(tensor, non_blocking=True))
        event.record(stream)
    return Download(found, tensors, event)
