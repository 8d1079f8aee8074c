"""A real Ray cluster of several nodes on this machine, whose processes and nodes are killed and taken away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import LaunchFailed
from holdfast.events import read_events
from holdfast.testing.observed_run import ObservedRun
from tests.launching import training
from tests.launching.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own: sockets and files that it leaves open
]
SOON = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 4}
STARTS = 5  # Ray gives a node 30 s to come up, on whatever machine
WEIGHTS = torch.ones(1, 8)
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "ray.md"


long = pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long test: HOLDFAST_DRILLS=all")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that runs nothing, and two nodes with room for all workers each, for these tests alone."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DIR", str(tmp_path_factory.mktemp("nodes")))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        cluster = Cluster()
        try:
            add_node(cluster, num_cpus=0, _system_config=SOON)
            add_node(cluster, num_cpus=3)
            add_node(cluster, num_cpus=3)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_node(cluster: Any, **options: Any) -> None:
    for left in reversed(range(STARTS)):
        try:
            cluster.add_node(**options)
            return
        except Exception:
            if not left:
                raise


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same function under `holdfast run`, undisturbed."""
    home = tmp_path_factory.mktemp("expected")
    script = home / "train.py"
    lines = ("import torch", "from tests.launching.training import train", "print(train(weights=torch.ones(1, 8)))")
    script.write_text("\n".join(lines))
    run = ObservedRun(home, "r", ["--workers", "1"], [str(script)])
    run.start()
    try:
        return run.finish(200.0)
    finally:
        run.end()


class Held:
    """Workers that wait at steps 5 and 12."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def at(self, step: int) -> dict[str, int]:
        """Their process ids, by their names."""
        marks = self.path.parent.glob(f"{self.path.name}{step}.*")
        return {mark.name.partition(".")[2]: int(mark.read_text()) for mark in marks if mark.read_text()}

    def wait(self, step: int, workers: int) -> dict[str, int]:
        wait_until(lambda: len(self.at(step)) >= workers, f"{workers} workers are at step {step}")
        return self.at(step)

    def let_go(self, step: int) -> None:
        Path(f"{self.path}{step}").touch()


def launched(tmp_path: Path, nemesis: Callable[[Held], None], fn: Any = training.train, **options: Any) -> Any:
    """Launch in a thread, while `nemesis` does its work in this one, which alone may start nodes."""
    import holdfast.integrations.ray as on_ray

    held, outcome = Held(tmp_path / "hold"), {}
    kwargs = {"weights": WEIGHTS, "hold": str(held.path)} if fn is training.train else {}

    def launch() -> None:
        try:
            home = str(tmp_path / "home")
            outcome["done"] = on_ray.launch(fn, workers=3, dir=home, run="r", kwargs=kwargs, **options)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        nemesis(held)
    finally:
        held.let_go(5)
        held.let_go(12)
        thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["done"]


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return [one for part in (tmp_path / "home" / "runs").iterdir() for one in read_events(part / "events")]


def node_of(worker: str, cluster: Any) -> Any:
    return next(node for node in cluster.list_all_nodes() if worker.endswith(f"@n{node.node_id[:8]}"))


@long
def test_a_killed_worker_and_a_killed_node_change_nothing(cluster: Any, expected: str, tmp_path: Path) -> None:
    lost: list[str] = []

    def nemesis(held: Held) -> None:
        worker, pid = sorted(held.wait(5, 3).items())[0]
        lost.append(worker)
        os.kill(pid, signal.SIGKILL)
        held.let_go(5)
        there = held.wait(12, 2)
        node = node_of(sorted(there)[0], cluster)
        lost.extend(name for name in there if name.endswith(f"@n{node.node_id[:8]}"))
        add_node(cluster, num_cpus=3)
        cluster.remove_node(node, allow_graceful=False)
        for name in set(there) & set(lost):  # they outlive the node's own process, and a lost machine's do not
            with contextlib.suppress(ProcessLookupError):
                os.kill(there[name], signal.SIGKILL)
        held.let_go(12)

    done = launched(tmp_path, nemesis)
    assert (done.value["digest"], done.digest, done.outcome) == (expected, expected, "finished")
    assert done.value["leader"] and done.value["worker"] not in lost
    ended = {one["who"] for one in events(tmp_path) if one["kind"] == "finished"}
    assert ended and not ended & set(lost)


def test_who_is_on_a_node_that_will_be_taken_away_leaves_it(
    cluster: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving: list[str] = []
    said: list[str] = []
    monkeypatch.setattr("holdfast.integrations.ray.launching.Driver._say", lambda self, text: said.append(text))

    def nemesis(held: Held) -> None:
        there = held.wait(5, 3)
        node = node_of(sorted(there)[0], cluster)
        leaving.extend(name for name in there if name.endswith(f"@n{node.node_id[:8]}"))
        add_node(cluster, num_cpus=3)
        drain(node.node_id)
        for worker in leaving:
            wait_until(lambda: any(text.startswith(f"asking {worker} to leave") for text in said), "it is asked")  # noqa: B023
        held.let_go(5)

    done = launched(tmp_path, nemesis)
    assert done.digest == expected, said
    left = {one["who"] for one in events(tmp_path) if one["kind"] == "left"}
    assert leaving and left >= set(leaving), (leaving, left, said)


def drain(node_id: str) -> None:
    """What a cloud's notice, or `ray drain-node`, comes to."""
    import time

    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = client.drain_node(node_id, reason, "spot", int((time.time() + 600) * 1000))
    assert accepted, why


@long
def test_the_page_is_run(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A launch, and a trainer of Ray's whose function takes part: both make the same bits."""
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    names: dict[str, Any] = {"__name__": "__main__"}  # Ray sends its functions by value
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        text = code.replace("/shared/", f"{tmp_path}/")
        exec(compile(text, "ray.md", "exec"), names)
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("holdfast |")]
    assert printed[0][:2] == ["finished", "40"] and printed[0][2] == printed[-1][0]


def test_a_function_that_fails_is_told_with_its_traceback(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed) as caught:
        launched(tmp_path, lambda held: None, training.fail_at_once)
    assert "ZeroDivisionError: nothing to divide by" in str(caught.value)
    assert "in fail_at_once" in caught.value.traceback


def train_in_ray(config: dict[str, Any]) -> Any:
    """The function of a TorchTrainer."""
    import holdfast.integrations.ray as on_ray

    with on_ray.take_part(config["run"], dir=config["home"]):
        got = training.train(weights=torch.ones(1, 8), hold=config["hold"], checkpoint=config["checkpoint"])
    return got["digest"]


@long
def test_ray_train_starts_its_workers_again_and_the_run_goes_on(cluster: Any, expected: str, tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    held = Held(tmp_path / "hold")
    config = {
        "run": "t", "home": str(tmp_path / "home"), "hold": str(held.path), "checkpoint": str(tmp_path / "checkpoints")
    }  # fmt: skip

    def kill_one() -> None:
        try:
            os.kill(sorted(held.wait(12, 2).items())[0][1], signal.SIGKILL)
        finally:
            held.let_go(12)

    held.let_go(5)
    thread = threading.Thread(target=kill_one)
    thread.start()
    trainer = TorchTrainer(
        train_in_ray,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="t", storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    try:
        result = trainer.fit()
    finally:
        thread.join()
    assert result.return_value == expected
    resumed = [one for one in events(tmp_path) if one["kind"] == "resumed"]
    assert resumed and resumed[0]["step"] >= 2
