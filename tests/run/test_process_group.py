"""Workers whose gradients gloo carries, as a process group: the bits of one worker, whoever is lost in the middle."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.core.options.run import PATHS
from holdfast.core.words import View
from holdfast.engine import carrying
from holdfast.events import EventLog
from holdfast.horovod.world.lines import Lines
from holdfast.net.mailbox import Mailbox
from holdfast.placement.environment import RUN_DIR, WorkerEnvironment
from holdfast.reduce.carrier import BUILD_S, Carrier, CarrierFailed
from holdfast.reduce.view_store import ViewStore
from tests.harness.forked import Outcome, agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
BATCH, SHARDS, STEPS, WIDTH = 24, 6, 12, 3000  # its slots have more than SMALL_BYTES
PATH = "process-group"
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo: once, not in every fork


class Counted:
    """How many moves the groups of this worker were asked for, but for the one that tries them out."""

    def __init__(self, before: Callable[[int], object] = lambda count: None) -> None:
        self.count = 0
        inner = Carrier.all_to_all

        def counting(carrier: Carrier, *args: Any) -> Any:
            self.count += 1
            before(self.count)
            return inner(carrier, *args)

        Carrier.all_to_all = counting  # type: ignore[method-assign]


def train(
    *,
    steps: int = STEPS,
    width: int = WIDTH,
    before: Callable[[int], object] = lambda step: None,
    at_move: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    counted = Counted(at_move)
    model = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(96, 24, generator=torch.Generator().manual_seed(1)))
    run = holdfast.join(model, optimizer, data, batch_size=BATCH, shards=SHARDS)
    for step in run.steps(steps):
        before(step.number)
        for (x,) in step:
            loss = model(x).square().mean()
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
    digest = run.digest()
    run.close()
    return {"digest": digest, "moved": counted.count}


def digest_of(outcomes: Mapping[str, Outcome], *, moves: int = 1) -> str:
    """Of all that lived, each of which has had so many steps carried at least."""
    for outcome in outcomes.values():
        if outcome.signal is None and not outcome.error:
            assert outcome.value["moved"] >= moves, outcome
            del outcome.value["moved"]
    return str(agreed(outcomes)["digest"])


@pytest.fixture(scope="module")
def right() -> str:
    return digest_of(forked(train, workers=1, path=PATH), moves=0)


def events(worker: str, kind: str) -> list[dict[str, Any]]:
    lines = (Path(os.environ[RUN_DIR]) / "events" / f"{worker}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def until(holds: Callable[[], object], what: str, at_most_s: float = 40.0) -> None:
    deadline = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.mark.parametrize("members", [("w0.1", "w1.1"), ("w0.1", "w1.1", "w2.1"), ("w0.1@a", "w1.1@a", "w0.1@b")])
def test_it_is_the_digest_of_one_worker(members: tuple[str, ...], right: str) -> None:
    assert digest_of(forked(dict.fromkeys(members, train), path=PATH), moves=STEPS // 2) == right


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_lost_in_the_middle_of_a_move_costs_nothing(number: int, right: str, tmp_path: Path) -> None:
    """A stopped process keeps its sockets: gloo would wait for it, and its group does not end before it does."""
    victim = tmp_path / "victim"

    def vanish(count: int) -> None:
        if count == 4:
            victim.write_text(str(os.getpid()))
            os.kill(os.getpid(), number)

    def survive() -> dict[str, Any]:
        found = train()
        return {**found, "lost": [event["peer"] for event in events(os.environ["HOLDFAST_WORKER"], "lost")]}

    def survive_and_bury() -> dict[str, Any]:
        found = survive()
        with suppress(ProcessLookupError):
            os.kill(int(victim.read_text()), signal.SIGKILL)
        return found

    bodies = {"w0.1": survive, "w1.1": survive_and_bury, "w2.1": lambda: train(at_move=vanish)}
    found = forked(bodies, path=PATH, lease_s=2.0)
    assert found.pop("w2.1").signal == signal.SIGKILL
    lost = [outcome.value.pop("lost") for outcome in found.values() if outcome.value]
    assert all(lost) and any("w2.1" in one for one in lost), "who hears of it second sees the first one's end"
    assert digest_of(found, moves=6) == right


def test_a_joiner_is_in_the_next_group(right: str, tmp_path: Path) -> None:
    """It takes the place of one that dies, and the other one trains alone until it has come."""
    gone = tmp_path / "gone"

    def dies(step: int) -> None:
        if step == 3:
            gone.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def stays(step: int) -> None:
        if step == 6:
            registered = Path(os.environ[RUN_DIR]) / "events" / "w1.2.jsonl"
            until(lambda: registered.exists() and "registered" in registered.read_text(), "nobody has come")

    def comes() -> dict[str, Any]:
        until(gone.exists, "nobody is missing")
        return train()

    bodies = {"w0.1": lambda: train(before=stays), "w1.1": lambda: train(before=dies), "w1.2": comes}
    assert digest_of(forked(bodies, size=2, path=PATH)) == right


def test_where_no_group_can_be_built_steps_go_the_usual_way(right: str) -> None:
    def without() -> dict[str, Any]:
        def refused(*args: Any) -> Any:
            raise RuntimeError("no route to anybody")

        carrying.open_backend = refused  # type: ignore[assignment]
        found = train()
        texts = [event["text"] for event in events(os.environ["HOLDFAST_WORKER"], "warning")]
        assert texts == ["there is no process group for view 1: no route to anybody; steps go without"], texts
        return found

    found = forked({"w0.1": train, "w1.1": without}, path=PATH)
    assert digest_of(found, moves=0) == right


def test_a_library_that_fails_for_one_costs_a_view_and_is_given_up_in_the_end(right: str) -> None:
    """All are there, and their own connections are whole: the same members go on in the next view."""

    def fail() -> dict[str, Any]:
        def broken(count: int) -> None:
            raise CarrierFailed("a cable is loose")

        found = train(at_move=broken)
        texts = [event["text"] for event in events("w1.1", "warning")]
        assert len(texts) == carrying.FAILURES_MAX and "none is built any more" in texts[-1], texts
        return found

    assert digest_of(forked({"w0.1": train, "w1.1": fail}, path=PATH)) == right


def test_a_group_that_does_not_end_ends_its_worker(right: str, tmp_path: Path) -> None:
    """w0.1's library hangs when the view is over; the worker says so, leaves, and the other one goes on alone."""
    gone = tmp_path / "gone"

    class Hanging:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def abort(self) -> None:
            threading.Event().wait()

    def stuck() -> dict[str, Any]:
        inner = carrying.open_backend
        carrying.open_backend = lambda *args: Hanging(inner(*args))  # type: ignore[assignment]
        carrying.END_S = 0.2
        carrying._Attempt.patience_s = 0.0  # type: ignore[assignment, method-assign]
        return train(before=hold)

    def hold(step: int) -> None:
        if step >= 8:  # by then the group of the view with w2.1 is given up
            time.sleep(0.02)

    def dies() -> dict[str, Any]:
        return train(before=lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 5 else None)

    def other() -> dict[str, Any]:
        return train(before=lambda step: until(gone.exists, "it is still there") if step == STEPS - 2 else None)

    def first() -> Any:
        try:
            return stuck()
        finally:
            gone.touch()

    found = forked({"w0.1": first, "w1.1": other, "w2.1": dies}, path=PATH)
    assert found["w2.1"].signal == signal.SIGKILL
    assert found["w0.1"].code == 75, found["w0.1"]
    assert "process group of view" in found["w0.1"].value and "does not end" in found["w0.1"].value
    assert digest_of({"w1.1": found["w1.1"]}) == right


