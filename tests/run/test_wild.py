"""What cannot be made exact is refused by name, and where a batch lies in memory does not depend on who fetched it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import reference
import torch
from cases import Training, dataset, mlp, sgd
from test_workers import die, let_in, wait_for_file
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.data.alignment import ALIGNMENT_BYTES, align_batch
from holdfast.data.stuck_loaders import LoaderStacks
from holdfast.engine.api.hash_order import first_use
from tests.harness.forked import agreed, forked

Join = Callable[..., holdfast.Run]


# ---- where a batch lies


class Rows:
    """Rows of 101 numbers, of which the first is a label: the rest begins at an odd place."""

    def __init__(self) -> None:
        self.rows = numpy.random.RandomState(1).randn(96, 101).astype(numpy.float32)
        self.rows[:, 0] = numpy.arange(96) % 3

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def split(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = numpy.stack(samples)
    return torch.from_numpy(rows[:, 1:]), torch.from_numpy(rows[:, 0]).long()


def train_rows(num_workers: int, at_step: Callable[[int, int], None] | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = holdfast.join(
        model, optimizer, Rows(), batch_size=12, shards=6, collate_fn=split, num_workers=num_workers, checkpoint="none"
    )
    for step in run.steps(8):
        if at_step:
            at_step(step.number, -1)
        for number, (x, y) in enumerate(step):
            F.cross_entropy(model(x), y).backward()
            if at_step:
                at_step(step.number, number)
        optimizer.step()
    digest = run.digest()
    run.close()
    return digest


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_who_fetched_a_batch_changes_no_bit(tmp_path: Path) -> None:
    """With and without loader processes, and when a dead worker's shards are fetched by the one that is left."""
    gone, joined = tmp_path / "gone", tmp_path / "joined"

    def victim(step: int, shard: int) -> None:
        if (step, shard) == (2, 1):
            gone.touch()
            die()

    def survivor(step: int, shard: int) -> None:
        if step >= 3 and shard == -1:
            let_in("w0.2", joined)

    def spare() -> Any:
        wait_for_file(gone)
        return train_rows(2, lambda step, shard: joined.touch())

    bodies = {"w0.1": lambda: train_rows(2, victim), "w1.1": lambda: train_rows(2, survivor), "w0.2": spare}
    digest = agreed(forked(bodies, size=2))
    assert digest == agreed(forked(lambda: train_rows(0), workers=1))


def offsets(batch: Any) -> list[int]:
    """Of the tensors and arrays in a batch, from a cache line."""
    found = []
    for item in batch.values() if isinstance(batch, dict) else batch:
        start = item.data_ptr() if isinstance(item, torch.Tensor) else item.ctypes.data
        found.append(start % ALIGNMENT_BYTES)
    return found


