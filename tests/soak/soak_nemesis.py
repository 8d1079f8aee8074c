"""What only the soaks do to a run: pauses, changes of its size, hosts without power, cuts between two hosts, a ledger
without its leader."""

from __future__ import annotations

import signal
from collections.abc import Callable

from holdfast.drills.nemesis import Nemesis
from holdfast.drills.schedule import Planned
from holdfast.testing.observed_run import ObservedHosts, ObservedRun, send


class SoakNemesis(Nemesis):
    left_away = (*Nemesis.left_away, "leader", "power")

    def pause(self, planned: Planned, victim: str) -> None:
        pid = self.run.pids[victim]
        done = self._note(planned, f"stop {victim} (process {pid}) for {planned.duration_s:g} s", victim)
        send(pid, signal.SIGSTOP)
        self._until(done, lambda: send(pid, signal.SIGCONT))

    def scale(self, planned: Planned, part: ObservedRun, workers: int) -> None:
        where = f" {part.host}" if part.host else ""
        self._note(planned, f"scale{where} to {workers} workers")
        part.scale(workers)

    def power(self, planned: Planned, host: str) -> None:
        """Until the others have a view without it. The cable goes first, so that no connection is closed in order."""
        assert isinstance(self.run, ObservedHosts)
        run, board = self.run, self.ground.network
        done = self._note(planned, f"{host} loses power", *self._members_on(host))
        board.unplug(host)
        run.power_off(host)

        def back() -> None:
            board.plug(host)
            run.power_on(host)

        self._until(done, back, lambda now: not self._members_on(host))

    def cut_between(self, planned: Planned, one: str, other: str) -> None:
        """Both still reach the ledger, and not each other."""
        what = f"cut {one} from {other} for {planned.duration_s:g} s"
        self._cut(planned, what, lambda: self.ground.network.cut(one, other))

    def cut_one_way(self, planned: Planned, one: str, other: str) -> None:
        what = f"let nothing pass from {one} to {other} for {planned.duration_s:g} s"
        self._cut(planned, what, lambda: self.ground.network.cut_one_way(one, other))

    def _cut(self, planned: Planned, what: str, cut: Callable[[], None], *victims: str) -> None:
        done = self._note(planned, what, *victims)
        cut()
        self._until(done, self.ground.network.heal)

    def leader_down(self, planned: Planned, leader: int) -> None:
        """A majority is left, and elects another."""
        cluster = self.ground.cluster
        assert cluster is not None
        done = self._note(planned, f"kill -9 the ledger's leader, member {leader}")
        cluster.kill(leader)
        self._until(done, lambda: cluster.restart(leader))
