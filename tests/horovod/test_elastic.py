"""Horovod's elastic training with real kills: whoever is lost, the others stay, and go on from the last commit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.testing.observed_run import ObservedRun

SCRIPT = Path(__file__).with_name("elastic_training.py")
RECOVERED_S_MAX = 5.0  # on a busy machine; benchmarks/horovod.py has the figure
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("horovod")]


@dataclass(frozen=True)
class Line:
    """What one process wrote of one batch."""

    pid: int
    batch: int
    rank: int
    size: int
    at: float
    weight: str
    worlds: int  # that the process has left so far


class Watched(ObservedRun):
    """A run of the training, and what its processes wrote."""

    def __init__(self, home: Path, workers: int, *arguments: str, training: Path = SCRIPT) -> None:
        self.output = home / "output"
        self.output.mkdir()
        options = ["--workers", str(workers), "--horovod", "--checkpoint", "none"]
        script = [str(training), str(self.output), *arguments]
        if training != SCRIPT:
            options += ["--lease", "10s"]  # TensorFlow may hold the interpreter for long
        forks = {"FORKS": "1"} if workers == 3 and training == SCRIPT else {}
        super().__init__(home, "elastic", options, script, variables=forks)

    def lines(self) -> list[Line]:
        found = []
        for path in self.output.glob("*.log"):
            for text in path.read_text().splitlines():
                words = text.split()
                if len(words) == 6:
                    batch, rank, size = map(int, words[:3])
                    found.append(Line(int(path.stem), batch, rank, size, float(words[3]), words[4], int(words[5])))
        return sorted(found, key=lambda line: line.at)

    def last(self) -> dict[int, Line]:
        """Of each process."""
        return {line.pid: line for line in self.lines()}

    def wait_for(self, size: int, batches: int = 3) -> dict[int, Line]:
        """Until so many processes have made a few batches as a world of this size. Those, by rank."""
        start = max((line.batch for line in self.lines()), default=0)

        def is_there() -> bool:
            living = set(self.pids.values())
            last = [line for line in self.last().values() if line.pid in living and line.size == size]
            return len(last) == size and min(line.batch for line in last) >= start + batches

        self.wait(is_there, f"a world of {size}", 60.0)
        living = set(self.pids.values())
        return {line.rank: line for line in self.last().values() if line.pid in living}

    def after(self, pid: int, at: float) -> Line:
        return next(line for line in self.lines() if line.pid == pid and line.at > at)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    run = Watched(tmp_path, *request.param)
    run.start()
    try:
        yield run
    finally:
        run.end()


def lose(run: Watched, rank: int, number: int, size: int = 3) -> None:
    """A rank is lost: the others are the same processes afterwards, soon, and no batch was done without a commit."""
    ranks = run.wait_for(size)
    victim = ranks[rank]
    others = [line for one, line in ranks.items() if one != rank]
    os.kill(victim.pid, number)
    before = run.last()
    for line in others:
        run.wait(lambda pid=line.pid: run.last()[pid].batch > before[pid].batch + 1, f"process {line.pid}", 60.0)  # type: ignore[misc]
        history = [one for one in run.lines() if one.pid == line.pid]
        steps = [(after.batch - one.batch, after.worlds - one.worlds) for one, after in pairwise(history)]
        # The batch at whose commit a world is left is committed, and not written down.
        wrong = [(batches, worlds) for batches, worlds in steps if not 0 <= batches <= 1 + worlds]
        assert not wrong, "a commit is never undone, and none is left out"
        gap_s = max(after.at - one.at for one, after in pairwise(history[-200:]))
        if number == signal.SIGKILL:
            assert gap_s < RECOVERED_S_MAX, f"{gap_s:.2f} s"
    assert all(line.pid in run.pids.values() for line in others), "a survivor did not stay"


@pytest.mark.parametrize("run", [(3, "100000", "0.01")], indirect=True, ids=["3"])
def test_any_rank_may_be_lost_stopped_or_added(run: Watched) -> None:
    lose(run, 0, signal.SIGKILL)
    lose(run, 2, signal.SIGKILL)
    lose(run, 1, signal.SIGSTOP)
    run.wait_for(3)
    members = {line.pid for line in run.wait_for(3).values()}
    run.scale(4)
    ranks = run.wait_for(4)
    assert members < {line.pid for line in ranks.values()}, "those who were there stay"
    assert ranks[3].pid not in members, "who comes has the last rank"
    newest = max(line.batch for line in run.lines())
    run.scale(3)
    run.wait_for(3)
    weights: dict[tuple[int, int], set[str]] = {}
    for line in run.lines():
        weights.setdefault((line.batch, line.size), set()).add(line.weight)
    assert all(len(found) == 1 for found in weights.values()), "all ranks have the same weights after each batch"
    assert newest > 10


@pytest.mark.parametrize("run", [(3, "60", "0.01", "0.5")], indirect=True, ids=["sync"])
def test_rank_0_may_be_lost_while_it_hands_out_the_state(run: Watched) -> None:
    """Others are in `sync` for half a second, and the one that has the state dies in it; the training ends in order."""
    ranks = run.wait_for(3)
    os.kill(ranks[1].pid, signal.SIGKILL)
    first, third = ranks[0].pid, ranks[2].pid
    syncs = run.output / f"{first}.sync"
    count = len(syncs.read_text().splitlines())
    run.wait(lambda: len(syncs.read_text().splitlines()) > count, "rank 0 to be in sync", 30.0, period_s=0.002)
    reached = run.last()[third].batch
    os.kill(first, signal.SIGKILL)
    run.wait(run.over, "the end", 90.0)
    run.look()
    assert run.agent is not None and run.agent.returncode == 0, run.last_words()
    history = [line.batch for line in run.lines() if line.pid == third]
    assert history[-1] == 60 and history == sorted(history), (reached, history)
    assert f"done at {60}" in run.log()


@pytest.mark.parametrize("run", [(2, "30", "0.01")], indirect=True, ids=["2"])
def test_a_training_comes_to_its_end_and_nobody_begins_again(run: Watched) -> None:
    run.wait(run.over, "the end", 60.0)
    assert run.agent is not None and run.agent.returncode == 0, run.last_words()
    last = run.last().values()
    assert [line.batch for line in last] == [30, 30] and len({line.weight for line in last}) == 1
