"""Training that goes on when workers are lost, come or go: Horovod's `elastic`, framework-neutral.

`run` calls a function with a state. A lost worker raises HorovodInternalError in the function: the state goes back to
its last commit, the remaining workers form a world, and the function is called again, in the same process. Workers that
come wait until the next commit; there all members leave together, with HostsUpdatedInterrupt, and nothing goes back.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from holdfast.horovod import process_sets
from holdfast.horovod.common.exceptions import (
    CollectiveMismatch,
    CollectiveStall,
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from holdfast.horovod.exchange.words import Kind, Op, Request
from holdfast.horovod.world.runtime import runtime

Broadcast = Callable[[Any], Any]
IN_VAIN_MAX = 10  # worlds of the same workers that fail one after the other without a commit


class State:
    """What a training keeps across worlds. Subclasses say how it is saved, restored and brought from rank 0."""

    def __init__(self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], Any]]) -> None:
        """To be called when a world has formed anew, before the state is brought from rank 0."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the state as it is now, and let those in who wait."""
        self.save()
        runtime().committed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """HostsUpdatedInterrupt, on all ranks at the same call, if a worker waits to come in or is to leave."""
        if _most(float(runtime().should_meet()), "check_host_updates") > 0:
            raise HostsUpdatedInterrupt(False)

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """What is to be made anew for another world, before the state comes."""


def _most(value: float, name: str) -> float:
    """The greatest of all ranks' values."""
    exchange, number = runtime().world.exchange, torch.tensor([value], dtype=torch.float64)
    request = Request(kind=Kind.ALLREDUCE, name=f"elastic.{name}", dtypes=("float64",), shapes=((1,),), op=Op.MAX)
    exchange.synchronize(exchange.submit(request, [number], [number], soon=True))
    return number.item()


class ObjectState(State):
    """Plain values, as attributes."""

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None, **kwargs: Any
    ) -> None:
        self._bcast_object = bcast_object
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            assert self._bcast_object is not None, "an ObjectState needs bcast_object"
            now = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(now)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def reset() -> None:
    """Leave this world for the next one."""
    runtime().reset()
    process_sets.setup(())


class Setbacks:
    """How often the same workers have gone back to the same commit: it is not the loss of one that ails them."""

    def __init__(self) -> None:
        self._last: tuple[Any, int] | None = None
        self._count = 0

    def note(self, error: HorovodInternalError) -> None:
        """Say why the state goes back. Raises the error again when it keeps coming."""
        members, commits = runtime().members, runtime().commits
        self._count = self._count + 1 if self._last == (members, commits) else 1
        self._last = (members, commits)
        if self._count > IN_VAIN_MAX:
            raise error
        if self._count > 1:  # a lost worker is told of by the new world
            runtime().report(f"back to commit {commits} again, {self._count} times by now: {error}")


def run_fn(function: Callable[..., Any], reset: Callable[[], None] = reset) -> Callable[..., Any]:
    """`function(state, ...)` again and again, until it returns."""

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync, setbacks = False, Setbacks()
        while True:
            try:
                if not skip_sync:
                    state.sync()
                runtime().commits = int(_most(float(runtime().commits), "commits"))  # who comes counts on from here
                return function(state, *args, **kwargs)
            except (CollectiveMismatch, CollectiveStall):
                raise  # the script's own: it would come again
            except HorovodInternalError as error:
                setbacks.note(error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            while True:
                try:
                    reset()
                    state.on_reset()
                    break
                except (CollectiveMismatch, CollectiveStall):
                    raise
                except HorovodInternalError as error:
                    setbacks.note(error)
                    continue  # another worker was lost while the world formed

    return wrapper
