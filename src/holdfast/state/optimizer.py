"""The state of one optimizer, or of several by name, in and out of a snapshot, with the dtypes and bits that were sent.

`torch.optim.Optimizer.load_state_dict` casts state to the parameter's dtype, which would round float32 moments of
bfloat16 parameters; here the sent values are put back after it. Owns nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeAlias

import numpy
import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.devices.copies import CPU, on
from holdfast.state.local import as_part_of, is_sharded

Optimizers: TypeAlias = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
_Parameters: TypeAlias = Mapping[str, torch.nn.Parameter]
_PARTS = {"kind", "packed", "names"}
_SAME_HINT = "go on with the same optimizers, or start another run with another name"
STEPS = "step"  # which torch leaves where it is, unless the optimizer is capturable or fused
_GROUPS_HINT = (
    "give the optimizer all its parameter groups, in the same order, before holdfast.join, "
    "and freeze with requires_grad_(False) what is not to be trained yet"
)


def copied(value: Any) -> Any:
    """The same nesting with every tensor cloned, so that it shares no memory with live or received state."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, dict):  # of a kind with an order, a default or a count, which it keeps
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = copied(item)
        return twin
    return value.copy() if isinstance(value, numpy.ndarray) else value


def by_name(optimizers: Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Each of them; one that was given alone has no name."""
    return dict(optimizers) if isinstance(optimizers, Mapping) else {"": optimizers}


def described(name: str) -> str:
    """What messages call it."""
    return f"optimizer {name!r}" if name else "optimizer"


def capture_optimizers(optimizers: Optimizers, parameters: _Parameters) -> dict[str, Any]:
    """Of one what `capture_optimizer` returns, of several the same under each name."""
    if isinstance(optimizers, Mapping):
        return {name: capture_optimizer(one, parameters) for name, one in optimizers.items()}
    return capture_optimizer(optimizers, parameters)


def check_optimizers(sent: Any, optimizers: Optimizers, parameters: _Parameters) -> None:
    """ConfigError with the first difference between the run's optimizers and these."""
    theirs, mine = sent_by_name(sent), by_name(optimizers)
    if set(theirs) != set(mine):
        raise ConfigError(f"the run has {_listed(theirs)}, and this worker has {_listed(mine)}", hint=_SAME_HINT)
    for name, optimizer in mine.items():
        check_optimizer(theirs[name], optimizer, parameters, name)


class AddedGroups:
    """Parameter groups that a restore has added to an optimizer, since the run's script had done so before.

    The script of a worker that joins comes to the same line only if it stands between two loops. It must find the
    optimizer as it would have been without us, so the groups can be taken out again.
    """

    def __init__(self) -> None:
        self._added: list[tuple[torch.optim.Optimizer, int]] = []

    def add(self, sent: dict[str, Any], optimizer: torch.optim.Optimizer, parameters: _Parameters) -> None:
        first = len(optimizer.param_groups)
        for group, names in list(zip(sent["packed"]["param_groups"], sent["names"], strict=True))[first:]:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            named: Any = [parameters[name] for name in names]
            if "param_names" in group:  # torch wants them for every group or for none
                named = list(zip(group["param_names"], named, strict=True))
            optimizer.add_param_group({"params": named, **copied(settings)})
        if len(optimizer.param_groups) > first:
            self._added.append((optimizer, len(optimizer.param_groups) - first))

    def take_out(self) -> None:
        for optimizer, count in self._added:
            for group in optimizer.param_groups[-count:]:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
            del optimizer.param_groups[-count:]
        self._added.clear()


def restore_optimizers(
    sent: dict[str, Any],
    optimizers: Optimizers,
    parameters: _Parameters,
    added: AddedGroups,
    *,
    adopt: bool = False,
) -> None:
    """Loads what `check_optimizers` has found to fit."""
    theirs = sent_by_name(sent)
    for name, optimizer in by_name(optimizers).items():
        added.add(theirs[name], optimizer, parameters)
        restore_optimizer(theirs[name], optimizer, adopt=adopt)


def sent_by_name(sent: Any) -> dict[str, Any]:
    """One optimizer has a kind, which is a string; of several, each name has one with these parts."""
    if not isinstance(sent, dict) or not all(isinstance(name, str) for name in sent):
        raise ProtocolError("the snapshot's part for the optimizer is not an optimizer's state")
    alone = set(sent) == _PARTS and isinstance(sent["kind"], str)
    return {"": sent} if alone or not sent else sent


def _listed(names: Mapping[str, Any]) -> str:
    return "one optimizer without a name" if "" in names else f"the optimizers {', '.join(map(repr, sorted(names)))}"


def capture_optimizer(optimizer: torch.optim.Optimizer, parameters: _Parameters) -> dict[str, Any]:
    """Its state_dict with the state by reference and the hyperparameters copied, and whose state it is."""
    state = optimizer.state_dict()
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        raise ConfigError(
            f"the state_dict of the optimizer, a {type(optimizer).__name__}, lacks the entries state and param_groups",
            hint="let it return what torch.optim.Optimizer.state_dict returns, with what it has besides added to it",
        )
    packed = dict(state)
    packed["param_groups"] = copied(packed["param_groups"])
    return {"kind": type(optimizer).__name__, "packed": packed, "names": _names(optimizer, parameters)}


def _names(optimizer: torch.optim.Optimizer, parameters: _Parameters) -> list[list[str]]:
    known = {id(parameter): name for name, parameter in parameters.items()}
    return [[known.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def check_optimizer(sent: Any, optimizer: torch.optim.Optimizer, parameters: _Parameters, name: str = "") -> None:
    """ConfigError with the first difference if the run's optimizer has other groups than this one."""
    what = described(name)
    if not isinstance(sent, dict) or set(sent) != _PARTS or not isinstance(sent["packed"], dict):
        raise ProtocolError("the snapshot's part for the optimizer is not an optimizer's state")
    if sent["kind"] != type(optimizer).__name__:
        raise ConfigError(
            f"the run's {what} is a {sent['kind']!s:.80}, and this worker's is a {type(optimizer).__name__}",
            hint=_SAME_HINT.replace("optimizers", "optimizer"),
        )
    packed, theirs, mine = sent["packed"], sent["names"], _names(optimizer, parameters)
    try:
        groups = packed["param_groups"]
        well_formed = isinstance(packed["state"], dict) and len(groups) == len(theirs)
        well_formed = well_formed and [len(g["params"]) for g in groups] == [len(names) for names in theirs]
    except (KeyError, TypeError) as error:
        raise ProtocolError("the snapshot's part for the optimizer is not an optimizer's state") from error
    if not well_formed:
        raise ProtocolError("the snapshot's optimizer state contradicts itself")
    # Groups that the run's script has added since it began are added here too, if their parameters are in the model.
    new = [name for names in theirs[len(mine) :] for name in names]
    known = {name for names in mine for name in names}
    if len(theirs) < len(mine) or any(name not in parameters or name in known for name in new):
        raise ConfigError(
            f"the run's {what} has {len(theirs)} parameter groups and this worker's has {len(mine)}",
            hint=_GROUPS_HINT,
        )
    for number, (their_names, my_names) in enumerate(zip(theirs, mine, strict=False)):
        if their_names != my_names:
            raise ConfigError(
                f"parameter group {number} of the run's {what} has other parameters than this worker's",
                hint=_GROUPS_HINT,
            )


def restore_optimizer(sent: dict[str, Any], optimizer: torch.optim.Optimizer, *, adopt: bool = False) -> None:
    """Loads what `check_optimizer` has found to fit: copies of the tensors, or with `adopt` the tensors themselves."""
    packed = dict(sent["packed"])
    # Copies, since torch deep-copies groups, and a deep copy of one received tensor copies the whole block it is in.
    packed["param_groups"] = copied(packed["param_groups"])
    numbers = list(chain.from_iterable(group["params"] for group in packed["param_groups"]))
    try:
        mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        owners = dict(zip(numbers, mine, strict=False))  # torch says below what does not fit
        packed["state"] = {
            number: _beside(value, owners[number].device) if number in owners else value
            for number, value in packed["state"].items()
        }
        optimizer.load_state_dict(packed)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer does not take the run's state: {error}",
            hint="every worker of a run must use the same optimizer class and torch version",
        ) from error
    for number, value in packed["state"].items():
        owner = owners.get(number, number)
        placed = _placed(value, optimizer.state.get(owner), copy=not adopt)
        if isinstance(owner, torch.Tensor) and is_sharded(owner) and isinstance(placed, dict):
            placed = {
                key: as_part_of(owner, item) if isinstance(item, torch.Tensor) else item for key, item in placed.items()
            }
        optimizer.state[owner] = placed


def _beside(value: Any, device: torch.device) -> Any:
    """A parameter's state where the parameter is, as torch will have it, and before torch waits for each tensor."""
    if not isinstance(value, dict) or device == CPU:
        return value
    tensors = {key: item for key, item in value.items() if isinstance(item, torch.Tensor) and key != STEPS}
    return {**value, **{key: on(item, device) for key, item in tensors.items()}}


def _placed(sent: Any, loaded: Any, *, copy: bool) -> Any:
    """`sent`, bit for bit, its tensors on the devices where torch put them when it loaded them."""
    if isinstance(sent, torch.Tensor):
        device = loaded.device if isinstance(loaded, torch.Tensor) else sent.device
        return sent.to(device, copy=copy)
    there: Any
    if isinstance(sent, dict) and not isinstance(sent, Counter):
        there = loaded if isinstance(loaded, dict) else {}
        return {key: _placed(item, there.get(key), copy=copy) for key, item in sent.items()}
    if type(sent) in (list, tuple):
        there = loaded if isinstance(loaded, (list, tuple)) and len(loaded) == len(sent) else [None] * len(sent)
        return type(sent)(_placed(item, other, copy=copy) for item, other in zip(sent, there, strict=True))
    return sent
