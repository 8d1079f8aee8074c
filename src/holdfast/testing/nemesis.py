"""Faults for a run of real processes, in the order and at the steps that a seed says."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.core.words import host_of
from holdfast.launch.etcd_cluster import EtcdCluster
from holdfast.launch.proc import process_state
from holdfast.testing.fleet import Fleet
from holdfast.testing.switchboard import Switchboard
from holdfast.testing.watched import Watched, send


class Nemesis:
    """What can happen on one host. The training waits at a gate, so that faults come at the steps drawn for them."""

    KINDS: tuple[str, ...] = ("kill", "kill", "kill", "stop", "pause", "agent", "join", "leave")

    def __init__(self, run: Watched | Fleet, gate: Path, *, steps: int, faults: int, seed: int, workers: int) -> None:
        self._run = run
        self._gate = gate
        self._rng = random.Random(seed)
        self._size = workers
        self._most = workers + 2
        self._open_to = 0
        self._eased_at = 0.0
        places = sorted(self._rng.randrange(2, max(3, steps * 4 // 5)) for _ in range(faults))
        self._plan = [(place, self._rng.choice(self.KINDS)) for place in places]
        self._steps = steps
        self.done: dict[str, int] = {}

    def open_gate_to(self, step: int) -> None:
        self._open_to = step
        temporary = self._gate.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.replace(self._gate)

    def run(self) -> None:
        self.open_gate_to(self._plan[0][0] + 3 if self._plan else self._steps)
        for index, (step, kind) in enumerate(self._plan):
            following = self._plan[index + 1][0] + 3 if index + 1 < len(self._plan) else self._steps
            self._run.wait(lambda step=step: self._at() >= step, f"step {step}")  # type: ignore[misc]
            time.sleep(self._rng.uniform(0.0, 0.05))  # anywhere within a step
            self._do(kind)
            self.open_gate_to(max(following, self._open_to))

    def _at(self) -> int:
        """The newest step that a worker has begun; progress events come too rarely for this."""
        steps = [int(path.read_text() or "0") for path in self._gate.parent.glob("at-*")]
        self._run.step = max([self._run.step, *steps])
        return self._run.step

    def _do(self, kind: str) -> None:
        if kind == "leave" and self._size <= 2:
            kind = "join"
        if kind == "join" and self._size >= self._most:
            kind = "leave"
        getattr(self, f"_{kind}")()
        self.done[kind] = self.done.get(kind, 0) + 1

    def _say(self, text: str) -> None:
        print(f"  step {self._run.step:4d}, view {self._run.view:3d}: {text}", flush=True)

    def _victim(self) -> str:
        """A member, when at least one other with state would be left."""
        self._wait_easing(lambda: len(self._begun()) >= 2, "two living members")
        return self._rng.choice(self._run.living_members())

    def _begun(self) -> list[str]:
        """Members that have begun a step, and so have the state: a joiner that still loads cannot go on alone."""
        return [member for member in self._run.living_members() if self._gate.with_name(f"at-{member}").exists()]

    def _wait_easing(self, condition: Callable[[], bool], what: str) -> None:
        """A view changes between steps: while a joiner waits to be taken in, let a step pass now and then."""

        def ready() -> bool:
            if condition():
                return True
            waits = any(worker not in self._run.members for worker in self._run.living_registered())
            if waits and time.monotonic() > self._eased_at + 0.25:
                self._let_pass(1)
            return False

        self._run.wait(ready, what)

    def _let_pass(self, steps: int) -> None:
        self._eased_at = time.monotonic()
        self.open_gate_to(min(self._steps, max(self._open_to, self._at()) + steps))

    def _kill(self) -> None:
        victim = self._victim()
        pid = self._run.pids[victim]
        self._say(f"kill -9 {victim}")
        send(pid, signal.SIGKILL)
        # A process dies a moment later; the next victim must not be the only other one that has the state.
        self._run.wait(lambda: not process_state(pid), f"the death of {victim}")

    def _stop(self) -> None:
        """For longer than its lease: the others go on without it."""
        victim = self._victim()
        self._say(f"stop {victim} for good")
        send(self._run.pids[victim], signal.SIGSTOP)
        self._let_pass(2)  # the others must come to where they miss it
        self._run.wait(lambda: victim not in self._run.members, f"a view without {victim}")

    def _pause(self) -> None:
        """For a while, shorter or longer than its lease; then it wakes by itself."""
        victim = self._victim()
        pid = self._run.pids[victim]
        duration_s = self._rng.choice((0.05, 0.5, 1.5, 2.5))
        self._say(f"stop {victim} for {duration_s} s")
        send(pid, signal.SIGSTOP)
        time.sleep(duration_s)
        send(pid, signal.SIGCONT)

    def _part(self) -> Watched:
        """Whose agent is meant."""
        assert isinstance(self._run, Watched)
        return self._run

    def _agent(self) -> None:
        part = self._part()
        assert part.agent is not None
        self._say(f"kill -9 the agent{f' of {part.host}' if part.host else ''}, and take over")
        part.agent.kill()
        part.agent.wait()
        time.sleep(self._rng.choice((0.0, 0.3, 1.0)))
        part.start()

    def _join(self) -> None:
        self._scale(self._size + 1)

    def _leave(self) -> None:
        self._scale(self._size - 1)

    def _scale(self, size: int) -> None:
        self._size = size
        self._say(f"scale to {size} workers")
        self._part().scale(size)


class HostsNemesis(Nemesis):
    """What can happen to several hosts beside that: power, the network between them, the ledger's members."""

    KINDS = (*Nemesis.KINDS, "leader", "leader", "cut_off", "cut_between", "one_way", "power")

    def __init__(
        self,
        fleet: Fleet,
        gate: Path,
        *,
        sizes: dict[str, int],
        board: Switchboard,
        cluster: EtcdCluster,
        steps: int,
        faults: int,
        seed: int,
    ) -> None:
        super().__init__(fleet, gate, steps=steps, faults=faults, seed=seed, workers=sum(sizes.values()))
        self._fleet = fleet
        self._sizes = sizes
        self._board = board
        self._cluster = cluster

    def _part(self) -> Watched:
        return self._fleet.hosts[self._rng.choice(sorted(self._sizes))]

    def _scale(self, size: int) -> None:
        """One more or one less on some host; each keeps at least one."""
        change = size - self._size
        able = [host for host, workers in self._sizes.items() if workers + change >= 1]
        host = self._rng.choice(sorted(able))
        self._size, self._sizes[host] = size, self._sizes[host] + change
        self._say(f"scale {host} to {self._sizes[host]} workers")
        self._fleet.hosts[host].scale(self._sizes[host])

    def _leave(self) -> None:
        if max(self._sizes.values()) > 1:
            super()._leave()
        else:
            super()._join()

    def _leader(self) -> None:
        """A majority is left, and elects another."""
        leader = self._cluster.leader()
        self._say(f"kill -9 the ledger's leader, member {leader}")
        self._cluster.kill(leader)
        self._let_pass(1)
        time.sleep(self._rng.choice((0.0, 0.5, 2.0)))
        self._cluster.restart(leader)

    def _host_to_lose(self) -> str:
        """One without which there is still a member that has the state."""

        def able() -> list[str]:
            hosts = {host_of(member) for member in self._begun()}
            return sorted(host for host in self._sizes if hosts - {host} and host not in self._fleet.off)

        self._wait_easing(lambda: bool(able()), "members with state on two hosts")
        return self._rng.choice(able())

    def _cut_off(self) -> None:
        """From everything, the ledger too. Shorter than its leases nobody need notice; longer, the others go on."""
        host = self._host_to_lose()
        duration_s = self._rng.choice((0.3, 1.0, 6.0))
        self._say(f"cut {host} off for {duration_s} s")
        self._board.isolate(host)
        self._let_pass(2)
        time.sleep(duration_s)
        self._board.heal()

    def _cut_between(self) -> None:
        """Both still reach the ledger, and not each other."""
        one, other = self._rng.sample(sorted(self._sizes), 2)
        self._host_to_lose()
        self._say(f"cut {one} from {other} for 8 s")
        self._board.cut(one, other)
        self._let_pass(2)
        time.sleep(8.0)
        self._board.heal()

    def _one_way(self) -> None:
        one, other = self._rng.sample(sorted(self._sizes), 2)
        self._host_to_lose()
        self._say(f"let nothing pass from {one} to {other} for 8 s")
        self._board.cut_one_way(one, other)
        self._let_pass(2)
        time.sleep(8.0)
        self._board.heal()

    def _power(self) -> None:
        """The cable goes first, so that no connection is closed in order."""
        host = self._host_to_lose()
        self._say(f"{host} loses power")
        self._board.unplug(host)
        self._fleet.power_off(host)
        self._let_pass(2)
        self._run.wait(lambda: not any(host_of(m) == host for m in self._run.members), f"a view without {host}")
        self._board.plug(host)
        self._fleet.power_on(host)
