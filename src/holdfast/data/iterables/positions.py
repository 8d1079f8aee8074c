"""The position that an iterable says of itself: state_dict and load_state_dict, as different libraries mean them.

torchdata's and Hugging Face's say where they are. A StreamingDataset of MosaicML's does not count what it has given: it
is told. And it takes the state of an epoch that it has begun for an old one, unless it is told that as well.
"""

from __future__ import annotations

import inspect
from typing import Any


def has_position(iterable: Any) -> bool:
    if not all(callable(getattr(iterable, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return is_told_samples(iterable) or not _needed(iterable.state_dict)


def is_told_samples(iterable: Any) -> bool:
    """Whether its position needs somebody who counts the samples of the epoch that it has given."""
    return _needed(getattr(iterable, "state_dict", None)) == {"num_samples", "from_beginning"}


def state_of(iterable: Any, samples: int) -> Any:
    """Its position after so many samples of the epoch at hand."""
    if is_told_samples(iterable):
        return iterable.state_dict(num_samples=samples, from_beginning=True)
    return iterable.state_dict()


def load_position(iterable: Any, state: Any) -> None:
    """Its next pass begins there, also where it has been further already."""
    iterable.load_state_dict(state)
    dataset = getattr(iterable, "dataset", iterable)  # of a loader over one
    if is_told_samples(dataset) and hasattr(dataset, "next_epoch"):
        dataset.next_epoch = max(0, int(state["epoch"]))


def _needed(function: Any) -> set[str]:
    """The arguments that a function cannot be called without."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {one.name for one in given if one.default is one.empty and one.kind not in any_number}
