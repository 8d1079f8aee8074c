"""A simulated accelerator: memory that the host cannot touch; operations run as late, or as early, as they may.

    device = load()                 # torch.device("simulated:0"), in this process from here on
    with early(): ...               # operations run where they are given; otherwise when somebody waits for them
    with blocking() as found: ...   # where in the program this thread waited for the device

The C++ is in device.cpp and what it includes; build.py compiles it. One device to a process, as `torch.simulated`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from tests.harness.device.build import NAME, place

VISIBLE = "CUDA_VISIBLE_DEVICES"  # obeyed, as others obey it: nothing in it, no device
_loaded: Any = None


def is_built() -> bool:
    return place().exists()


def load() -> torch.device:
    """Registers the device with torch, once."""
    global _loaded
    if _loaded is None:
        spec = importlib.util.spec_from_file_location(NAME, place())
        assert spec is not None and spec.loader is not None
        _loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_loaded)
        rename_privateuse1_backend("simulated")
        torch._register_device_module("simulated", _module(_loaded))  # type: ignore[no-untyped-call]
        generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device("simulated:0")


def native() -> Any:
    """The compiled module: tasks_run(), waiting(), blocked(), blocks(), forgive()."""
    load()
    return _loaded


def _module(native: Any) -> types.ModuleType:
    """What torch expects of a device's module."""
    visible = os.environ.get(VISIBLE)
    found: Any = types.ModuleType("torch.simulated")
    found.is_available = lambda: visible != ""
    found.device_count = lambda: 0 if visible == "" else 1
    found.is_initialized = lambda: True
    found._is_in_bad_fork = lambda: False
    found.current_device = lambda: 0
    found.set_device = lambda device: None
    found.get_device_name = lambda device=None: "simulated"
    found.get_device_capability = lambda device=None: (1, 0)
    found.manual_seed = found.manual_seed_all = lambda seed: native.manual_seed(seed % 2**64)
    found.default_generators = (native.generator(),)
    found.get_rng_state = lambda device=None: native.generator().get_state()
    found.set_rng_state = lambda state, device=None: native.generator().set_state(state)
    found.get_rng_state_all = lambda: [native.generator().get_state()]
    found.set_rng_state_all = lambda states: native.generator().set_state(states[0])
    found.current_stream = lambda device=None: torch.accelerator.current_stream()
    found.synchronize = lambda device=None: torch.accelerator.synchronize()
    found.Stream = lambda *args, **kwargs: torch.Stream(device="simulated:0")
    found.Event = lambda enable_timing=False: torch.Event(device="simulated:0", enable_timing=enable_timing)
    found.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module: types.ModuleType = found
    sys.modules["torch.simulated"] = module
    return module


def blocked_here() -> dict[str, int]:
    """How often this thread has waited for the device: for bytes that came `down` or went `up`, or just to `wait`."""
    return dict(native().blocked().get(threading.get_native_id(), {}))


@contextmanager
def early() -> Iterator[None]:
    """Operations run where they are given."""
    native().set_early(True)
    try:
        yield
    finally:
        native().set_early(False)


@contextmanager
def blocking() -> Iterator[list[str]]:
    """Where this thread waits for the device meanwhile: one stack for each time."""
    found: list[str] = []
    mine = threading.get_ident()

    def told(way: str) -> None:
        if threading.get_ident() == mine:
            found.append(f"{way}\n" + "".join(traceback.format_stack(limit=12)[:-1]))

    native().on_blocked(told)
    try:
        yield found
    finally:
        native().on_blocked(None)
