"""Keeps torch's compiler out of processes that do not compile: importing it takes a third of a worker's start.

torch's optimizers import `torch._dynamo` with their first call, only to tell a compiler, should one be tracing them,
not to; and to ask for deterministic algorithms imports it to tell it that. Until somebody really compiles, a module of
the same name with just those words stands in its place. Who asks it for anything else gets the real one, from then on
everywhere, and what was told to the stand-in is told again.

Changes nothing but the time of an import. `HOLDFAST_DYNAMO=eager` leaves it as torch has it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
VARIABLE = "HOLDFAST_DYNAMO"
_ERROR = 2  # torch's number for it
_TOLD = "__dynamo_disable"  # where torch keeps the answer of `disable` for a function of its own


class LateDynamo(ModuleType):
    """The stand-in. It knows `disable` and `graph_break`, which mean nothing while nobody compiles."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.disabled: list[Any] = []

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if fn is None or kwargs.get("wrapping") is not False:  # not torch's own way to call it
            return self.real().disable(fn, *args, **kwargs)
        self.disabled.append(fn)
        return fn

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__file__", "__wrapped__"):  # somebody only looks who this is
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        """Import it, in place of this one."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(NAME)
            for fn in self.disabled:
                fn.__dict__.pop(_TOLD, None)  # torch asks again at the next call
            torch: Any = sys.modules["torch"]
            if torch.get_deterministic_debug_mode() == _ERROR:
                torch.use_deterministic_algorithms(True)  # compiled code should be, too
        return importlib.import_module(NAME)


def be_deterministic() -> None:
    """As torch.use_deterministic_algorithms does it, which imports the compiler to tell it."""
    import torch

    if isinstance(sys.modules.get(NAME), LateDynamo):
        torch.set_deterministic_debug_mode("error")
    else:
        torch.use_deterministic_algorithms(True)


def install() -> None:
    """Before anything imports torch's compiler; torch itself need not be there yet, and is not imported."""
    if os.environ.get(VARIABLE) != "eager" and NAME not in sys.modules:
        sys.modules[NAME] = LateDynamo()
