"""What `join` takes under the names of PyTorch means what it means there; old names are answered with the new ones."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Training, dataset, mlp, sgd
from torch.nn import functional as F
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, get_worker_info

import holdfast
from holdfast.checkpoint.restoring.reading import list_checkpoints
from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.core.errors import ArgumentError, ConfigError
from holdfast.engine.api.old_names import NEW_NAMES
from tests.harness.forked import forked

Join = Callable[..., holdfast.Run]


def start(join: Join, data: Any = None, **options: Any) -> tuple[holdfast.Run, Training]:
    torch.manual_seed(0)
    training = sgd(mlp())
    data = dataset() if data is None else data
    return join(training.model, training.optimizer, data, **{"batch_size": 8, "shards": 4, **options}), training


def order(run: holdfast.Run, epochs: int = 2) -> list[int]:
    steps = range(epochs * run.plan.steps_per_epoch)
    return [index for step in steps for shard in range(4) for index in run.plan.indices(step, shard)]


def digest_after(run: holdfast.Run, training: Training, steps: int) -> str:
    for step in run.steps(steps):
        for x, y in step:
            F.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()
    return run.digest()


# ---- names


@pytest.mark.parametrize("name", NEW_NAMES)
def test_an_old_name_is_answered_with_the_new_one(joined: Join, name: str) -> None:
    for kind in (TypeError, ConfigError, ArgumentError):
        with pytest.raises(kind) as caught:
            start(joined, **{name: 3})
    assert caught.value.message == f"join has no argument {name}"
    assert caught.value.hint == f"write {NEW_NAMES[name]}"
    assert name not in inspect.signature(holdfast.join).parameters


def test_a_name_that_never_was_is_pythons_to_refuse(joined: Join) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batches'"):
        start(joined, batches=3)


def test_torchs_names_are_there_with_torchs_defaults() -> None:
    ours, theirs = (inspect.signature(one).parameters for one in (holdfast.join, torch.utils.data.DataLoader))
    same = ("sampler", "batch_sampler", "num_workers", "collate_fn", "drop_last", "worker_init_fn", "generator")
    for name in (*same, "prefetch_factor"):
        assert ours[name].default == theirs[name].default, name
    assert "batch_size" in ours and "shuffle" in ours  # a DataLoader has 1 and no shuffling, which nobody means


# ---- drop_last and generator


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_has_the_steps_of_a_distributed_sampler(joined: Join, drop_last: bool) -> None:
    """Four replicas with one sample each at a time are a batch of four."""
    samplers = [DistributedSampler(range(27), 4, rank, shuffle=False, drop_last=drop_last) for rank in range(4)]
    run, _ = start(joined, dataset(27), batch_size=4, shuffle=False, drop_last=drop_last)
    assert order(run, 1) == [index for step in zip(*samplers, strict=True) for index in step]


def test_a_generator_is_the_seed_of_the_order_and_of_nothing_else(joined: Join) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    before = generator.get_state()
    by_generator, training = start(joined, seed=1, generator=generator)
    by_seed, _ = start(joined, seed=5)
    assert order(by_generator) == order(by_seed) != order(start(joined, seed=1)[0])
    assert by_generator.plan.seed == 1  # of what is drawn in a shard
    digest_after(by_generator, training, 3)
    assert torch.equal(generator.get_state(), before)


def test_a_samplers_order_has_the_generators_seed_too(joined: Join) -> None:
    def drawn(**options: Any) -> list[int]:
        return order(start(joined, sampler=RandomSampler(range(96)), **options)[0])

    assert drawn(generator=torch.Generator().manual_seed(5)) == drawn(seed=5) != drawn()


@pytest.mark.processes
def test_workers_must_have_the_same_generator() -> None:
    def body(seed: int) -> None:
        run, _ = start(holdfast.join, generator=torch.Generator().manual_seed(seed))
        run.close()

    outcomes = forked({"w0.1": lambda: body(4), "w1.1": lambda: body(5)})
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert len(errors) == 1
    assert "this worker has a generator with the seed " in errors[0] and "but the run has a generator" in errors[0]


# ---- loader processes


class Opened(Dataset[tuple[torch.Tensor, int, int]]):
    """Its file is opened in each loader process, as worker_init_fn is for."""

    opened = -1

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        return noise, index, self.opened


def open_file(number: int) -> None:
    torch.rand(number + 1)  # whatever it draws is drawn before a shard's own seed
    np.random.seed(7)
    info: Any = get_worker_info()
    info.dataset.opened = number


def fetched(join: Join, **options: Any) -> list[tuple[bytes, list[int], set[int]]]:
    run, _ = start(join, Opened(), **options)
    found = []
    for step in run.steps(6):
        found += [(noise.numpy().tobytes(), index.tolist(), set(opened.tolist())) for noise, index, opened in step]
    run.close()
    return found


def test_worker_init_fn_is_called_in_each_loader_process_and_decides_no_number(joined: Join) -> None:
    here = fetched(joined, worker_init_fn=open_file)  # without loader processes nobody calls it, as in PyTorch
    there = fetched(joined, worker_init_fn=open_file, num_workers=2, prefetch_factor=4)
    assert [one[:2] for one in here] == [one[:2] for one in there]
    assert set.union(*(one[2] for one in here)) == {-1}
    assert set.union(*(one[2] for one in there)) >= {0, 1}


def test_an_exception_of_worker_init_fn_reaches_the_script(joined: Join) -> None:
    def broken(number: int) -> None:
        raise KeyError(f"no file for loader process {number}")

    run, _ = start(joined, num_workers=1, worker_init_fn=broken)
    with pytest.raises(KeyError, match="no file for loader process 0"):
        for step in run.steps(1):
            list(step)


# ---- threads


THREADS = """
import sys, torch, holdfast
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64))
run = holdfast.join(model, optimizer, data, batch_size=2048, shards=1, threads=int(sys.argv[1]))
for step in run.steps(2):
    for (x,) in step:
        model(x).square().mean().backward()
    optimizer.step()
