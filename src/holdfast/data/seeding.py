"""Seeds: derived from the run's seed and a place in the run, and put into every generator that user code may use.

`derive_seed` is part of what makes a run repeatable: changing it changes every run. Owns nothing; `seed_everything`
writes the process-wide generators of Python, NumPy and torch.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from holdfast.devices.found import device_modules, is_in_use

_devices: tuple[Any, ...] = (torch.cuda, torch.xpu)  # see `know_devices`
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]  # the generator of the functions of `random`
_seed_python: Any = super(random.Random, _PYTHON).seed  # what random.seed comes to for an integer


def derive_seed(seed: int, *parts: int | str) -> int:
    """64 bits from blake2b over the seed and the parts, the same in every process and version.

    Each part is written with its type and length, so that (1, "2") and ("12",) do not meet.
    """
    words = b"".join(map(_word, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


@lru_cache(maxsize=1024, typed=True)  # a step derives several seeds, and most of their parts are the same
def _word(part: int | str) -> bytes:
    assert type(part) in (int, str), f"a seed is derived from integers and strings, not {part!r}"
    text = str(part).encode()
    return b"%s%d:%s" % (b"i" if isinstance(part, int) else b"s", len(text), text)


def seed_everything(value: int) -> None:
    """Seeds Python's, NumPy's and torch's process-wide generators, and those of devices that are in use.

    Called twice per shard, so it is direct: torch.manual_seed takes several times as long on the CPU alone.
    """
    _seed_python(value)
    _PYTHON.gauss_next = None
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(value)
    for device in _devices:
        if is_in_use(device):
            device.manual_seed_all(value)


def know_devices() -> None:
    """Whatever accelerator torch has now, its generators are seeded too, once it is in use."""
    global _devices
    _devices = tuple(module for module in device_modules() if hasattr(module, "manual_seed_all"))


def device_generators() -> list[Callable[[], object]]:
    """What puts the generators of each device that is in use back to where they are now."""
    found: list[Callable[[], object]] = []
    for device in _devices:
        if is_in_use(device):
            found.append(partial(device.set_rng_state_all, device.get_rng_state_all()))
    return found
