"""What of a module decides its forward and is no tensor: whether it trains, and the plain settings of torch's modules.

`model[1].eval()` or `dropout.p = 0.1` in the middle of a training changes every later step, so it must reach workers
that join. Settings are compared with what they were when the run was joined, which every worker's script made alike, so
that what travels is as a rule empty. Of modules that a user wrote only `training` counts: other attributes of theirs
may well differ between workers (a counter, the last loss). Owns nothing but that first look.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from holdfast.core.errors import ProtocolError
from holdfast.state.naming import plain_name

_TRAINING: Final = "training"
_KINDS: Final = (bool, int, float, str, type(None))

Changes = dict[str, dict[str, Any]]  # module -> attribute -> value, where it is not what it was at first


class ModuleFlags:
    """The settings of a model's modules. Belongs to the thread of the user's loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [(plain_name(name), module) for name, module in model.named_modules()]
        self._first = [_settings(module) for _, module in self._modules]

    def changes(self) -> Changes:
        found: Changes = {}
        for (name, module), first in zip(self._modules, self._first, strict=True):
            now = module.__dict__
            if module.training is not first[_TRAINING]:
                found.setdefault(name, {})[_TRAINING] = module.training
            for attribute, value in first.items():
                if attribute != _TRAINING and not _same(now.get(attribute, value), value):
                    found.setdefault(name, {})[attribute] = now[attribute]
        return found

    def restore(self, changes: Any) -> None:
        """Make the modules what the sender's are. ProtocolError if no `changes` gave that."""
        if not isinstance(changes, dict) or not all(isinstance(entry, dict) for entry in changes.values()):
            raise ProtocolError("the snapshot's part for modules' settings makes no sense")
        for (name, module), first in zip(self._modules, self._first, strict=True):
            sent = changes.get(name, {})
            if sent.keys() - first.keys() or not all(isinstance(value, _KINDS) for value in sent.values()):
                raise ProtocolError(f"the snapshot has settings of the module {name!r:.80} that it does not have")
            for attribute, value in (first | sent).items():
                if not _same(module.__dict__.get(attribute, value), value):
                    setattr(module, attribute, value)


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    settings = {_TRAINING: module.training}
    if type(module).__module__.startswith("torch.nn."):
        for name, value in module.__dict__.items():
            if not name.startswith("_") and type(value) in _KINDS:
                settings[name] = value
    return settings


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
