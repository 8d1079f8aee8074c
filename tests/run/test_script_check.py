"""`holdfast check`: faults of scripts, and faults planted in Holdfast, are found and named; exact is exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import reference
import torch
from cases import CASES, Case, Training, dataset, mlp, sgd
from checked import Refused, checked
from test_wild import Bounded, Empty, Rows, split
from torch import nn
from torch.nn import functional as F
from wild import WILD

import holdfast
from holdfast.data import loader
from holdfast.engine.steps import StepEngine
from holdfast.modes import buffers
from holdfast.modes.buffers import Buffers
from holdfast.modes.capture import GradientCapture
from holdfast.modes.watching import BackwardWatch, ParameterWatch
from holdfast.state import extras as extras_of_state
from holdfast.state.flags import ModuleFlags
from holdfast.state.optimizer import AddedGroups

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def train(
    training: Training,
    loss_of: Loss = plain,
    *,
    before: Callable[[Any], None] = lambda step: None,
    after: Callable[[Any, Any], None] = lambda run, step: None,
    data: Any = None,
    **options: Any,
) -> None:
    run = holdfast.join(
        training.model, training.optimizer, data or dataset(), batch_size=8, shards=4, extras=training.extras, **options
    )
    for step in run.steps(100):
        before(step)
        for x, y in step:
            loss = loss_of(training.model, x, y)
            loss.backward()
            step.record(loss=loss)
        after(run, step)
        training.optimizer.step()


def run_case(case: Case) -> Callable[[], None]:
    def script() -> None:
        training = case.start()
        run = holdfast.join(
            training.model,
            training.optimizer,
            dataset(),
            batch_size=24,
            shards=6,
            extras=training.extras,
            seed=reference.SEED,
        )
        with case.around():
            for step in run.steps(100):
                case.before(training, step.number)
                for batch in step:
                    step.record(loss=case.shard(training, batch, step.number))
                case.apply(training, step.number)

    return script


# ---- no false alarm


@pytest.mark.parametrize("name", [*CASES, *WILD])
def test_what_is_exact_is_found_exact(name: str) -> None:
    verdict = checked(run_case({**CASES, **WILD}[name]))
    assert verdict.text() == "exact in 24 shards of 4 steps: fetch, order, restore, join"


def test_counters_and_clocks_that_change_no_bit_are_no_fault() -> None:
    def script() -> None:
        began, seen = time.time(), [0]

        def count(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen[0] += len(x)
            return plain(model, x, y)

        train(sgd(mlp()), count, after=lambda run, step: print(time.time() - began, seen) if run.leader else None)

    assert checked(script).found is None


def test_loader_processes_and_the_worker_fetch_the_same() -> None:
    def script() -> None:
        model = nn.Sequential(nn.Linear(100, 16), nn.ReLU(), nn.Linear(16, 3))
        train(sgd(model), data=Rows(), collate_fn=split, num_workers=2)

    assert checked(script).found is None


# ---- what scripts do


def clock() -> None:
    train(sgd(mlp()), lambda model, x, y: plain(model, x, y) * (1 + time.time() % 1))


def own_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    train(sgd(mlp()), lambda model, x, y: plain(model, x + torch.randn(x.shape, generator=generator), y))


def counter() -> None:
    seen = [0]

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        return plain(model, x, y) * (1 + seen[0] / 10)

    train(sgd(mlp()), loss_of)


def leak() -> None:
    last = [torch.zeros(())]

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before, last[0] = last[0], x.detach().mean()
        return plain(model, x + before, y)

    train(sgd(mlp()), loss_of)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = mlp(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) / self.temperature


def annealed() -> None:
    training = sgd(nn.ModuleDict({"head": Annealed()}))

    def cool(run: Any, step: Any) -> None:
        training.model["head"].temperature *= 0.9

    train(training, lambda model, x, y: plain(model["head"], x, y), after=cool)


def outside_extras() -> None:
    training, scale = sgd(mlp()), [1.0]

    def shrink(run: Any, step: Any) -> None:
        scale[0] *= 0.9
        training.optimizer.param_groups[0]["lr"] = 0.1 * scale[0]

    train(training, after=shrink)


def leader_only() -> None:
    training = sgd(mlp())

    def halve(run: Any, step: Any) -> None:
        if run.leader:
            training.optimizer.param_groups[0]["weight_decay"] += 0.1

    train(training, after=halve)


class Drawing:
    """A dataset with a generator of its own."""

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(1)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.rng.normal(size=6), dtype=torch.float32), index % 4


def drawing() -> None:
    train(sgd(mlp()), data=Drawing())


def own_loss_scheduled() -> None:
    """By the last shard's loss, which every worker has another of."""
    training, last = sgd(mlp()), [0.0]

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = plain(model, x, y)
        last[0] = loss.item()
        return loss

    def schedule(run: Any, step: Any) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.01 * last[0]

    train(training, loss_of, after=schedule)


