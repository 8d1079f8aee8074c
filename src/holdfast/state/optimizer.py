"""An optimizer's state in and out of a snapshot, with the dtypes and bits that were sent.

`torch.optim.Optimizer.load_state_dict` casts state to the parameter's dtype, which would round float32 moments of
bfloat16 parameters; here the sent values are put back after it. Owns nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy
import torch

from holdfast.core.errors import ConfigError, ProtocolError

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
    if isinstance(value, Counter):
        return value.copy()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, numpy.ndarray) else value


def capture_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    """Its state_dict with the state by reference and the hyperparameters copied, and whose state it is."""
    packed = dict(optimizer.state_dict())
    packed["param_groups"] = copied(packed["param_groups"])
    return {"kind": type(optimizer).__name__, "packed": packed, "names": _names(optimizer, parameters)}


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[list[str]]:
    known = {id(parameter): name for name, parameter in parameters.items()}
    return [[known.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def check_optimizer(sent: Any, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """ConfigError with the first difference if the run's optimizer has other groups than this one."""
    parts = {"kind", "packed", "names"}
    if not isinstance(sent, dict) or set(sent) != parts or not isinstance(sent["packed"], dict):
        raise ProtocolError("the snapshot's part for the optimizer is not an optimizer's state")
    if sent["kind"] != type(optimizer).__name__:
        raise ConfigError(
            f"the run's optimizer is a {sent['kind']!s:.80}, and this worker's is a {type(optimizer).__name__}",
            hint="go on with the same optimizer, or start another run with another name",
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
    if len(theirs) != len(mine):
        raise ConfigError(
            f"the run's optimizer has {len(theirs)} parameter groups and this worker's has {len(mine)}",
            hint=_GROUPS_HINT,
        )
    for number, (their_names, my_names) in enumerate(zip(theirs, mine, strict=True)):
        if their_names != my_names:
            raise ConfigError(
                f"parameter group {number} of the run's optimizer has other parameters than this worker's",
                hint=_GROUPS_HINT,
            )


def restore_optimizer(sent: dict[str, Any], optimizer: torch.optim.Optimizer, *, adopt: bool = False) -> None:
    """Loads what `check_optimizer` has found to fit: copies of the tensors, or with `adopt` the tensors themselves."""
    packed = dict(sent["packed"])
    # Copies, since torch deep-copies groups, and a deep copy of one received tensor copies the whole block it is in.
    packed["param_groups"] = copied(packed["param_groups"])
    numbers = list(chain.from_iterable(group["params"] for group in packed["param_groups"]))
    try:
        optimizer.load_state_dict(packed)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer does not take the run's state: {error}",
            hint="every worker of a run must use the same optimizer class and torch version",
        ) from error
    mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    owners = dict(zip(numbers, mine, strict=True))
    for number, value in packed["state"].items():
        owner = owners.get(number, number)
        optimizer.state[owner] = _placed(value, optimizer.state.get(owner), copy=not adopt)


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
