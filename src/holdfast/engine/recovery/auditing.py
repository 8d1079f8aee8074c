"""A worker's part in audits: takes the digests that members compare, and writes down what came of it.

Belongs to the thread of the user's loop. What is compared when, and what follows, is decided in membership/auditing.py.
The state is hashed where a step begins: nothing of it changes before the script's lines for the step run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError, CorruptionError
from holdfast.core.options.run import REFUSE
from holdfast.core.words import KEY_LIARS, encode_json, host_of
from holdfast.devices.copies import Downloads
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.optimizer_calls import OptimizerCalls
from holdfast.engine.recovery.shard_digests import NO_DIGEST, Later, Tap, as_it_is, may_be_finite
from holdfast.engine.recovery.trusting import Trusting
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.auditing import Auditing, AuditRules, Finding, Said
from holdfast.membership.suspecting import EVERYWHERE, Details
from holdfast.modes.capture import Collector
from holdfast.placement.environment import WorkerEnvironment
from holdfast.reduce.reduction import Number
from holdfast.reduce.sums import Sums
from holdfast.state.entries import entries_of
from holdfast.state.slices import Portion, difference, slice_digest, slices_for
from holdfast.state.snapshot import Holder

CORRUPTION = "corruption"  # the kind of rewinds that follow
REWINDS_MAX = 16
TWO = "with three or more workers the majority decides who is wrong"
THE_REST = f"{EVERYWHERE}; if there are none, test the memory and processors of these hosts"
SPOILED = "checkpoints of more than {} steps may be wrong, older ones are not"


def audit_rules(config: RunConfig, parameters: Sequence[torch.Tensor]) -> AuditRules:
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    if config.ranks > 1:  # each rank has a part of what is compared, and one cannot tell for all
        return AuditRules(seed=config.seed, slices=slices_for(size))
    return AuditRules(seed=config.seed, fraction=config.audit, every=config.audit_every, slices=slices_for(size))


def audited(environment: WorkerEnvironment | None) -> dict[str, Any]:
    """The run's settings of audits. Where other arithmetic is let in, other bits are nobody's fault."""
    if environment is None or environment.numerics != REFUSE:
        return {}
    return {"audit": environment.audit, "audit_every": environment.audit_every}


class Audits:
    """See the module. Keeps the digests of the step under way, whatever view it is in."""

    def __init__(
        self,
        auditing: Auditing,
        *,
        me: str,
        holder: Holder,
        events: EventLog,
        feed: LedgerFeed,
        calls: OptimizerCalls,
        trusting: Trusting,
        doubts: bool,
        downloads: Downloads | None = None,
    ) -> None:
        """`downloads`: where the model is on a device: what is hashed comes from there with the step's sums."""
        self.trusting = trusting
        self.found: Finding | None = None  # the last
        self.calls = calls
        self._auditing = auditing
        # Compare also shards whose metrics are not finite.
        self._doubts = doubts and bool(auditing.rules.every or auditing.rules.exactly)
        self._me = me
        self._holder = holder
        self._events = events
        self._feed = feed
        self._downloads = downloads
        self._step = -1
        self._shards: dict[int, Later] = {}
        self._state: Later = NO_DIGEST
        self._came = 0  # the step with which this worker was given its state, or began
        self._narrow = -1  # the step whose state all tell each other in detail

    def begin(self, step: int) -> None:
        """Shards of this step will be computed, or more of them in another view."""
        if step == self._step:
            return
        if not self._step < step <= self._step + 2:  # one step more is one whose mean it was sent
            self._came = step
        self._step, self._shards, self._state = step, {}, NO_DIGEST
        rules = self._auditing.rules
        number = rules.slice_due(step)
        if number is not None:
            portion = Portion(self._holder.refer(step), number, min(rules.slices, rules.every), self._downloads)
            self._state = portion.digest if self._downloads is not None else as_it_is(portion.digest())

    def missing(self, directive: m.Compute, passed: frozenset[int]) -> tuple[int, ...]:
        """Shards that I am asked to compute for comparison, but for those of which I have the digest."""
        if directive.step in passed:
            return ()  # nobody computes anything
        return tuple(shard for shard in directive.audits if shard not in self._shards)

    def collector(self, shard: int, sums: Sums | None, metrics: Mapping[str, Mapping[int, Number]]) -> Collector:
        """Where the shard's tensors go. `sums`: it counts; None: it is only compared.

        One whose metrics are not finite is compared, too: before the run gives up on its data, another worker looks.
        Not on a device, where nobody knows yet what they are.
        """
        finite = not self._doubts or all(may_be_finite(values.get(shard, 0.0)) for values in metrics.values())
        if sums is not None and finite and shard not in self._auditing.sampled(self._step):
            return sums
        return Tap(self._shards, sums, metrics, self._downloads)

    def said(self, step: int, members: Sequence[str]) -> Said:
        calls, late = self.calls.before(step), self.calls.late_before(step)
        leader = self._auditing.recent_leader(step)
        distrusts = next(((one.worker, one.reason) for one in self.trusting.distrusts(members)), None)
        if step != self._step:  # of a step that this worker's loop has not come to
            return Said(calls=calls, late=late, leader=leader, distrusts=distrusts)
        details = None
        if step == self._narrow:
            entries, whole = entries_of(self._holder.refer(step).on_host())
            details = Details(entries, self._came, whole)
        state = self._whole_state() if step == self._auditing.doubted else self._state()
        digests = tuple((shard, digest()) for shard, digest in sorted(self._shards.items()))
        return Said(digests, state, calls, details, late, leader, distrusts)

    def _whole_state(self) -> str:
        """For a comparison that is made on a joiner's doubt: what it was offered is in it, to the last bit."""
        snapshot = self._holder.capture(self._step).on_host()
        return slice_digest(snapshot, 0, 1) + snapshot.digest()

    def accuse(self, finding: Finding, members: Sequence[str]) -> None:
        """Every member writes down what it found. The first that is not accused marks who is, in the ledger."""
        self.found = finding
        if finding.narrow:
            self._narrow = finding.step
            return
        if finding.script:
            self._blame_the_script(finding)
            return
        if finding.what == "trust":
            self.trusting.evicted(finding.step, finding.liars[0], finding.where)
            return
        decided = "by majority" if finding.liars else f"by {finding.third}" if finding.third else "not decidable"
        where = f"shard {finding.number}" if finding.what == "shard" else finding.where or self._names(finding)
        self._events.write(
            "corruption",
            step=finding.step,
            what="gradient" if finding.what == "shard" else "state",
            where=where,
            digests=dict(finding.digests),
            liars=list(finding.liars),
            decided=decided,
            good=finding.good,
        )
        honest = [member for member in members if member not in finding.liars]
        if honest[:1] == [self._me]:
            for liar in finding.liars:
                note = {"step": finding.step, "what": finding.what, "host": host_of(liar)}
                self._feed.put(KEY_LIARS + liar, encode_json(note))

    def _blame_the_script(self, finding: Finding) -> None:
        """And nobody else: who was marked for the same before is marked no more."""
        said = {"step": finding.step, "where": finding.where, "reason": finding.script, "hint": finding.hint}
        self._events.write("script_mistake", **said)
        marked = {worker for record in self._auditing.earlier for worker in record.evict}
        marked |= {leader for leader, _ in filter(None, [self._auditing.leader])}
        for worker in sorted(marked):
            self._feed.delete(KEY_LIARS + worker)

    def asked_of_rewind(self) -> dict[str, Any]:
        """What a rewind is told beside the step and the reason. Every member that is not accused asks for the same."""
        found = self.found
        assert found is not None
        return {"kind": CORRUPTION, "evict": found.liars, "rewinds_max": REWINDS_MAX, "clue": found.clue}

    def end(self, end: m.End) -> None:
        """Raise what ends the run, if it is one of these ends."""
        found = self.found
        if end.kind == "script" and found is not None:
            raise ConfigError(end.reason, hint=found.hint)
        if end.kind == "corrupt":
            good = found.good if found is not None else None
            words = f"{THE_REST}; {TWO}"
            raise CorruptionError(end.reason, hint=words if good is None else f"{words}; {SPOILED.format(good)}")

    def _names(self, finding: Finding) -> str:
        """The tensors in which the one who is wrong differs from one who is not, or the first two from each other."""
        rules, said = self._auditing.rules, dict(finding.digests)
        one = said[finding.liars[0]] if finding.liars else finding.digests[0][1]
        other = next(digest for digest in said.values() if digest != one)
        snapshot = self._holder.refer(self._step).on_host()
        slices = 1 if finding.whole else min(rules.slices, rules.every)
        return difference(snapshot, finding.number, slices, one, other)