def unseeded_data() -> None:
    noise = torch.from_numpy(numpy.random.default_rng().normal(size=(96, 6))).float()
    train(sgd(mlp()), data=torch.utils.data.TensorDataset(noise, torch.arange(96) % 4))


@pytest.mark.parametrize(
    ("script", "check", "words"),
    [
        (clock, "again", ["the gradient of 0.weight", "when the shard is computed again", "time.time()", "the clock"]),
        (own_generator, "again", ["generator of own_generator() (state", "torch.Generator().manual_seed(3)"]),
        (counter, "again", ["the variable seen of", "([0], then [4])"]),
        (leak, "order", ["in another order", "what one leaves behind for the next"]),
        (annealed, "join", ["the attribute temperature of the module head (0.81", "1.0 in", "register_buffer"]),
        (outside_extras, "join", ["the optimizer's lr", "the variable scale of", "[1.0] in the one that joined"]),
        (leader_only, "join", ["the optimizer's weight_decay", "if run.leader:"]),
        (drawing, "fetch", ["the batch of shard", "other values", "collate_fn draw from torch's"]),
        (unseeded_data, "join", ["the batch in shard 0 of step 2", "must build the same dataset"]),
        (own_loss_scheduled, "join", ["the optimizer's lr"]),
    ],
)
def test_what_a_script_does_is_found_and_named(script: Callable[[], None], check: str, words: list[str]) -> None:
    verdict = checked(script)
    assert verdict.found is not None
    print(verdict.text())
    assert verdict.found.check == check
    for word in words:
        assert word in verdict.text()


# ---- each fix of Holdfast, taken out


