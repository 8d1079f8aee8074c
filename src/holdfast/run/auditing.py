"""A worker's part in audits: takes the digests that members compare, and writes down what came of it.

Belongs to the thread of the user's loop. What is compared when, and what follows, is decided in membership/auditing.py.
The state is hashed where a step begins: nothing of it changes before the script's lines for the step run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.core.config import RunConfig
from holdfast.core.words import KEY_LIARS, encode_json, host_of
from holdfast.events import EventLog
from holdfast.launch.environment import WorkerEnvironment
from holdfast.membership import messages as m
from holdfast.membership.auditing import NOTHING, Auditing, Finding, Rules, Said
from holdfast.modes.exact import Collector
from holdfast.reduce.sums import Sums
from holdfast.run.ledger_feed import LedgerFeed
from holdfast.state.layout import TensorSpec, memory_of, readable
from holdfast.state.slices import difference, slice_digest, slices_for
from holdfast.state.snapshot import Holder

CORRUPTION = "corruption"  # the kind of rewinds that follow
REWINDS_MAX = 16
NO_MAJORITY = "test the memory and processors of these hosts; with three or more workers the majority decides"
SPOILED = "checkpoints of more than {} steps may be wrong, older ones are not"


def audit_rules(config: RunConfig, parameters: Sequence[torch.Tensor]) -> Rules:
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return Rules(seed=config.seed, fraction=config.audit, every=config.audit_every, slices=slices_for(size))


def audited(environment: WorkerEnvironment | None, numerics: str) -> dict[str, Any]:
    """The run's settings of audits. Where other arithmetic is let in, other bits are nobody's fault."""
    if environment is None or numerics != "refuse":
        return {}
    return {"audit": environment.audit, "audit_every": environment.audit_every}


class Audits:
    """See the module. Keeps the digests of the step under way, whatever view it is in."""

    def __init__(
        self, auditing: Auditing, *, me: str, holder: Holder, events: EventLog, feed: LedgerFeed, doubts: bool
    ) -> None:
        self.found: Finding | None = None  # the last
        self._auditing = auditing
        # Compare also shards whose metrics are not finite.
        self._doubts = doubts and bool(auditing.rules.every or auditing.rules.exactly)
        self._me = me
        self._holder = holder
        self._events = events
        self._feed = feed
        self._step = -1
        self._shards: dict[int, str] = {}
        self._state = ""

    def begin(self, step: int) -> None:
        """Shards of this step will be computed, or more of them in another view."""
        if step == self._step:
            return
        self._step, self._shards, self._state = step, {}, ""
        rules = self._auditing.rules
        number = rules.slice_due(step)
        if number is not None:
            self._state = slice_digest(self._holder.refer(step), number, min(rules.slices, rules.every))

    def missing(self, directive: m.Compute, passed: frozenset[int]) -> tuple[int, ...]:
        """Shards that I am asked to compute for comparison, but for those of which I have the digest."""
        if directive.step in passed:
            return ()  # nobody computes anything
        return tuple(shard for shard in directive.audits if shard not in self._shards)

    def collector(self, shard: int, sums: Sums | None, metrics: Mapping[str, Mapping[int, float]]) -> Collector:
        """Where the shard's tensors go. `sums`: it counts; None: it is only compared.

        One whose metrics are not finite is compared, too: before the run gives up on its data, another worker looks.
        """
        finite = not self._doubts or all(math.isfinite(values.get(shard, 0.0)) for values in metrics.values())
        if sums is not None and finite and shard not in self._auditing.sampled(self._step):
            return sums
        return _Tap(self._shards, sums, metrics)

    def said(self, step: int) -> Said:
        if step != self._step:
            return NOTHING  # of a step that this worker's loop has not come to
        return Said(tuple(sorted(self._shards.items())), self._state)

    def accuse(self, finding: Finding, members: Sequence[str]) -> None:
        """Every member writes down what it found. The first that is not accused marks who is, in the ledger."""
        self.found = finding
        decided = "by majority" if finding.liars else f"by {finding.third}" if finding.third else "not decidable"
        where = f"shard {finding.number}" if finding.what == "shard" else self._names(finding)
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

    def what_to_do(self) -> str:
        """The hint of an error that ends the run."""
        good = self.found.good if self.found is not None else None
        return NO_MAJORITY if good is None else f"{NO_MAJORITY}; {SPOILED.format(good)}"

    def _names(self, finding: Finding) -> str:
        """The tensors in which the one who is wrong differs from one who is not, or the first two from each other."""
        rules, said = self._auditing.rules, dict(finding.digests)
        one = said[finding.liars[0]] if finding.liars else finding.digests[0][1]
        other = next(digest for digest in said.values() if digest != one)
        snapshot = self._holder.refer(self._step)
        return difference(snapshot, finding.number, min(rules.slices, rules.every), one, other)


class _Tap:
    """Takes the digest of what a shard leaves behind, and passes it on if it counts."""

    def __init__(self, digests: dict[int, str], sums: Sums | None, metrics: Mapping[str, Mapping[int, float]]) -> None:
        self._digests = digests
        self._sums = sums
        self._metrics = metrics

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        present = list(present)
        recorded = {name: values[shard] for name, values in sorted(self._metrics.items()) if shard in values}
        self._digests[shard] = shard_digest(tensors, present, recorded)
        if self._sums is not None:
            self._sums.add(shard, tensors, present)


def shard_digest(tensors: Sequence[torch.Tensor | None], present: Iterable[int], metrics: Mapping[str, float]) -> str:
    """Of gradients and buffers in their order, of which of them the shard has a say in, and of its metrics."""
    hasher: Any = xxhash.xxh3_128()
    said = [sorted(present), {name: value.hex() for name, value in metrics.items()}]
    hasher.update(json.dumps(said).encode())
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        row_major = readable(tensor, "a gradient").contiguous()
        spec = TensorSpec(row_major.dtype, tuple(row_major.shape))
        hasher.update(json.dumps([index, *spec.to_json()]).encode())
        hasher.update(memory_of(row_major, spec))
    return str(hasher.hexdigest())
