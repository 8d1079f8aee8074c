"""Breaks a run from outside, undoes what does not last, and writes down what was done when.

It decides nothing: which fault comes when and to whom is a plan's word (by_time.py). Owned by the thread that runs the
engine; each slow worker has a thread of its own that stops and continues it.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.words import host_of, slot_of
from holdfast.drills.ground import Ground
from holdfast.drills.schedule import DoneFault, Planned
from holdfast.drills.trace import order_path, result_path
from holdfast.placement.directory import replace_file
from holdfast.placement.proc import process_of_rank, process_state
from holdfast.testing.observed_run import Observed, ObservedRun, send

SLOW_PERIOD_S = 0.1
DEATH_S = 5.0


@dataclass
class _Undoing:
    done: DoneFault
    is_due: Callable[[float], bool]
    undo: Callable[[], None]


class Nemesis:
    """`say` is told of everything that is done; `step` says how far the training is."""

    left_away: tuple[str, ...] = ("ledger-down", "agent")  # what is not brought back for a run that is over

    def __init__(
        self, ground: Ground, run: Observed, name: str, say: Callable[[str], None], step: Callable[[], int]
    ) -> None:
        self.ground = ground
        self.run = run
        self.done: list[DoneFault] = []
        self.stopped: set[int] = set()  # processes that nobody will wake
        self.ranks = 1  # of the group that each worker is: any of them is killed
        self._traces = ground.traces(name)
        self._name = name
        self._say = say
        self._step = step
        self._undoing: list[_Undoing] = []
        self._slowed: list[_Slowed] = []
        self._agents_away = 0

    @property
    def busy(self) -> bool:
        """Whether something is broken that will be mended."""
        return bool(self._undoing)

    @property
    def agent_is_away(self) -> bool:
        """Whether an agent that does not run will be started again."""
        return self._agents_away > 0

    def look(self, now: float) -> None:
        """Undo what is due. Called every few hundredths of a second, after the run was looked at."""
        for slowed in self._slowed:
            slowed.pid = self._slow_pid(slowed.target)
        for one in [one for one in self._undoing if one.is_due(now)]:
            self._undoing.remove(one)
            self._mend(one)

    def end(self) -> None:
        """Undo what is still in force: the run may be over, or the drill be interrupted."""
        for slowed in self._slowed:
            slowed.end()
        for one in self._undoing:
            if one.done.planned.kind in self.left_away:  # nobody is left to need it
                one.done.ended_at = time.time()
            else:
                self._mend(one)
        self._undoing.clear()

    def _mend(self, one: _Undoing) -> None:
        one.undo()
        one.done.ended_at = time.time()
        self._say(f"{one.done.planned.kind} is over")

    def _note(self, planned: Planned, what: str, *victims: str) -> DoneFault:
        done = DoneFault(planned, time.time(), what, self._step(), self.run.view, victims)
        self.done.append(done)
        self._say(what)
        return done

    def _until(self, done: DoneFault, undo: Callable[[], None], is_due: Callable[[float], bool] | None = None) -> None:
        over_at = time.monotonic() + done.planned.duration_s
        self._undoing.append(_Undoing(done, is_due or (lambda now: now >= over_at), undo))

    # ---- workers

    def kill(self, planned: Planned, *victims: str) -> None:
        pids = [self.run.pids[victim] for victim in victims]
        which = ", ".join(f"{victim} (process {pid})" for victim, pid in zip(victims, pids, strict=True))
        rank = len(self.done) % self.ranks
        self._note(planned, f"kill -9 {which or 'nobody'}{f', its rank {rank}' if self.ranks > 1 else ''}", *victims)
        for pid in pids:
            send(process_of_rank(pid, rank), signal.SIGKILL)
        deadline = time.monotonic() + DEATH_S
        while any(map(process_state, pids)) and time.monotonic() < deadline:
            time.sleep(0.001)  # it must not count as a survivor of the next one

    def stop(self, planned: Planned, victim: str) -> None:
        pid = self.run.pids[victim]
        self._note(planned, f"stop {victim} (process {pid}) for good", victim)
        self.stopped.add(pid)
        send(pid, signal.SIGSTOP)

    def slow(self, planned: Planned) -> None:
        times = float(planned.detail.rstrip("x"))
        slowed = _Slowed(planned.target, times, self.stopped)
        self._slowed.append(slowed)
        done = self._note(planned, f"worker {planned.target} runs {times:g} times slower from now on")
        self._until(done, slowed.end)

    def _slow_pid(self, target: int) -> int | None:
        same = [worker for worker in self.run.living_registered() if slot_of(worker) == target]
        pids = [self.run.pids[worker] for worker in sorted(same) if worker in self.run.pids]
        return next((pid for pid in pids if pid not in self.stopped), None)

    def corrupt(self, planned: Planned, victim: str) -> None:
        """By the rig inside the worker, as soon as it has applied a step."""
        self._note(planned, f"flip a bit of {victim}: {planned.detail}", victim)
        order = json.dumps({"kind": planned.detail, "seed": round(planned.at_s * 1000)})
        replace_file(order_path(self._traces, victim), order)

    def note_flips(self) -> None:
        """Once the run is over: where which bit was flipped. Where nothing was, there is no note."""
        for done in self.done:
            if done.planned.kind == "corrupt":
                try:
                    result = json.loads(result_path(self._traces, done.victims[0]).read_text())
                    done.note = f"step {int(result['step'])}, {result['what']}" if result["what"] else ""
                except (OSError, ValueError, KeyError):
                    pass

    # ---- agents, hosts and the network

    def agent_down(self, planned: Planned, part: ObservedRun, what: str) -> None:
        done = self._note(planned, what)
        part.kill_agent()
        self._agents_away += 1

        def back() -> None:
            part.start()
            self._agents_away -= 1

        self._until(done, back)

    def _members_on(self, host: str) -> list[str]:
        return [member for member in self.run.members if host_of(member) == host]

    def cut_off(self, planned: Planned, host: str) -> None:
        members = self._members_on(host)
        what = f"cut {host} off from everything for {planned.duration_s:g} s ({', '.join(members)})"
        done = self._note(planned, what, *members)
        self.ground.network.isolate(host)
        self._until(done, self.ground.network.heal)

    # ---- the ledger and storage

    def ledger_down(self, planned: Planned) -> None:
        """All of it: on one host it lives in the agent."""
        lasting = f"for {planned.duration_s:g} s"
        if self.ground.cluster is None:
            (part,) = self.run.parts
            assert part.agent is not None
            what = f"kill -9 the agent (process {part.agent.pid}), and the ledger with it, {lasting}"
            self.agent_down(planned, part, what)
            return
        done = self._note(planned, f"kill -9 all members of etcd, {lasting}")
        for member in range(len(self.ground.cluster.members)):
            self.ground.cluster.kill(member)
        self._until(done, self.ground.restart_ledger)

    def storage_down(self, planned: Planned) -> None:
        done = self._note(planned, f"take the storage away for {planned.duration_s:g} s")
        self.ground.take_storage(self._name)
        self._until(done, lambda: self.ground.give_storage(self._name))

    def disk_full(self, planned: Planned) -> None:
        done = self._note(planned, f"fill the disk of the checkpoints for {planned.duration_s:g} s")
        self.ground.fill_disk()
        self._until(done, self.ground.empty_disk)


class _Slowed:
    """Stops and continues one worker, so that it gets 1/times of its time. Whoever is in its slot is slow.

    `pid` belongs to the main thread, and is read here; so does `stopped`, whom nobody may wake.
    """

    def __init__(self, target: int, times: float, stopped: set[int]) -> None:
        self.target = target
        self.pid: int | None = None
        self._times = times
        self._stopped = stopped
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="slowed-worker", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        run_s = SLOW_PERIOD_S / self._times
        while not self._ended.wait(run_s):
            pid = self.pid
            if pid is None or pid in self._stopped:
                continue
            send(pid, signal.SIGSTOP)
            self._ended.wait(SLOW_PERIOD_S - run_s)
            if pid not in self._stopped:
                send(pid, signal.SIGCONT)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
