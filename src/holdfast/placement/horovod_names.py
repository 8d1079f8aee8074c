"""`import horovod` finds `holdfast.horovod`: a script written for Horovod runs as it is.

Only names: nothing of the package is imported before the script asks for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

THEIRS, OURS = "horovod", "holdfast.horovod"
SWITCH = "HOLDFAST_HOROVOD"  # in a worker's environment: see WorkerOptions


def install() -> None:
    """From now on `horovod` and all below it is ours. Twice is no error; a Horovod that is imported already is."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    found = sys.modules.get(THEIRS)
    if found is not None:
        raise ImportError(f"horovod is imported already, from {getattr(found, '__file__', '?')}: install before that")
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module of ours for a name of theirs: one module, under both names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if ours(name) == name or importlib.util.find_spec(ours(name)) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(ours(spec.name))
        self._kept = {name: getattr(module, name, None) for name in ("__spec__", "__loader__", "__package__")}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name; the import system has written the other one over what it knows of itself."""
        for name, value in self._kept.items():
            setattr(module, name, value)


def ours(name: str) -> str:
    """Our module's name for one of theirs; any other name as it is."""
    return OURS + name[len(THEIRS) :] if name == THEIRS or name.startswith(f"{THEIRS}.") else name
