"""What a mode is: the port between the step engine and the ways to train.

A mode answers five questions, and nothing outside `modes/` asks which mode it is:

    rules        what a step consists of, for the machine (pure: membership/step_rules.py)
    data         which samples the shards of a step hold, and where the run is in its data
    capture      how a shard's gradients and buffers are taken from the model, and the step's put back
    aggregator   what becomes of the gradients of all shards (reduce/aggregators.py); the mean, if nothing is said
    attendance   what the loop of a worker does around its steps; it is waited for, if nothing is said

Everything here but the rules belongs to the thread of the user's loop. `docs/how-to/add-a-mode.md` builds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.events import EventLog
from holdfast.ledger.port import Ledger
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine
from holdfast.membership.step_rules import StepRules
from holdfast.modes.capture import GradientCapture
from holdfast.reduce.aggregators import Aggregator, Mean
from holdfast.reduce.reduction import KeptMean
from holdfast.servers.units_port import ServerLines
from holdfast.state.extras import Stateful
from holdfast.state.optimizer import Optimizers


class DataPlan(ABC):
    """Which samples the shards of a step hold. What it knows of where the run is travels with the run's state."""

    @abstractmethod
    def place(self, step: int, shard: int) -> ShardPlace | None:
        """Where the ShardPlan has this shard's samples; None: the step has no such shard."""

    @abstractmethod
    def epoch(self, step: int) -> int:
        """Steps and epochs count from 0."""

    @abstractmethod
    def ends_epoch(self, step: int, shards: Sequence[int] | None = None) -> bool:
        """Whether an epoch is over after this step. `shards`: those that its mean is over, once that is known."""

    @abstractmethod
    def samples(self, step: int, shards: Sequence[int] | None) -> int:
        """How many the step's mean is over. `shards`: those of it; None: all."""

    def samples_made(self, step: int, here: int) -> int:
        """By the whole run in this step. `here`: that this worker's mean is over."""
        return here

    @abstractmethod
    def first_step(self, epoch: int) -> int | None:
        """Of an epoch; None: that is not known beforehand."""

    def is_over(self, steps: int) -> bool:
        """The run has had so many. Whether nothing of them is left to do."""
        return True

    @abstractmethod
    def upcoming(
        self, step: int, now: Sequence[int], later: Sequence[int], *, room: int, until: int, passed: Collection[int]
    ) -> Iterator[ShardPlace]:
        """What a worker will need if nothing happens: these shards of this step, and those of each later one.

        `room`: the shards of a step in this view; `until`: the step at which the loop ends; `passed`: steps without
        shards.
        """

    def begin(self, step: int) -> None:
        """This step is the next. A state that says nothing of the data, such as an imported one, says at least that."""

    def steps_left(self, step: int, epochs: int) -> int:
        """Until so many epochs are over, as far as is known; 0: they are. Asked where first_step does not know."""
        raise NotImplementedError

    def ahead(self, step: int, me: str, members: Sequence[str]) -> str:
        """What this worker brings to the step for the next one; asked where batches are handed on. `members`: those who
        bring shards, in their order."""
        return ""

    def told(self, step: int, ahead: str) -> None:
        """What came of that with the step's mean, the same on all members."""

    def serve(self, me: str) -> None:
        """The state as it is now is about to be given to a worker that has none."""

    def applied(self, shards: Sequence[int] | None) -> None:
        """The step is applied, and its mean was over these shards; None: over all."""

    def state(self) -> dict[str, Any]:
        """What belongs into a snapshot, under names of its own."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """From a snapshot, which may say nothing of it."""


class WaitWords(Protocol):
    """What the worker's heartbeat says of a wait, in place of what the machine would."""

    def outside_steps(self, what: str, whom: Sequence[str]) -> None:
        """`whom`: only these can end it; nobody: it ends by itself."""

    def inside_steps(self) -> None:
        """It is over."""


class TimeAccount(Protocol):
    """Where the worker's time goes (core/spending.py)."""

    def during(self, category: str) -> AbstractContextManager[None]: ...


class Runtime(Protocol):
    """The worker, as an attendance drives it while the training thread is away."""

    machine: Machine

    @property
    def waiting(self) -> WaitWords: ...

    @property
    def spending(self) -> TimeAccount: ...

    @property
    def kept(self) -> KeptMean | None: ...

    @property
    def is_ending(self) -> bool: ...

    def drain(self) -> None:
        """Let the machine handle what has come."""

    def wait(self) -> None:
        """For something to come, for a moment."""

    def wake(self) -> None:
        """End such a wait, from another thread."""

    def begin_step(self, step: int) -> None:
        """Shards of this step may be brought from now on."""

    def computed(self, step: int, durations_s: Sequence[float]) -> None:
        """What is there of this step's shards is all that this worker brings."""

    def tell(self, event: m.Event) -> None: ...

    def drop_directive(self) -> None:
        """What the machine wants of the training thread is done in its place."""

    def end(self, end: m.End) -> None:
        """The worker leaves as soon as the training thread is back."""

    def note_pace(self, durations_s: Sequence[float]) -> None: ...

    def listen(self, at_most_s: float) -> None:
        """Wait and hear, in the training thread. Raises what ends the worker."""


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What an attendance may need of the worker that it is of. `servers` connects to the run's parameter servers."""

    me: str
    model: torch.nn.Module
    optimizers: Optimizers
    extras: Mapping[str, Stateful]  # what travels with the state besides
    data: DataPlan
    events: EventLog
    servers: Callable[[], ServerLines]


