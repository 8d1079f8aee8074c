"""What really happened in a simulated schedule, and the promises that it is compared with."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from holdfast.log.messages import Update
from tests.harness.linearizability import BITS, Operation, explain
from tests.harness.log_simulator.schedule import Violation

if TYPE_CHECKING:
    from holdfast.log.leading import Leading
    from tests.harness.log_simulator.servers import Replica
    from tests.harness.log_simulator.world import World

Identity = tuple[int, str, int, int]  # slice, worker, incarnation, sequence


def identity(number: int, update: Update) -> Identity:
    return number, update.worker, update.incarnation, update.sequence


class Books:
    def __init__(self, world: World) -> None:
        self._world = world
        self._applied: dict[tuple[int, int], Update] = {}  # slice, index
        self._index_of: dict[Identity, int] = {}
        self._sums: dict[tuple[int, int], int] = {}  # slice, index -> the state after it
        self._primaries: dict[tuple[int, int], tuple[str, int]] = {}  # slice, epoch -> server, start of its process
        self.acknowledged: dict[Identity, Update] = {}
        self.history: dict[int, list[Operation]] = defaultdict(list)
        self.fresh_reads = 0

    def applied(self, replica: Replica, index: int, update: Update) -> None:
        number = replica.number
        if index <= replica.applied:
            raise Violation(f"{replica} applies entry {index} after {replica.applied}")
        known = self._applied.setdefault((number, index), update)
        if known != update:
            raise Violation(f"entry {index} of slice {number} is {known}, and {replica} applies {update}")
        first = self._index_of.setdefault(identity(number, update), index)
        if first != index:
            raise Violation(f"{replica} applies {update} twice: as entry {first} and {index}")
        total = self._sums.setdefault((number, index), replica.total + int(update.payload))
        if total != replica.total + int(update.payload):
            raise Violation(f"{replica} has missed an update before entry {index}")

    def leads(self, replica: Replica, leading: Leading) -> None:
        """Once its first entry is stored. Before that it has said nothing to anybody, and may begin again."""
        if replica.machine.copy.persisted < leading.opened_at:
            return
        epoch = leading.configuration.epoch
        mine = (replica.server.name, replica.server.starts)
        if (replica.number, epoch) not in self._primaries:
            self._world.opened(replica.server)
        first = self._primaries.setdefault((replica.number, epoch), mine)
        if first != mine:
            raise Violation(f"slice {replica.number} has two primaries in epoch {epoch}: {first} and {mine}")

    def acknowledges(self, replica: Replica, update: Update, index: int) -> None:
        """Checked where it is said, whether or not the client hears it."""
        who = identity(replica.number, update)
        at = self._index_of.get(who)
        if at is None or index not in (0, at):
            raise Violation(f"{replica} acknowledges {update} as entry {index}; it was applied as {at}")
        if who in self.acknowledged:
            return
        self.acknowledged[who] = update
        leading = replica.machine.leading
        assert leading is not None
        replicas = leading.configuration.replicas
        holders = [one for one in replicas if self._world.disk_of(one, replica.number).had(at, update)]
        if len(holders) < len(replicas) // 2 + 1:
            raise Violation(f"{replica} acknowledges {update}, which only {holders} of {replicas} have")

    # -- at the end

    def check_nothing_is_lost(self) -> None:
        for number in range(self._world.schedule.slices):
            primary = self._world.leading_replica(number)
            assert primary is not None
            expected = {int(one.payload) for who, one in self.acknowledged.items() if who[0] == number}
            missing = [bit for bit in expected if not primary.total & bit]
            if missing:
                lost = [one for one in self.acknowledged.values() if one.payload in missing]
                raise Violation(f"slice {number} has lost {lost}")
            once = sum(int(one.payload) for (at, _), one in self._applied.items() if at == number)
            if primary.total != once:
                raise Violation(f"slice {number} adds up to {primary.total:#x}, its updates to {once:#x}")

    def check_histories(self) -> None:
        for number, history in sorted(self.history.items()):
            checked = history
            if not self._world.schedule.clocks_keep_their_bound:
                checked = [one for one in history if one.call[0] != "read"]  # fresh only within the stated bound
            trouble = explain(checked, BITS)
            if trouble:
                raise Violation(f"the history of slice {number} is not linearizable: {trouble}")