def odd(rows: int = 2) -> numpy.ndarray[Any, Any]:
    """An array that begins four bytes after a cache line."""
    memory = numpy.zeros(4 * rows * 101 + 2 * ALIGNMENT_BYTES, dtype=numpy.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + 4
    array = memory[start : start + 4 * rows * 101].view(numpy.float32).reshape(rows, 101)
    array[...] = numpy.arange(rows * 101).reshape(rows, 101)
    return array


def test_a_batch_is_brought_into_one_form() -> None:
    array = odd()
    whole = torch.from_numpy(array)
    batch = align_batch({"x": whole[:, 1:], "y": whole[:, 0], "a": array[:, 1:], "t": torch.ones(3)})
    assert offsets(batch) == [4, 0, 0, 0]  # as in a storage that begins on a cache line; an array is dense
    assert batch["x"].stride() == (101, 1) and torch.equal(batch["x"], torch.from_numpy(array[:, 1:].copy()))
    assert batch["a"].flags.c_contiguous and (batch["a"] == array[:, 1:]).all()
    assert batch["x"].untyped_storage().data_ptr() == batch["y"].untyped_storage().data_ptr()  # they share it still


def test_batches_of_any_shape_are_aligned() -> None:
    class Named:
        def __init__(self) -> None:
            self.x = torch.from_numpy(odd())
            self.more = [torch.from_numpy(odd()), {"deep": odd()}]
            self.me = self

    named = align_batch(Named())
    assert offsets([named.x, named.more[0], named.more[1]["deep"]]) == [0, 0, 0]
    packed = nn.utils.rnn.pack_sequence([torch.from_numpy(odd(1))[0], torch.from_numpy(odd(1))[0][:50]])
    assert offsets([align_batch(packed).data]) == [0]
    assert offsets(align_batch((odd(), 3 * torch.ones(2)))) == [0, 0]
    assert align_batch(["a", 1, None]) == ["a", 1, None]


def test_parameters_and_buffers_made_from_arrays_are_aligned(joined: Join) -> None:
    model = nn.Linear(101, 2)
    model.weight = nn.Parameter(torch.from_numpy(odd()))
    model.register_buffer("scale", torch.from_numpy(odd(1))[0])
    joined(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset(), batch_size=4, shards=2)
    assert offsets([model.weight, model.scale]) == [0, 0]
    assert torch.equal(model.weight, torch.arange(202.0).view(2, 101))


# ---- what is refused


class Empty(nn.Module):
    """A buffer that is there only after the first forward pass."""

    def __init__(self, *, registered: bool, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.persistent = persistent
        if registered:
            self.register_buffer("mean", None, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", x.detach().mean(0), persistent=self.persistent)
        self.mean = x.detach().mean(0)
        return self.linear(x)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Embedding(10, 6, max_norm=0.1), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.rows(torch.arange(len(x)) % 10))


class Diverging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(1e30)
        return self.linear(x)


def train(joined: Join, training: Training, steps: int = 4, **options: Any) -> holdfast.Run:
    run = joined(
        training.model, training.optimizer, dataset(), batch_size=8, shards=2, extras=training.extras, **options
    )
    for step in run.steps(steps):
        for x, y in step:
            F.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()
    return run


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: Empty(registered=True), "the buffer mean came to be in a forward pass"),
        (lambda: Empty(registered=False), "the buffer mean came to be in a forward pass"),
        (Bounded, "the parameter rows.weight was changed while a shard was computed"),
    ],
)
def test_a_forward_that_changes_what_only_one_worker_has(
    joined: Join, model: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(joined, sgd(model()))


@pytest.mark.parametrize("registered", [True, False])
def test_a_cache_that_is_born_in_a_forward_is_left_alone(joined: Join, registered: bool) -> None:
    train(joined, sgd(Empty(registered=registered, persistent=False)))


def test_a_buffer_that_is_no_longer_finite_is_looked_at(joined: Join) -> None:
    with pytest.raises(holdfast.HoldfastError, match="the buffer 'seen' is not finite at step 1"):
        train(joined, sgd(Diverging()))


def test_closures_are_refused(joined: Join) -> None:
    model = mlp()
    with pytest.raises(ConfigError, match="the optimizer is LBFGS"):
        joined(model, torch.optim.LBFGS(model.parameters()), dataset(), batch_size=8, shards=2)
    training = sgd(mlp())
    run = joined(training.model, training.optimizer, dataset(), batch_size=8, shards=2)
    with pytest.raises(ConfigError, match=r"optimizer.step\(\) was given a closure"):
        for step in run.steps(1):
            for x, y in step:
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step(lambda: 0.0)


class Extra:
    """Whatever its parts are. `load`: what load_state_dict does."""

    def __init__(self, state: Any, load: Callable[[Any], None] = lambda state: None) -> None:
        self.state, self.load = state, load

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.load(state)


def forget(extra: Extra) -> Extra:
    extra.load = lambda state: setattr(extra, "state", {"n": 0.0})
    return extra


def fail(state: Any) -> None:
    raise AttributeError("boom")


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (Extra({"m": numpy.ma.masked_array([1.0, 2.0], mask=[0, 1])}), "is a numpy MaskedArray"),
        (Extra({"s": {"a", "b"}}), r"extras\['x'\]\['state'\]\['s'\] is a set"),
        (Extra({"n": 1.0}, fail), "does not take back what its own state_dict returned: AttributeError: boom"),
        (Extra([1.0], lambda state: state["n"]), "does not take back .*: TypeError"),
        (forget(Extra({"n": 1.0})), "is another after it was given its own state"),
    ],
)
def test_an_extra_that_does_not_come_back_is_refused_at_once(joined: Join, extra: Extra, sentence: str) -> None:
    training = sgd(mlp())
    with pytest.raises(ConfigError, match=sentence):
        joined(training.model, training.optimizer, dataset(), batch_size=8, shards=2, extras={"x": extra})


