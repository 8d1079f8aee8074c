"""Names in a state are those of the model that the user wrote, compiled or not, whole or in part."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.modes.capture import GradientCapture
from holdfast.state.digest import weights_digest
from holdfast.state.naming import plain_name
from holdfast.state.snapshot import Holder


class Speaking(nn.Linear):
    """A module with state of its own beside tensors."""

    def get_extra_state(self) -> Any:
        return {"said": 1}

    def set_extra_state(self, state: Any) -> None:
        self.heard = state


def build(how: str) -> tuple[nn.Module, Holder]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Speaking(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    if how == "part":
        model[0] = torch.compile(model[0], backend="eager")
    if how == "whole":
        model = torch.compile(model, backend="eager")
    return model, Holder(model, optimizer, {"average": AveragedModel(model)}, buffers=GradientCapture(model).buffers)


def test_a_state_fits_compiled_or_not() -> None:
    ways = ("plain", "part", "whole")
    snapshots = {way: build(way)[1].capture(3) for way in ways}
    assert len({snapshot.digest() for snapshot in snapshots.values()}) == 1
    assert len({weights_digest(build(way)[0]) for way in ways}) == 1
    for sent, mine in itertools.product(ways, ways):
        model, holder = build(mine)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        holder.restore(snapshots[sent])
        assert holder.capture(3).digest() == snapshots[sent].digest(), (sent, mine)


def test_a_name_of_the_users_own_stays() -> None:
    assert plain_name("encoder._orig_mod.0.weight") == "encoder.0.weight"
    assert plain_name("_orig_mod.weight") == "weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"
