"""HOLDFAST_SHARDS: one shape of the sum, and one training, whatever the number of ranks and whoever is lost."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError
from holdfast.horovod.exchange import arithmetic
from holdfast.horovod.exchange.sharding import misfit, nodes_of, shards_of
from holdfast.horovod.exchange.words import Kind, Op, Request, disagreement
from holdfast.horovod.world.runtime import Runtime
from holdfast.reduce.arithmetic import sum_into
from tests.horovod.test_elastic import Watched

TRAINING = Path(__file__).with_name("sharded_training.py")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1000))
def test_any_number_of_ranks_comes_to_the_same_bits(shards: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    leaves = list(torch.randn(shards, 33) * 10 ** torch.randint(-4, 5, (shards, 1)).float())
    wanted = torch.empty(33)
    sum_into(wanted, leaves, [(shard, shard + 1) for shard in range(shards)], (0, shards))
    nodes, operands = [], []
    for rank in range(size):
        for node in nodes_of(shards_of(rank, size, shards), shards):
            operands.append(torch.empty(33))
            sum_into(operands[-1], leaves[slice(*node)], [(one, one + 1) for one in range(*node)], node)
            nodes.append(node)
    found = torch.empty(33)
    arithmetic.combine(found, operands, Op.SUM, leaves=(shards, tuple(nodes)))
    assert torch.equal(found, wanted)


@given(st.integers(1, 60), st.integers(1, 20))
def test_shards_are_dealt_evenly_and_each_once(shards: int, size: int) -> None:
    dealt = [shards_of(rank, size, shards) for rank in range(size)]
    assert [shard for one in dealt for shard in one] == list(range(shards))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    brought = [(rank, nodes_of(one, shards)) for rank, one in enumerate(dealt)]
    assert not misfit(shards, brought, whole=True)


def asking(nodes: tuple[tuple[int, int], ...], shards: int = 4, **more: object) -> Request:
    return Request(  # type: ignore[arg-type]
        kind=Kind.ALLREDUCE, name="t", dtypes=("float32",), shapes=((2,),), shards=shards, nodes=nodes, **more
    )


def test_ranks_that_do_not_bring_the_whole_tree_are_told() -> None:
    assert not disagreement({0: asking(((0, 2),)), 1: asking(((2, 4),))})
    assert "no rank brings shard 3" in disagreement({0: asking(((0, 2),)), 1: asking(((2, 3),))})
    assert "ranks 0 and 1 both bring shard 1" in disagreement({0: asking(((0, 2),)), 1: asking(((1, 2), (2, 4)))})
    assert "not added up together" in disagreement({0: asking(((0, 1),)), 1: asking(((1, 3), (3, 4)))})
    assert "number of shards 4, rank 1 8" in disagreement({0: asking(((0, 4),)), 1: asking((), shards=8)})
    assert not disagreement({0: asking(((0, 2),))}, joined=[1]), "whoever has joined brings nothing"
    request = asking(((0, 2), (2, 3)), op=Op.AVERAGE)
    assert Request.decode(request.encode()) == request


@pytest.mark.parametrize("given", ["many", "0", "-1", "1e3", "70000"])
def test_a_number_of_shards_that_cannot_be_is_one_sentence(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SHARDS", given)
    with pytest.raises(ConfigError, match="HOLDFAST_SHARDS is"):
        Runtime().init()


def test_a_step_takes_as_many_backward_passes_as_there_are_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    import holdfast.horovod.torch as hvd

    hvd.shutdown()
    monkeypatch.setenv("HOLDFAST_SHARDS", "3")
    hvd.init()
    try:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        assert hvd.shards() == range(3) and hvd.num_shards() == 3
        for shard in hvd.shards():
            (weight * (shard + 1.0)).sum().backward()
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((2,), -2.0)), "the mean over the shards"
        optimizer.zero_grad()
        weight.sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"1 backward passes .* this rank has 3"):
            optimizer.step()
        weight.sum().backward()
        weight.sum().backward()
        with pytest.raises(AssertionError, match="4 backward passes"):
            weight.sum().backward()
    finally:
        hvd.shutdown()
        monkeypatch.delenv("HOLDFAST_SHARDS")


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("horovod")
def test_one_and_three_ranks_and_a_kill_end_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SHARDS", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    digests = {}
    for workers in (1, 3):
        (tmp_path / str(workers)).mkdir()
        run = Watched(tmp_path / str(workers), workers, "60", "0.02", training=TRAINING)
        run.start()
        try:
            if workers == 3:
                victims = run.wait_for(3)
                os.kill(victims[0].pid, signal.SIGKILL)
            run.wait(run.over, "the end of the run", 240.0)
            assert run.agent is not None and run.agent.returncode == 0, run.last_words()
            digests[workers] = set(re.findall(r"digest (\w+)", run.log()))
        finally:
            run.end()
    assert digests[1] == digests[3] and len(digests[1]) == 1, digests