def test_an_extra_may_keep_its_state_in_a_list(joined: Join) -> None:
    training = sgd(mlp())
    training.extras["x"] = Extra([1.0, {"b": 2, "a": 3}])
    train(joined, training)


def test_an_optimizer_without_groups_is_one_sentence(joined: Join) -> None:
    class Bare(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"nothing": 1}

    model = mlp()
    with pytest.raises(ConfigError, match="the state_dict of the optimizer, a Bare, lacks the entries"):
        joined(model, Bare(model.parameters(), lr=0.1), dataset(), batch_size=8, shards=2)


def test_a_seed_that_is_too_large_is_one_sentence(joined: Join) -> None:
    with pytest.raises(ConfigError, match="seed is 18446744073709551615") as raised:
        train(joined, sgd(mlp()), seed=2**64 - 1)
    assert "2**63 - 1" in raised.value.hint


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_set_that_appears_in_an_extra_is_one_sentence_when_a_worker_joins(tmp_path: Path) -> None:
    gone = tmp_path / "gone"

    def body(role: str) -> Any:
        if role == "spare":
            wait_for_file(gone)
        training, extra = sgd(mlp()), Extra({"n": 1.0})
        run = holdfast.join(
            training.model,
            training.optimizer,
            dataset(),
            batch_size=24,
            shards=6,
            extras={"x": extra},
            seed=reference.SEED,
        )
        for step in run.steps(40):
            extra.state = {"n": {1, 2}} if step.number > 1 else {"n": 1.0}
            if role == "victim" and step.number == 3:
                gone.touch()
                die()
            if role == "survivor" and step.number > 3:
                let_in("w0.2", tmp_path / "joined")
            for x, y in step:
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
        run.close()

    roles = {"w0.1": "victim", "w1.1": "survivor", "w0.2": "spare"}
    outcomes = forked({worker: partial(body, role) for worker, role in roles.items()}, size=2)
    assert "['n'] is a set, which cannot travel in a snapshot" in outcomes["w1.1"].error


# ---- what is said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\nfor t in set(names): pass", (2, "a set")),
        ("x = {'a', 2}", (1, "a set")),
        ("x = {1, 2.5, True}", None),
        ("x = {t for t in y}\nz = hash(x)", (1, "a set")),
        ("z = hash('a')", (1, "hash()")),
        ("x = {1: 2}\ny = [3]\ns.set(4)", None),
    ],
)
def test_where_the_order_of_strings_matters(text: str, found: tuple[int, str] | None) -> None:
    assert first_use(text) == found


def test_a_loader_that_waits_for_a_lock_is_named(tmp_path: Path) -> None:
    """The warning has the line at which it stands; nothing is ended."""
    lock, stacks = threading.Lock(), LoaderStacks()
    lock.acquire()
    ready = tmp_path / "ready"

    def stand() -> Any:
        stacks.listen()
        ready.touch()
        lock.acquire()

    child = os.fork()
    if not child:
        stand()
    try:
        wait_for_file(ready)
        with pytest.warns(UserWarning, match=r"stands at line \d+ of .*test_wild.py, in stand"):
            stacks.tell([child])
        stacks.tell([child])  # once is enough
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        stacks.close()
