"""The state of an extra (a scheduler, an averaged model, whatever a script passes to join) in and out of a snapshot.

What comes back is what `state_dict` returned: the same values, the same kinds of containers, in the same order, since a
script may go by any of these. `try_extras` finds out at the start whether that is so. Owns nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.state.codec import InOrder, flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.layout import memory_of
from holdfast.state.naming import plain_name, with_names_of
from holdfast.state.optimizer import copied

_SAME_SCRIPT = "every worker of a run must build the same model, optimizer and extras before holdfast.join"
_ROUND_TRIP = (
    "load_state_dict must take what state_dict returns and make the object what it was; "
    "workers that join get the state in this way"
)


class Stateful(Protocol):
    """Anything that travels with the snapshot: a scheduler, an averaged model, a gradient scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def check_kinds(extras: Mapping[str, Any]) -> None:
    for name, extra in extras.items():
        if not all(callable(getattr(extra, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"{name} is a {type(extra).__name__} without state_dict and load_state_dict",
                hint="pass things like a scheduler, an AveragedModel or a GradScaler, by name",
            )


def capture_extra(extra: Stateful) -> dict[str, Any]:
    """Copies of its state, and of what a module keeps beside it: the versions of its parts, read when it is loaded."""
    state = extra.state_dict()
    versions = {plain_name(name): version for name, version in (getattr(state, "_metadata", None) or {}).items()}
    return {"state": InOrder(copied(_plainly_named(extra, state))), "metadata": versions}


def refer_to_extra(extra: Stateful) -> Any:
    """The state itself, not copied."""
    return _plainly_named(extra, extra.state_dict())


def restore_extra(name: str, extra: Stateful, sent: Any) -> None:
    if not isinstance(sent, dict) or set(sent) != {"state", "metadata"} or not isinstance(sent["metadata"], dict):
        raise ProtocolError(f"the snapshot's part for the extra {name} is not a state_dict")
    state = copied(sent["state"])
    if isinstance(extra, torch.nn.Module) and isinstance(state, dict):
        state = OrderedDict(with_names_of(extra, state))
    if sent["metadata"]:
        own = getattr(extra.state_dict(), "_metadata", None) or sent["metadata"]
        state._metadata = {name: sent["metadata"].get(plain_name(name), {}) for name in own}
    try:
        extra.load_state_dict(state)
    except Exception as error:
        raise ConfigError(
            f"the extra {name} does not take the run's state: {type(error).__name__}: {error}", hint=_SAME_SCRIPT
        ) from error


def try_extras(extras: Mapping[str, Stateful]) -> None:
    """ConfigError with the first of them that does not come back from a snapshot as it was."""
    check_kinds(extras)
    for name, extra in extras.items():
        sent = _bytes_of(name, extra)
        try:
            restore_extra(name, extra, unflatten(unpack_tree(sent[0]), [tensor.clone() for tensor in sent[1]]))
        except ConfigError as error:
            why = error.__cause__
            said = f"{type(why).__name__}: {why}" if why is not None else error.message
            raise ConfigError(
                f"the extra {name} does not take back what its own state_dict returned: {said}", hint=_ROUND_TRIP
            ) from error
        again = _bytes_of(name, extra)
        same = sent[0] == again[0] and len(sent[1]) == len(again[1])
        if not same or any(memory_of(one) != memory_of(two) for one, two in zip(sent[1], again[1], strict=True)):
            raise ConfigError(f"the extra {name} is another after it was given its own state", hint=_ROUND_TRIP)


def _bytes_of(name: str, extra: Stateful) -> tuple[bytes, list[torch.Tensor]]:
    tree, tensors = flatten(capture_extra(extra), path=f"extras[{name!r}]")
    return pack_tree(tree), tensors


def _plainly_named(extra: Stateful, state: Any) -> Any:
    """That of a module, such as an average of a compiled model, with the names of what was compiled."""
    if not isinstance(extra, torch.nn.Module):
        return state
    return {plain_name(name): value for name, value in state.items()}
