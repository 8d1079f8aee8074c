"""A run on several hosts of one machine: an agent each, in network namespaces that can be cut or on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from holdfast.launch.proc import process_state
from holdfast.testing.watched import LOG_SHOWN, WAIT_S, Failed, Watched


class Fleet:
    """Owned by one thread. What it knows is as of the last `look`; a host is looked at as if it were reachable."""

    def __init__(self, parts: Iterable[Watched]) -> None:
        self.hosts = {part.host: part for part in parts}
        self.step = 0
        self.off: set[str] = set()  # hosts without power

    def start(self) -> None:
        for host in self.hosts.values():
            host.start()

    def look(self) -> None:
        for host in self.hosts.values():
            host.look()
            self.step = max(self.step, host.step)

    @property
    def view(self) -> int:
        return max(host.view for host in self.hosts.values())

    @property
    def members(self) -> tuple[str, ...]:
        return max(self.hosts.values(), key=lambda host: host.view).members

    @property
    def evicted(self) -> int:
        return sum(host.evicted for host in self.hosts.values())

    @property
    def pids(self) -> dict[str, int]:
        return {worker: pid for host in self.hosts.values() for worker, pid in host.pids.items()}

    @property
    def digests(self) -> dict[str, str]:
        return {worker: digest for host in self.hosts.values() for worker, digest in host.digests.items()}

    def living_registered(self) -> list[str]:
        return [worker for host in self.hosts.values() for worker in host.living_registered()]

    def living_members(self) -> list[str]:
        pids = self.pids
        return [member for member in self.members if member in pids and process_state(pids[member])]

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S, *, period_s: float = 0.02
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.over()
            self.look()
            if condition():
                return
            if over:
                raise Failed(f"the run was over while waiting for {what}:\n{self.log()[-LOG_SHOWN:]}")
            if time.monotonic() > deadline:
                raise Failed(f"waited {timeout_s:.0f} s for {what}; at step {self.step}, view {self.view}")
            time.sleep(period_s)

    def over(self) -> bool:
        """Whether no agent is left."""
        agents = [host.agent for name, host in self.hosts.items() if name not in self.off]
        return all(agent is None or agent.poll() is not None for agent in agents)

    def power_off(self, host: str) -> None:
        self.off.add(host)
        self.hosts[host].power_off()

    def power_on(self, host: str) -> None:
        self.off.discard(host)
        self.hosts[host].start()

    def finish(self, timeout_s: float) -> str:
        """Wait for the end on every host that has power; the digest that all workers that finished agree on."""
        self.wait(self.over, "the end of the run", timeout_s, period_s=0.05)
        self.look()
        for name, host in self.hosts.items():
            if name not in self.off and host.agent is not None and host.agent.returncode != 0:
                raise Failed(f"the agent of {name} ended with exit code {host.agent.returncode}:\n{self.log()}")
        digests = set(self.digests.values())
        if len(digests) != 1:
            raise Failed(f"the workers ended with different weights: {self.digests}")
        return digests.pop()

    def log(self) -> str:
        parts = [
            f"--- {name}\n{host.log()[-LOG_SHOWN:]}" for name, host in self.hosts.items() if host.log_path.exists()
        ]
        return "\n".join(parts)

    def end(self) -> None:
        for host in self.hosts.values():
            host.end()
