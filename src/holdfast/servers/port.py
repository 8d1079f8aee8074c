"""What a worker has of the parameter servers: a port. `memory.py` is the twin in one process, `client.py` the real one.

Parameters are known by their position in the order that all workers agree on (`Layout`). They are cut into slices, and
each slice counts the updates that it has applied: `Versions` has one number for each slice. An update has a gradient
for each parameter, and is acknowledged when every slice has committed it. A worker numbers its updates itself, so that
what is sent twice is applied once.

A worker's clock counts the steps whose update it has pushed. It bounds how far workers are apart: a pull may wait until
no live worker's clock is below a floor. Whoever is retired is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from holdfast.servers.compressing import Compressor
from holdfast.servers.recipe import Recipe, Settings, recipe_of
from holdfast.servers.slicing import Segment, Size
from holdfast.state.layout import dtype_name
from holdfast.state.optimizer import Optimizers

Versions: TypeAlias = tuple[int, ...]  # updates applied, for each slice
OptimizerState: TypeAlias = Mapping[str, torch.Tensor]  # of some elements: as long as they are, or one number for all


@dataclass(frozen=True)
class Layout:
    """The parameters of a run, in the order in which all workers have them."""

    names: tuple[str, ...]
    sizes: tuple[Size, ...]
    dtypes: tuple[str, ...]
    recipe: Recipe

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes) == len(self.dtypes) == len(self.recipe.of_parameter)


def layout_of(parameters: Mapping[str, torch.nn.Parameter], optimizers: Optimizers) -> Layout:
    """ConfigError for optimizers that servers cannot run."""
    values = list(parameters.values())
    sizes = tuple(Size(one.numel(), one.element_size()) for one in values)
    dtypes = tuple(dtype_name(one.dtype) for one in values)
    return Layout(tuple(parameters), sizes, dtypes, recipe_of(optimizers, values))


@dataclass(frozen=True)
class Piece:
    """Some elements of a parameter, flat, with what the optimizer has for them: nothing before the first update."""

    values: torch.Tensor
    optimizer: OptimizerState


Initial: TypeAlias = Callable[[Segment], Piece]  # the state that a run begins with, of any elements of any parameter


def initial_of(parameters: Sequence[torch.Tensor]) -> Initial:
    """These values, before any update."""

    def piece(segment: Segment) -> Piece:
        return Piece(parameters[segment.parameter].detach().reshape(-1)[segment.start : segment.stop], {})

    return piece


class Ticket(Protocol):
    """Something that was asked for and is under way."""

    @property
    def done(self) -> bool: ...

    def waits_for(self) -> str:
        """Which slices have not answered, and why as far as that is known; empty: nothing is. From any thread."""

    def wait(self, timeout_s: float) -> Versions:
        """The versions that came of it: of a push, with which it is in; of a pull, of what was read.

        TimeoutError, and it goes on; DivergedError for an update that is not finite, with nothing of it applied in the
        slice that refused it; Evicted if this worker was retired; PeerError if no server answered within the client's
        limit, when nobody knows what came of it.
        """


class Capture(Protocol):
    """The state of all slices at `versions`: every update is in all of it or in none. Held until it is closed."""

    @property
    def versions(self) -> Versions: ...

    @property
    def clocks(self) -> Mapping[str, int]:
        """Of the live workers, at these versions."""

    def pieces(self) -> Iterator[tuple[Segment, Piece]]:
        """All elements, each once, a slice at a time. What a piece holds is the caller's."""

    def close(self) -> None: ...


class ParameterServers(Protocol):
    """One worker's connection to the servers. Used by one thread, but for `close`."""

    def open(self, layout: Layout, initial: Initial, *, timeout_s: float) -> bool:
        """Create the run's slices, or attach to those that are there: True if it was this worker that created them.

        Several may try at once, and one wins. ConfigError if the run has other parameters or optimizers than these.
        """

    def join(self, clock: int | None = None) -> int:
        """Be counted among the live workers, from this clock on; None: from the slowest one's, 0 where there is none.

        Returns the clock. From then on others wait for this worker, until it is retired.
        """

    def push(
        self,
        gradients: Sequence[torch.Tensor | None],
        settings: Sequence[Settings],
        *,
        clock: int,
        copy: bool = True,
        compressor: Compressor | None = None,
    ) -> Ticket:
        """Send an update: a gradient of each parameter, None where there is none; the settings of each group.

        Returns when the gradients are copied. Without `copy` they must stay as they are until the ticket is done. Waits
        while as many updates are under way as the client takes. With a compressor they travel as it writes them, unless
        one is not finite.
        """

    def pull(
        self,
        into: Sequence[torch.Tensor],
        *,
        at_least: Versions | None = None,
        clock_floor: int | None = None,
    ) -> Ticket:
        """Read all parameters into these tensors, which must be left alone until the ticket is done.

        The read is fresh: it has everything that was acknowledged before. With `at_least` it may be older than that,
        but no older than these versions. With `clock_floor` it waits until no live worker's clock is below it.
        """

    def clocks(self) -> Mapping[str, int]:
        """Of the live workers, by the name of each (without its incarnation)."""

    def retire(self, worker: str, incarnation: int) -> None:
        """This worker is gone: nobody waits for it, and nothing of this incarnation is taken any more."""

    def capture(self, *, timeout_s: float) -> Capture:
        """A consistent state of all slices. Updates wait for as long as it takes to mark it, not to read it."""

    def close(self) -> None: ...