def unaligned(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(loader, "align_batch", lambda batch: batch)

    def script() -> None:
        train(sgd(nn.Sequential(nn.Linear(100, 16))), data=Rows(), collate_fn=split)

    return script


def unseeded_before_the_shards(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    seed = StepEngine.seed
    patch.setattr(StepEngine, "seed", lambda one, step, place: seed(one, step, place) if place != "begin" else None)
    return run_case(WILD["noise before the shards"])


def flags_that_stay(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(ModuleFlags, "changes", lambda flags: {})

    def script() -> None:
        training = sgd(mlp(nn.BatchNorm1d(8)))
        train(training, before=lambda step: training.model[1].eval() if step.number == 1 else None)

    return script


def sorted_extras(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    def in_order(value: Any) -> Any:
        if isinstance(value, dict):
            made = value.copy()
            made.clear()
            made.update(sorted((key, in_order(item)) for key, item in value.items()))
            return made
        return value

    patch.setattr(extras_of_state, "InOrder", in_order)
    return run_case(WILD["extras with an order"])


def unwatched_births(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(Buffers, "check_births", lambda buffers: None)

    class Averaging(Empty):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.mean if self.mean is not None else x.detach().mean(0)
            self.mean = 0.5 * before + 0.5 * x.detach().mean(0)
            return self.linear(x - self.mean)  # type: ignore[no-any-return]

    return lambda: train(sgd(Averaging(registered=True)))


def unwatched_parameters(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(ParameterWatch, "after_shard", lambda watch: None)
    return lambda: train(sgd(Bounded()))


def strides_of_hooks(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    load = GradientCapture.load

    def keep_strides(capture: GradientCapture, kept: Any) -> None:
        grads = [parameter.grad for parameter in capture.parameters]
        load(capture, kept)
        for parameter, grad in zip(capture.parameters, grads, strict=True):
            if grad is not None and parameter.grad is not None:
                parameter.grad = torch.empty_strided(grad.shape, grad.stride()).copy_(parameter.grad)

    patch.setattr(GradientCapture, "load", keep_strides)
    return run_case(WILD["a hook that changes strides"])


def kept_casts(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(torch, "clear_autocast_cache", lambda: None)
    return run_case(WILD["autocast around both loops"])


def closures(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr("holdfast.engine.api.run.check_closure", lambda args, kwargs: None)

    def script() -> None:
        training = sgd(mlp())
        run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=8, shards=4)
        for step in run.steps(100):
            for x, y in step:
                plain(training.model, x, y).backward()

            def closure() -> torch.Tensor:
                training.optimizer.zero_grad()
                loss = plain(training.model, x, y)  # noqa: B023
                loss.backward()
                return loss

            training.optimizer.step(closure)

    return script


def backward_after_the_shards(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """With the batch that this worker had last; members that compare such gradients would refuse it."""
    patch.setattr(BackwardWatch, "late_gradients", lambda watch: 0)

    def script() -> None:
        training = sgd(mlp())
        run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=8, shards=4)
        for step in run.steps(100):
            for x, y in step:
                plain(training.model, x, y).backward()
            plain(training.model, x, y).backward()
            training.optimizer.step()

    return script


class Caching(nn.Module):
    """Keeps ones for the longest input that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)
        self.register_buffer("ones", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.ones) < x.shape[1]:
            self.ones = torch.ones(x.shape[1])
        return self.out((x * self.ones[: x.shape[1]])[:, :6])  # type: ignore[no-any-return]


def grown_between_two_loops() -> None:
    training = sgd(Caching())
    run = holdfast.join(training.model, training.optimizer, dataset(), batch_size=8, shards=4)
    for steps in (1, 100):
        for step in run.steps(steps):
            for x, y in step:
                plain(training.model, x, y).backward()
            training.optimizer.step()
        training.model(torch.ones(1, 12))  # an evaluation, of which a process that joins later knows nothing


def caches_that_travel(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(Buffers, "base", lambda buffers: dict(buffers._model.named_buffers()))
    return grown_between_two_loops


def groups_that_stay(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(AddedGroups, "add", lambda *arguments, **options: None)
    return run_case(WILD["a group that is added midway"])


def sums_that_overflow(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(buffers, "_sum_like", lambda tensor: tensor)
    patch.setattr(buffers, "_to_sum", lambda tensor: tensor)
    patch.setattr(buffers, "_mean", lambda total, like: total)

    class Nanoseconds(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)
            self.register_buffer("at", torch.tensor([20000.0, 20000.0], dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.at.add_(16)
            return super().forward(x)

    return lambda: train(sgd(Nanoseconds()))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (unaligned, "lies elsewhere in memory when it is fetched another way"),
        (unseeded_before_the_shards, "the random generators before the shards of step 2"),
        (flags_that_stay, "the setting training of the module 1"),
        (sorted_extras, "the order of the extra 'memory'"),
        (unwatched_births, "the gradient of linear.weight"),
        (unwatched_parameters, "the parameter rows.weight was changed while the shards of step 0 were computed"),
        (strides_of_hooks, "the gradient of 0.weight has the form that the shard gave it"),
        (kept_casts, "the gradient of 0.weight"),
        (closures, "the parameter 0.bias (and 7 more) after step 2"),
        (backward_after_the_shards, "after step 2 differs in a process that joined the run"),
        (
            caches_that_travel,
            "put back where it was captured: the buffer ones has shape (12,) in the run and (6,) here",
        ),
        (sums_that_overflow, "the buffer at of step 0 is not the mean of what the shards have made of it"),
    ],
)
def test_every_fix_that_is_taken_out_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], Callable[[], None]], words: str
) -> None:
    verdict = checked(plant(monkeypatch))
    assert verdict.found is not None
    print(verdict.text())
    assert words in verdict.text()


def test_a_joiner_that_cannot_take_the_state_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        Refused, match=r"^joiner: the optimizer does not take .* a different number of parameter groups"
    ):
        checked(groups_that_stay(monkeypatch))


def test_a_cache_that_grows_between_two_loops_is_exact() -> None:
    assert checked(grown_between_two_loops).found is None


def test_what_join_refuses_is_refused_with_its_sentence() -> None:
    with pytest.raises(Refused, match=r"first: the parameter rows.weight was changed while a shard was computed"):
        checked(lambda: train(sgd(Bounded())))


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


class Feed:
    """As a trainer's loader, from which each look draws a step of the run."""

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        while self.drawn < 1000:
            self.drawn += 1
            yield self.drawn


def test_what_a_script_keeps_is_not_used_up_by_looking_at_it() -> None:
    def script() -> None:
        kept, training = [Feed()], CASES["batch norm"].start()

        def before(step: Any) -> None:
            assert kept[0].drawn == 0, "somebody has drawn from what is the script's"

        train(training, before=before)

    assert checked(script).found is None