class Waits:
    """A kernel whose threads run at once. What is to end does not; for how long somebody waits for that is kept."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def now(self) -> float:
        return 0.0

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def event(self) -> Waits:
        return self

    def set(self) -> None:
        raise AssertionError("it has ended")

    def wait(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return False

    def start(self, name: str, body: Callable[[], object]) -> None:
        if name.endswith("watch"):
            body()


class SilentLibrary:
    """It begins whatever it is asked for, and keeps how long it may take."""

    def __init__(self) -> None:
        self.may_take_s: list[float] = []

    def _allgather_base(self, out: Any, given: Any, options: Any) -> object:
        self.may_take_s.append(options.timeout.total_seconds())
        return object()


def test_a_worker_is_not_replaced_before_the_librarys_own_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is longer the more bytes a move has. The largest is what the library may still be in."""
    monkeypatch.setattr("holdfast.reduce.carrier.MOVE_BYTES_PER_S", 1.0)
    for sizes in ([], [64], [640, 64]):
        kernel, library, mailbox = Waits(), SilentLibrary(), Mailbox()
        fake: Any = kernel
        groups = carrying.ProcessGroups("w0.1", fake, mailbox, EventLog(None, "w0.1"), device=None, address="127.0.0.1")
        view = View(3, ("w0.1", "w1.1"), "")
        attempt = groups._attempt = carrying._Attempt(view, ViewStore(lambda key, value: None, fake, 1.0), fake)
        attempt.built(Carrier(library, 0, 2))
        for size in sizes:
            assert attempt.carrier is not None
            attempt.carrier.all_gather(torch.zeros(size, dtype=torch.uint8))
        groups.close()
        assert kernel.waited_s[0] >= max([BUILD_S, *library.may_take_s]) + carrying.END_S
        (news,) = mailbox.take_all()
        assert news.stuck and "view 3 does not end" in news.why


def test_without_torch_distributed_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PATH in PATHS
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    outcomes = forked(train, workers=1, path=PATH)
    assert "--path process-group needs torch.distributed" in outcomes["w0.1"].error


def test_horovods_api_refuses_it(tmp_path: Path) -> None:
    environment = WorkerEnvironment(run_dir=tmp_path, socket_dir=tmp_path, worker="w0.1", path=PATH)
    with pytest.raises(holdfast.ConfigError, match="Horovod's init"):
        Lines(environment)


def test_a_mode_in_which_nothing_is_reduced_refuses_it() -> None:
    def body() -> str:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        with pytest.raises(holdfast.ConfigError, match="leave --path out") as refused:
            holdfast.join(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                TensorDataset(torch.ones(24, 4)),
                batch_size=24,
                shards=6,
                mode=holdfast.Async(staleness=0),
            )
        return str(refused.value)

    found = forked(body, workers=1, path=PATH, servers=1)
    assert "in this mode they are not" in agreed(found)
