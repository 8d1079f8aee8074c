"""Which device a model is on, and the modules of torch for devices that have generators of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.devices.copies import CPU


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device that all of these are on; None: in this process's memory. ConfigError if they are not together."""
    found = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "meta"})
    if len(found) > 1:
        raise ConfigError(
            f"the model's parameters and buffers are on {' and '.join(found)}",
            hint="move all of the model to one device before holdfast.join; each worker has one",
        )
    return None if not found or torch.device(found[0]) == CPU else torch.device(found[0])


def device_modules() -> tuple[Any, ...]:
    """torch.cuda and its like, whether they are in use or not."""
    known: list[Any] = [torch.cuda, torch.xpu]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and (module := torch.get_device_module(accelerator)) not in known:
        known.append(module)
    return tuple(known)


def is_in_use(module: Any) -> bool:
    """A device that nobody has used in this process is not opened for a question."""
    asked = getattr(module, "is_initialized", None)
    return asked is None or bool(asked())
