"""Does the faults of a schedule to a run, from outside, and writes down what was done when.

Owned by the drill's main thread; each slow worker has a thread of its own that stops and continues it. A fault that
needs a survivor waits until there is one; who is meant is decided when it happens, from the schedule's number and who
lives.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.core.words import host_of, slot_of
from holdfast.drills.ground import Ground, Run
from holdfast.drills.schedule import Done, Planned
from holdfast.drills.trace import TraceReader, order_path, result_path
from holdfast.launch.proc import process_state
from holdfast.testing.watched import send

SLOW_PERIOD_S = 0.1
SURVIVOR_S = 30.0  # how long a fault waits for somebody who would survive it
LOOK_S = 0.02


@dataclass
class Injector:
    """`say` is told of everything that is done."""

    ground: Ground
    run: Run
    name: str
    traces: TraceReader
    schedule: Sequence[Planned]
    say: Callable[[str], None]
    done: list[Done] = field(default_factory=list)
    skipped: list[tuple[Planned, str]] = field(default_factory=list)
    agent_is_away: bool = False
    _healing: list[tuple[float, Done, Callable[[], None]]] = field(default_factory=list)
    _slowed: list[_Slowed] = field(default_factory=list)
    _stopped: set[int] = field(default_factory=set)

    def start(self, began: float) -> None:
        """Times of the schedule count from `began`, on the monotonic clock."""
        self._began = began
        self._due = sorted(self.schedule)

    @property
    def over(self) -> bool:
        return not self._due and not self._healing

    def look(self, now: float) -> None:
        """Do what is due. Called every few hundredths of a second, after the run was looked at."""
        for slowed in self._slowed:
            slowed.pid = self._slow_pid(slowed.target)
        for entry in [one for one in self._healing if one[0] <= now]:
            self._healing.remove(entry)
            self._heal(*entry[1:])
        while self._due and self._began + self._due[0].at_s <= now:
            planned = self._due[0]
            if not self._can(planned):
                if now > self._began + planned.at_s + SURVIVOR_S:
                    self.skipped.append((planned, "nobody would have survived it"))
                    self._due.pop(0)
                    continue
                return
            self._due.pop(0)
            self._do(planned, now)

    def end(self) -> None:
        """Undo what is still in force: the run may be over, or the drill be interrupted."""
        for slowed in self._slowed:
            slowed.end()
        for _, done, heal in self._healing:
            if done.planned.kind == "ledger-down":  # nobody is left to need it
                done.ended_at = time.time()
            else:
                self._heal(done, heal)
        self._healing.clear()

    # ---- whom

    def _members(self) -> list[str]:
        stopped = self._stopped
        living = [member for member in self.run.living_members() if self.run.pids[member] not in stopped]
        return sorted(living, key=lambda member: (host_of(member), slot_of(member)))

    def _can(self, planned: Planned) -> bool:
        if planned.kind not in ("kill", "stop", "corrupt", "partition"):
            return True
        able = [member for member in self._members() if member in self.traces.begun]
        if planned.kind == "partition":
            host = self.ground.hosts[planned.target]
            return any(host_of(member) != host for member in able)
        return len(able) >= (3 if planned.kind == "corrupt" else 2)

    def victim(self, target: int) -> str:
        """The worker of that slot if it is a member, else the one of that place among the members."""
        members = self._members()
        same = [member for member in members if slot_of(member) == target and not host_of(member)]
        return same[0] if same else members[target % len(members)]

    # ---- what

    def _do(self, planned: Planned, now: float) -> None:
        done = Done(planned, time.time(), "", self.traces.step, self.run.view)
        heal = getattr(self, f"_{planned.kind.replace('-', '_')}")(planned, done)
        self.done.append(done)
        self.say(done.what)
        if heal is not None:
            self._healing.append((now + planned.duration_s, done, heal))
            self._healing.sort(key=lambda entry: entry[0])

    def _heal(self, done: Done, heal: Callable[[], None]) -> None:
        heal()
        done.ended_at = time.time()
        self.say(f"{done.planned.kind} is over")

    def _kill(self, planned: Planned, done: Done) -> None:
        victim = self.victim(planned.target)
        pid = self.run.pids[victim]
        done.what, done.victims = f"kill -9 {victim} (process {pid})", (victim,)
        send(pid, signal.SIGKILL)
        deadline = time.monotonic() + 1.0
        while process_state(pid) and time.monotonic() < deadline:  # it must not count as a survivor of the next one
            time.sleep(0.001)

    def _stop(self, planned: Planned, done: Done) -> None:
        victim = self.victim(planned.target)
        pid = self.run.pids[victim]
        done.what, done.victims = f"stop {victim} (process {pid}) for good", (victim,)
        self._stopped.add(pid)
        send(pid, signal.SIGSTOP)

    def _slow_pid(self, target: int) -> int | None:
        same = [worker for worker in self.run.living_registered() if slot_of(worker) == target]
        pids = [self.run.pids[worker] for worker in sorted(same) if worker in self.run.pids]
        return next((pid for pid in pids if pid not in self._stopped), None)

    def _slow(self, planned: Planned, done: Done) -> Callable[[], None]:
        times = float(planned.detail.rstrip("x"))
        slowed = _Slowed(planned.target, times, self._stopped)
        self._slowed.append(slowed)
        done.what = f"worker {planned.target} runs {times:g} times slower from now on"
        return slowed.end

    def _partition(self, planned: Planned, done: Done) -> Callable[[], None]:
        host = self.ground.hosts[planned.target]
        done.victims = tuple(member for member in self.run.members if host_of(member) == host)
        done.what = f"cut {host} off from everything for {planned.duration_s:g} s ({', '.join(done.victims)})"
        self.ground.cut_off(host)
        return self.ground.join_up

    def _ledger_down(self, planned: Planned, done: Done) -> Callable[[], None]:
        self.agent_is_away = self.ground.cluster is None
        done.what = f"{self.ground.take_ledger(self.run)}, for {planned.duration_s:g} s"

        def back() -> None:
            self.ground.give_ledger(self.run)
            self.agent_is_away = False

        return back

    def _storage_down(self, planned: Planned, done: Done) -> Callable[[], None]:
        done.what = f"take the storage away for {planned.duration_s:g} s"
        self.ground.take_storage(self.name)
        return lambda: self.ground.give_storage(self.name)

    def _disk_full(self, planned: Planned, done: Done) -> Callable[[], None]:
        done.what = f"fill the disk of the checkpoints for {planned.duration_s:g} s"
        self.ground.fill_disk()
        return self.ground.empty_disk

    def _corrupt(self, planned: Planned, done: Done) -> None:
        victim = self.victim(planned.target)
        done.what, done.victims = f"flip a bit of {victim}: {planned.detail}", (victim,)
        traces = self.ground.traces(self.name)
        order = order_path(traces, victim)
        partial = order.with_suffix(".new")
        partial.write_text(json.dumps({"kind": planned.detail, "seed": round(planned.at_s * 1000)}))
        partial.replace(order)

    def flipped(self, done: Done) -> tuple[int, str] | None:
        """Where and what, once it is done; an empty text: there was nothing to flip."""
        try:
            result = json.loads(result_path(self.ground.traces(self.name), done.victims[0]).read_text())
            return int(result["step"]), str(result["what"])
        except (OSError, ValueError, KeyError):
            return None


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
