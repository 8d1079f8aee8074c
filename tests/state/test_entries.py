"""The state entry by entry: everything has a name that a person understands, and a flipped bit changes one entry."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

from holdfast.membership.suspecting import BUFFER, EXTRA, NUMBER, OPTIMIZER, PARAMETER, TENSOR, VALUE, StateEntry
from holdfast.state import entries
from holdfast.state.entries import entries_of
from holdfast.state.snapshot import Holder


class Kept:
    """An extra with all kinds of things in it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "loss": 0.5,
            "names": ["a", "b"],
            "history": list(range(9)),
            "deep": {"list": [1, {"x": torch.ones(3)}]},
            "array": numpy.arange(4),
            "text": "x" * 100,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


def trained(several: bool = False) -> tuple[nn.Module, Any, Kept]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    first = torch.optim.Adam(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 3)).sum().backward()
    first.step()
    second.step()
    return model, {"g": first, "d": second} if several else first, Kept()


def found(model: nn.Module, optimizer: Any, kept: Kept) -> dict[str, StateEntry]:
    listed, whole = entries_of(Holder(model, optimizer, {"kept": kept}).refer(3))
    assert whole and len({entry.name for entry in listed}) == len(listed)
    return {entry.name: entry for entry in listed}


def test_everything_has_a_name() -> None:
    by_name = found(*trained())
    assert by_name["the parameter 0.weight"].part == PARAMETER and by_name["the parameter 0.weight"].kind == TENSOR
    assert by_name["the buffer 1.running_mean"].part == BUFFER
    assert by_name["the optimizer's exp_avg of 0.weight"].part == OPTIMIZER
    step = by_name["the optimizer's step of 0.bias"]
    assert (step.kind, step.value) == (NUMBER, "1.0")
    assert by_name["the optimizer's lr (parameter group 0)"].value == "0.1"
    loss = by_name["the extra 'kept', key loss"]
    assert (loss.part, loss.kind, loss.value) == (EXTRA + "kept", VALUE, "0.5")
    assert by_name["the extra 'kept', key names"].value == "['a', 'b']"
    assert by_name["the extra 'kept', key history"].value.startswith("9 values ")
    assert by_name["the extra 'kept', key deep.list.1.x"].kind == TENSOR
    assert len(by_name["the extra 'kept', key text"].value) < 60
    assert by_name["requires_grad of 0.weight"].value == "True"


def test_several_optimizers_have_their_names() -> None:
    by_name = found(*trained(several=True))
    assert by_name["the optimizer g's exp_avg of 0.weight"].kind == TENSOR
    assert by_name["the optimizer d's momentum_buffer of 1.bias"].kind == TENSOR
    assert by_name["the optimizer d's momentum (parameter group 0)"].value == "0.9"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model, optimizer, kept: flip(model[0].weight), "the parameter 0.weight"),
        (lambda model, optimizer, kept: flip(model[1].running_var), "the buffer 1.running_var"),
        (
            lambda model, optimizer, kept: flip(optimizer.state[model[0].bias]["exp_avg"]),
            "the optimizer's exp_avg of 0.bias",
        ),
        (lambda model, optimizer, kept: kept.state["history"].append(9), "the extra 'kept', key history"),
        (
            lambda model, optimizer, kept: flip(kept.state["deep"]["list"][1]["x"]),
            "the extra 'kept', key deep.list.1.x",
        ),
        (lambda model, optimizer, kept: kept.state.update(text="x" * 99 + "y"), "the extra 'kept', key text"),
    ],
)
def test_a_change_is_in_one_entry(change: Any, name: str) -> None:
    parts = trained()
    before = found(*parts)
    change(*parts)
    after = found(*parts)
    assert [one for one in before if before[one] != after[one]] == [name]


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def test_what_is_no_tensor_comes_first_and_the_rest_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(*trained()[:2])
    everything, _ = entries_of(holder.refer(3))
    values = [entry for entry in everything if entry.kind == VALUE]
    assert list(everything[: len(values)]) == values
    monkeypatch.setattr(entries, "ENTRIES_MAX", len(values) + 2)
    some, whole = entries_of(holder.refer(3))
    assert not whole and some == everything[: len(values) + 2]
    monkeypatch.setattr(entries, "ROOM_BYTES", 200)
    few, whole = entries_of(holder.refer(3))
    assert not whole and 0 < len(few) < 5