class Attendance:
    """What the loop asks around its steps. With this one all members make each step together, and nobody goes on
    without this worker."""

    in_step = True  # all members apply a step before any of them comes to the end of the next
    state_elsewhere = False  # the training's state is not with the members: `arrives` and `collect` know where
    own_view = False  # each worker has a view of its own, and nobody else is in it

    def ledger(self, ledger: Ledger) -> Ledger:
        """As the worker's membership is to see it."""
        return ledger

    def workers(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Of the run. `members`: of the view."""
        return members

    def arrives(self, search: Callable[[], int | None]) -> int | None:
        """This worker has no state. The step that it is at when it has; `search` looks into storage."""
        return search()

    def collect(self) -> None:
        """The training's state is to be saved now from the model and the optimizers. PeerError: it is not to be had."""

    def opens(self, step: int, until: int) -> None:
        """Before the loop begins with this step, or ends there. `until`: the step at which it is expected to end."""

    def updates(self, optimizer: torch.optim.Optimizer) -> None:
        """The script's lines for a step call it, and it has not begun."""

    def ends(self, step: int) -> None:
        """The script's lines for the step are done."""

    def attach(self, runtime: Runtime) -> None:
        """Once, before the first step."""

    def away(self, step: int) -> AbstractContextManager[None]:
        """While the user's lines compute a shard of this step."""
        return nullcontext()

    def has_closed(self, step: int) -> bool:
        """Whether what is still computed of it comes too late."""
        return False

    def too_late(self, durations_s: Sequence[float]) -> None:
        """The shards of a closed step took so long each."""

    def due(self) -> m.Compute | None:
        """The step that the user's loop is to begin next, if it was closed already."""
        return None

    def missed(self, step: int) -> KeptMean | None:
        """The mean of a step that was committed while the loop was away."""
        return None

    def given(self, directive: m.Compute | m.Commit) -> None:
        """The machine has told the loop what to do next."""

    def begins(self, capture: GradientCapture) -> None:
        """The user's loop begins with the shards of a step."""

    def knows_of(self, applied: int) -> bool:
        """The user's loop has applied this step. Whether the machine was told so before."""
        return False

    def close(self) -> None:
        """The worker leaves, and is about to say so in the ledger. May be called again."""


def refuse_handed(plan: ShardPlan) -> None:
    """For modes in which a step need not be whole, or is not everybody's."""
    if plan.handed is not None:
        raise ConfigError(
            "the dataset is an iterable, which is handed on from step to step, and in this mode workers need not make "
            "each step together",
            hint="leave out mode=..., or use a dataset with __len__ and __getitem__, or holdfast.data.Stream",
        )


class Mode(ABC):
    """A way to train, as `holdfast.join(mode=...)` takes it. What it is made with must be the same on all workers."""

    uses_servers: ClassVar[bool] = False  # the run needs parameter servers
    on_devices: ClassVar[bool] = False  # models may be on an accelerator
    in_groups: ClassVar[bool] = False  # models may be sharded over a group of ranks

    def words(self) -> str:
        """As the run's settings have it: all workers must say the same. Its class, and what it was made with."""
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()) if value is not None)
        return f"{type(self).__name__}({given})"

    def check(self, config: RunConfig, plan: ShardPlan) -> None:
        """ConfigError if these settings and this data cannot be trained with in this mode."""

    def check_device(self, device: torch.device | None) -> None:
        """ConfigError if it does not train models on this device; None: in this process's memory."""
        if device is not None and not self.on_devices:
            raise ConfigError(
                f"the model is on {device}, and the mode {type(self).__name__} trains models on the CPU only",
                hint="leave out the mode, or move the model to the CPU before holdfast.join",
            )

    def check_size(self, workers: int, shards: int) -> None:
        """ConfigError if the run has too few workers for it, or for this number of shards."""

    @abstractmethod
    def rules(self) -> StepRules: ...

    @abstractmethod
    def data(self, plan: ShardPlan) -> DataPlan: ...

    def capture(self, model: torch.nn.Module) -> GradientCapture:
        return GradientCapture(model)

    def aggregator(self) -> Aggregator:
        return Mean()

    @property
    def hostile(self) -> int | None:
        """So many of a step's shards may be hostile, and who brings such is evicted. None: nobody looks for that."""
        return None

    def attendance(self, parts: TrainingParts) -> Attendance:
        return Attendance()
