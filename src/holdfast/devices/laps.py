"""How long something took on a device, by its own events: to give it work is not to have it done."""

from __future__ import annotations

import torch


class DeviceLap:
    """Between two places in the stream that computes. Its seconds may be asked for once all of it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._ended = self._mark()

    def end(self) -> DeviceLap:
        self._ended = self._mark()
        return self

    def __float__(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1000

    def _mark(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