print(torch.get_num_threads(), run.digest())
"""


@pytest.mark.processes
def test_join_alone_decides_how_many_threads_compute() -> None:
    """Whatever the process was started with: so no option of the command is needed for it."""

    def trained(threads: int, started_with: int) -> str:
        variables = {**os.environ, "OMP_NUM_THREADS": str(started_with), "MKL_NUM_THREADS": str(started_with)}
        command = [sys.executable, "-c", THREADS, str(threads)]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120).stdout

    two = trained(2, started_with=1)
    assert two == trained(2, started_with=2) and two.startswith("2 ")
    one = trained(1, started_with=2)
    assert one == trained(1, started_with=1) and one.startswith("1 ")
    assert one.split()[1] != two.split()[1]  # the number of threads decides bits


# ---- checkpoints


def test_a_run_without_a_command_keeps_checkpoints_and_goes_on(joined: Join, tmp_path: Path) -> None:
    expected = digest_after(*start(joined), 7)
    kept = holdfast.Checkpoints(tmp_path / "kept", every=2, keep=2)
    run, training = start(joined, checkpoint=kept)
    digest_after(run, training, 5)
    run.close()
    steps = [entry.step for entry in list_checkpoints(open_storage(str(tmp_path / "kept")))]
    assert len(steps) == 2 and max(steps) == 5
    run, training = start(joined, checkpoint=tmp_path / "kept")
    assert digest_after(run, training, 7) == expected
    run.close()
    assert run.step == 7


def body_with(said: Any) -> list[str]:
    run, training = start(holdfast.join, checkpoint=said)
    digest_after(run, training, 2)
    run.close()
    log = Path(os.environ["HOLDFAST_RUN_DIR"], "events", f"{run.id}.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "warning"]


@pytest.mark.processes
def test_a_script_that_says_something_else_than_the_command_is_told_what_holds(tmp_path: Path) -> None:
    told = CheckpointSettings(uri=str(tmp_path / "command"), keep=3, given=("uri", "keep")).encode()
    said = holdfast.Checkpoints(tmp_path / "script", every=2, keep=5)
    outcomes = forked(lambda: body_with(said), workers=2, checkpoint=told)
    assert outcomes["w1.1"].value == []  # one says it for all
    assert outcomes["w0.1"].value == [
        "the command's options for checkpoints hold where the script says others: "
        f"--checkpoint {tmp_path / 'command'}, not {tmp_path / 'script'}; --keep 3, not 5"
    ]
    assert (tmp_path / "command").exists() and not (tmp_path / "script").exists()
