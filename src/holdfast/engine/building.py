"""Puts a worker together in its place, from what a script has given to join: each of its parts is built here."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import HANDED, PROCESS_GROUP, RunConfig
from holdfast.core.errors import ConfigError
from holdfast.core.options.run import OFF
from holdfast.core.words import Registration
from holdfast.devices.copies import Downloads
from holdfast.engine.bringing import FromDevice
from holdfast.engine.carrying import ProcessGroups, process_groups
from holdfast.engine.gradients import Gradients, Way
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.lines import Lines
from holdfast.engine.optimizer_calls import OptimizerCalls
from holdfast.engine.pausing import Pauses
from holdfast.engine.place import WorkerPlace
from holdfast.engine.ranks.forming import Formed, form, make_arena
from holdfast.engine.ranks.kinds import in_its_rank, worker_of
from holdfast.engine.ranks.whole_state import FollowingCheckpoints, of_group
from holdfast.engine.recovery.auditing import Audits, audit_rules
from holdfast.engine.recovery.catching import Catching, MeanDesk
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.recovery.trusting import Trusting, book_for
from holdfast.engine.spending import HeldUp, Spending
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.engine.transfer.fetching import Fetcher
from holdfast.engine.transfer.snapshot_desk import SnapshotDesk
from holdfast.engine.transfer.state_elsewhere import StateElsewhere
from holdfast.engine.transfer.state_transfer import StateTransfer
from holdfast.engine.transfer.table_rows import TableRows
from holdfast.engine.worker import Worker
from holdfast.membership.machine import Machine
from holdfast.membership.view_rules import Timing
from holdfast.modes.capture import GradientCapture
from holdfast.modes.port import Attendance
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.listening import own_address
from holdfast.placement.proc import started_here
from holdfast.reduce.aggregators import Aggregator, Mean
from holdfast.reduce.arena import Arena
from holdfast.reduce.paths import BY_ITSELF
from holdfast.reduce.reduction import SMALL_BYTES
from holdfast.reduce.slots import DeviceSlots
from holdfast.reduce.sums import Sums
from holdfast.state.snapshot import Holder

ABANDON_MARGIN_S = 60.0
STATES, FETCHED_BYTES_PER_S = 3, 500e6  # a state has so many times the bytes of a gradient, and comes as fast


@dataclass(frozen=True)
class Building:
    """One worker in the making."""

    place: WorkerPlace
    config: RunConfig
    capture: GradientCapture
    holder: Holder
    attendance: Attendance

    def worker(self, saving: CheckpointSettings, calls: OptimizerCalls) -> Worker:
        place, capture, kernel = self.place, self.capture, self.place.wires.kernel
        formed = form(capture.whole_layout().slot_bytes, self.holder.capture(0).digest())
        path = BY_ITSELF if self.attendance.own_view else self.config.path
        way = Way(path, formed.slot_bytes <= SMALL_BYTES, place.mode.rules().whole)
        arena = make_arena(self.config.bundles * way.parities, formed.slot_bytes)
        desk, means = SnapshotDesk(kernel), MeanDesk(kernel.now)
        feed = self._feed(*place.listen(arena, desk, means))
        rewinding = Rewinding(place.rewinds, feed, place.events, alone=place.environment is None, kernel=kernel)
        following = FollowingCheckpoints(keeps=bool(saving.uri))
        inner = self._checkpoints(saving, feed, rewinding, following)
        machine = self._machine(formed, two_rounds=way.two_rounds, saves=place.saves(inner))
        machine.audits.earlier = place.rewinds.records
        aggregator = place.mode.aggregator() if self.config.ranks == 1 else Mean(self.config.ranks)
        downloads = Downloads(capture.device) if capture.device is not None else None
        gradients = self._gradients(arena, way, aggregator, downloads)
        gradients.passed, gradients.seed = rewinding.passed, self.config.seed
        spending = Spending(place.events, kernel.now)
        checkpoints = HeldUp(inner, spending)
        worker = worker_of(place.ranks)(
            machine,
            Lines(wires=place.wires, mailbox=place.mailbox, feed=feed, events=place.events, spending=spending),
            gradients=gradients,
            transfer=self._transfer(desk, checkpoints, gradient_bytes=arena.slot_bytes),
            catching=self._catching(means, gradients, checkpoints),
            pauses=Pauses(feed, place.events, run=place.run, outage_s=self.config.outage_s),
            attendance=self.attendance,
            rewinding=rewinding,
            audits=self._audits(machine, feed, calls, aggregator, downloads),
        )
        gradients.ends_by(worker.replace_me)
        feed.start()
        return in_its_rank(worker, following)

    def _feed(self, address: str, local: str) -> LedgerFeed:
        place = self.place
        registration = Registration(
            id=place.me,
            host=place.host,
            pid=os.getpid(),
            pid_started=started_here(),
            address=address,
            fingerprint=place.fingerprint,
            local=local,
        )
        return LedgerFeed(
            self.attendance.ledger(place.ledger),
            registration,
            place.mailbox,
            place.events,
            lease_s=place.lease_s,
            outage_s=self.config.outage_s,
            kernel=place.wires.kernel,
        )

    def _checkpoints(
        self, saving: CheckpointSettings, feed: LedgerFeed, rewinding: Rewinding, following: FollowingCheckpoints
    ) -> NoCheckpoints:
        place = self.place
        alone = partial(place.checkpoints, self.config, saving=saving, feed=feed, rewinding=rewinding)
        found = of_group(place.ranks, self.holder, following, alone)
        if found.keeps and (tables := self.capture.tables.on_servers):
            found = TableRows(found, tables, place.me, feed=feed, events=place.events)
        if not self.attendance.state_elsewhere:
            return found
        return StateElsewhere(found, self.attendance, place.me, place.events)

    def _machine(self, formed: Formed, *, two_rounds: bool, saves: bool) -> Machine:
        config, rules = self.config, self.place.mode.rules()
        rules.even = rules.even or config.rebalance == OFF
        # Whoever is left behind is one whose shards the others compute: only where a step must have them, and nobody
        # waits for samples that one of them reads.
        waits = rules.whole and config.order != HANDED and config.ranks == 1
        return Machine(
            self.place.me,
            shards=config.bundles,
            digest=formed.digest,
            two_rounds=two_rounds,
            checkpoints=saves,
            timing=_timing(config, _late_s(self.place.environment, formed.slot_bytes) if waits else 0.0),
            rules=audit_rules(config, self.capture.parameters),
            step_rules=rules,
        )

    def _gradients(self, arena: Arena, way: Way, aggregator: Aggregator, downloads: Downloads | None) -> Gradients:
        slots = DeviceSlots(arena, downloads) if downloads is not None else None
        sums = Sums(arena, self.config.bundles, parities=way.parities, by_shard=aggregator.by_shard, slots=slots)
        return Gradients(
            self.place.me,
            arena=arena,
            sums=sums,
            capture=self.capture,
            way=way,
            aggregator=aggregator,
            bringing=FromDevice(sums, slots) if slots is not None else None,
            carrying=self._carrying(),
        )

    def _carrying(self) -> ProcessGroups | None:
        place = self.place
        if place.environment is None or self.config.path != PROCESS_GROUP:
            return None
        if self.attendance.own_view:
            raise ConfigError(
                "with --path process-group gradients are reduced among all workers, and in this mode they are not",
                hint="leave --path out",
            )
        address = own_address(place.environment)
        return process_groups(place.me, place.wires.kernel, place.mailbox, place.events, self.capture.device, address)

    def _transfer(self, desk: SnapshotDesk, checkpoints: NoCheckpoints, *, gradient_bytes: int) -> StateTransfer:
        place = self.place
        return StateTransfer(
            self.capture,
            self.holder,
            desk=desk,
            fetcher=Fetcher(place.me, place.wires, self.holder, gradient_bytes=gradient_bytes),
            checkpoints=checkpoints,
            events=place.events,
            clock=place.wires.kernel.now,
        )

    def _catching(self, means: MeanDesk, gradients: Gradients, checkpoints: NoCheckpoints) -> Catching:
        place = self.place
        return Catching(
            place.me,
            place.wires,
            desk=means,
            gradients=gradients,
            capture=self.capture,
            events=place.events,
            checkpoints=checkpoints,
        )

    def _audits(
        self,
        machine: Machine,
        feed: LedgerFeed,
        calls: OptimizerCalls,
        aggregator: Aggregator,
        downloads: Downloads | None,
    ) -> Audits:
        place, config = self.place, self.config
        book = book_for(aggregator, shards=config.shards, f=place.mode.hostile, whole=machine.step_rules.whole)
        return Audits(
            machine.audits,
            me=place.me,
            holder=self.holder,
            events=place.events,
            feed=feed,
            calls=calls,
            trusting=Trusting(book, me=place.me, events=place.events, clock=place.wires.kernel.now),
            doubts=config.non_finite != "ignore",
            downloads=downloads,
        )


def _timing(config: RunConfig, late_s: float) -> Timing:
    """Who may still train without the ledger is not given up: see docs/decisions/0006."""
    timing = Timing(late_s=late_s)
    return replace(timing, abandon_s=config.outage_s + ABANDON_MARGIN_S) if config.outage_s else timing


def _late_s(environment: WorkerEnvironment | None, slot_bytes: int) -> float:
    """Who is left behind fetches the state when it is back, and the others wait for that: so at least as long."""
    least_s = environment.late_after_s if environment is not None else 0.0
    return max(least_s, STATES * slot_bytes / FETCHED_BYTES_PER_S) if least_s else 0.0
