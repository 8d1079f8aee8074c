"""A plan by steps: which fault comes at which step is drawn from a seed; whom it hits, when it comes.

The training waits at a gate, so that a fault comes at the step that was drawn for it; one fault is over before the next
one comes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.core.words import host_of
from holdfast.drills.ground import Ground
from holdfast.drills.schedule import Planned
from holdfast.testing.observed_run import Failed, Observed, ObservedHosts, ObservedRun
from tests.harness import etcd_faults
from tests.harness.gate import Gate
from tests.soak.soak_nemesis import SoakNemesis

WAIT_S = 120.0
EASE_S = 0.25


class FaultsAtSteps:
    """What can happen on one host."""

    KINDS: tuple[str, ...] = ("kill", "kill", "kill", "stop", "pause", "agent", "join", "leave")

    def __init__(self, ground: Ground, run: Observed, gate: Path, *, steps: int, faults: int, seed: int) -> None:
        self.nemesis = SoakNemesis(ground, run, "faulty", self._say, lambda: run.step)
        self._run = run
        self._gate = Gate(gate)
        self._rng = random.Random(seed)
        self._sizes = {part.host: ground.size_of(part.host) for part in run.parts}
        self._most = self._size + 2
        self._eased_at = 0.0
        places = sorted(self._rng.randrange(2, max(3, steps * 4 // 5)) for _ in range(faults))
        self._plan = [(place, self._rng.choice(self.KINDS)) for place in places]
        self._steps = steps
        self.count: Counter[str] = Counter()

    def open_gate(self) -> None:
        """Before the run is started: up to the first fault."""
        self._gate.open_to(self._plan[0][0] + 3 if self._plan else self._steps)

    def faults(self) -> Iterator[None]:
        for index, (step, kind) in enumerate(self._plan):
            following = self._plan[index + 1][0] + 3 if index + 1 < len(self._plan) else self._steps
            yield from self._until(lambda step=step: self._at() >= step, f"step {step}")  # type: ignore[misc]
            time.sleep(self._rng.uniform(0.0, 0.05))  # anywhere within a step
            if kind == "leave" and self._size <= 2:
                kind = "join"
            if kind == "join" and self._size >= self._most:
                kind = "leave"
            yield from getattr(self, f"_{kind}")()
            yield from self._until(lambda: not self.nemesis.busy, f"the end of {kind}")
            self.count[kind] += 1
            self._gate.open_to(max(following, self._gate.open_below))

    # ---- where it is

    @property
    def _size(self) -> int:
        return sum(self._sizes.values())

    def _at(self) -> int:
        self._run.step = max(self._run.step, self._gate.newest())
        return self._run.step

    def _until(self, condition: Callable[[], bool], what: str) -> Iterator[None]:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"waited {WAIT_S:.0f} s for {what}; at step {self._run.step}, view {self._run.view}")
            yield

    def _until_easing(self, condition: Callable[[], bool], what: str) -> Iterator[None]:
        """A view changes between steps: while a joiner waits to be taken in, let a step pass now and then."""

        def ready() -> bool:
            if condition():
                return True
            waits = any(worker not in self._run.members for worker in self._run.living_registered())
            if waits and time.monotonic() > self._eased_at + EASE_S:
                self._let_pass(1)
            return False

        return self._until(ready, what)

    def _let_pass(self, steps: int) -> None:
        self._eased_at = time.monotonic()
        self._gate.open_to(min(self._steps, max(self._gate.open_below, self._at()) + steps))

    def _say(self, text: str) -> None:
        print(f"  step {self._run.step:4d}, view {self._run.view:3d}: {text}", flush=True)

    def _with_state(self) -> list[str]:
        return self._gate.seen(self._run.living_members())

    def _two_with_state(self) -> Iterator[None]:
        return self._until_easing(lambda: len(self._with_state()) >= 2, "two living members")

    def _victim(self) -> str:
        """A member, where `_two_with_state` waited: at least one other that has the state is left."""
        return self._rng.choice(self._run.living_members())

    # ---- what

    def _kill(self) -> Iterator[None]:
        yield from self._two_with_state()
        self.nemesis.kill(Planned(0.0, "kill"), self._victim())

    def _stop(self) -> Iterator[None]:
        """For longer than its lease: the others go on without it."""
        yield from self._two_with_state()
        victim = self._victim()
        self.nemesis.stop(Planned(0.0, "stop"), victim)
        self._let_pass(2)  # the others must come to where they miss it
        yield from self._until(lambda: victim not in self._run.members, f"a view without {victim}")

    def _pause(self) -> Iterator[None]:
        """For a while, shorter or longer than its lease; then it wakes by itself."""
        yield from self._two_with_state()
        victim = self._victim()
        self.nemesis.pause(self._lasting("pause", 0.05, 0.5, 1.5, 2.5), victim)

    def _agent(self) -> Iterator[None]:
        part = self._part()
        where = f" of {part.host}" if part.host else ""
        self.nemesis.agent_down(self._lasting("agent", 0.0, 0.3, 1.0), part, f"kill -9 the agent{where}, and take over")
        yield

    def _part(self) -> ObservedRun:
        """Whose agent is meant."""
        (part,) = self._run.parts
        return part

    def _join(self) -> Iterator[None]:
        yield from self._scale("join", 1)

    def _leave(self) -> Iterator[None]:
        yield from self._scale("leave", -1)

    def _scale(self, kind: str, change: int) -> Iterator[None]:
        part = self._part_to_scale(change)
        self._sizes[part.host] += change
        self.nemesis.scale(Planned(0.0, kind), part, self._sizes[part.host])
        yield

    def _part_to_scale(self, change: int) -> ObservedRun:
        return self._part()

    def _lasting(self, kind: str, *durations_s: float) -> Planned:
        return Planned(0.0, kind, duration_s=self._rng.choice(durations_s) if len(durations_s) > 1 else durations_s[0])


class FaultsOfHosts(FaultsAtSteps):
    """What can happen to several hosts beside that: power, the network between them, the ledger's members."""

    KINDS = (*FaultsAtSteps.KINDS, "leader", "leader", "cut_off", "cut_between", "one_way", "power")

    def _part(self) -> ObservedRun:
        return self._part_of(self._rng.choice(sorted(self._sizes)))

    def _part_of(self, host: str) -> ObservedRun:
        return next(part for part in self._run.parts if part.host == host)

    def _part_to_scale(self, change: int) -> ObservedRun:
        """One more or one less on some host; each keeps at least one."""
        able = [host for host, workers in self._sizes.items() if workers + change >= 1]
        return self._part_of(self._rng.choice(sorted(able)))

    def _leave(self) -> Iterator[None]:
        yield from super()._leave() if max(self._sizes.values()) > 1 else super()._join()

    def _leader(self) -> Iterator[None]:
        cluster = self.nemesis.ground.cluster
        assert cluster is not None
        leader = etcd_faults.leader(cluster)
        self.nemesis.leader_down(self._lasting("leader", 0.0, 0.5, 2.0), leader)
        self._let_pass(1)
        yield

    def _able_to_lose(self) -> list[str]:
        """Hosts without which there is still a member that has the state."""
        assert isinstance(self._run, ObservedHosts)
        hosts, off = {host_of(member) for member in self._with_state()}, self._run.off
        return sorted(host for host in self._sizes if hosts - {host} and host not in off)

    def _two_hosts_with_state(self) -> Iterator[None]:
        return self._until_easing(lambda: bool(self._able_to_lose()), "members with state on two hosts")

    def _host_to_lose(self) -> str:
        return self._rng.choice(self._able_to_lose())

    def _cut_off(self) -> Iterator[None]:
        """From everything, the ledger too. Shorter than its leases nobody need notice; longer, the others go on."""
        yield from self._two_hosts_with_state()
        host = self._host_to_lose()
        self.nemesis.cut_off(self._lasting("cut_off", 0.3, 1.0, 6.0), host)
        self._let_pass(2)

    def _cut_between(self) -> Iterator[None]:
        yield from self._cut(self.nemesis.cut_between, "cut_between")

    def _one_way(self) -> Iterator[None]:
        yield from self._cut(self.nemesis.cut_one_way, "one_way")

    def _cut(self, cut: Callable[[Planned, str, str], None], kind: str) -> Iterator[None]:
        one, other = self._rng.sample(sorted(self._sizes), 2)
        yield from self._two_hosts_with_state()
        self._host_to_lose()  # drawn as ever: the faults of a seed stay what they are
        cut(self._lasting(kind, 8.0), one, other)
        self._let_pass(2)

    def _power(self) -> Iterator[None]:
        yield from self._two_hosts_with_state()
        self.nemesis.power(Planned(0.0, "power"), self._host_to_lose())
        self._let_pass(2)
