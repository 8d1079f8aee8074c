"""The runtime of one worker: turns what happens into events for the machine, and performs its effects.

Everything here runs in the thread of the user's loop, which owns the machine, the group and the gradients
(gradients.py). `advance` returns when the user's loop has the word: to compute shards, or to apply a step. Other
threads (ledger feed, listener, dialling) only put things into the mailbox; see docs/threads.md.
"""

from __future__ import annotations

import secrets
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from holdfast.core.errors import CorruptionError, Evicted, IntegrityError, PeerError, Stopped
from holdfast.core.spending import REDUCING
from holdfast.core.words import Registration
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.balance import Pace
from holdfast.membership.codec import encode
from holdfast.membership.machine import Machine
from holdfast.membership.reach import Roll
from holdfast.modes.exact import Exact
from holdfast.reduce.arena import Arena
from holdfast.reduce.groups import BrokenGroup, Gone, Group, Said
from holdfast.reduce.reduction import Kept
from holdfast.run.auditing import CORRUPTION, REWINDS_MAX, Audits
from holdfast.run.catching import Catching, Late
from holdfast.run.checkpointing import NoCheckpoints
from holdfast.run.fetching import Fetcher
from holdfast.run.gradients import Gradients
from holdfast.run.knocking import Knocker
from holdfast.run.ledger_feed import LedgerFeed, LedgerNews
from holdfast.run.mailbox import Mailbox
from holdfast.run.meeting import Connected, Meeting, Unreachable
from holdfast.run.pausing import Pauses
from holdfast.run.punctual import Punctual
from holdfast.run.rewinding import Rewinding
from holdfast.run.snapshot_desk import SnapshotDesk
from holdfast.run.spending import HeldUp, Spending
from holdfast.state.snapshot import Holder, Snapshot
from holdfast.trust.keys import Keys

TICK_S = 0.2


@dataclass(frozen=True)
class LeaveRequested:
    pass


class Worker(Punctual):
    """Drives one machine. See the module."""

    def __init__(
        self,
        machine: Machine,
        *,
        keys: Keys,
        host: str,
        mailbox: Mailbox,
        feed: LedgerFeed,
        arena: Arena,
        gradients: Gradients,
        exact: Exact,
        holder: Holder,
        desk: SnapshotDesk,
        catching: Catching,
        events: EventLog,
        checkpoints: NoCheckpoints,
        audits: Audits,
        rewinding: Rewinding,
        outage_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine = machine
        self.gradients = gradients
        self.rewinding = rewinding
        self._mailbox = mailbox
        self._feed = feed
        self._exact = exact
        self._holder = holder
        self._desk = desk
        self._catching = catching
        self._events = events
        self._pauses = Pauses(feed, events, outage_s=outage_s)
        self.spending = Spending(events)
        self._checkpoints = HeldUp(checkpoints, self.spending)
        self.audits = audits
        self._pace = Pace()
        self._clock = clock
        self._meeting = Meeting(machine.me, host, keys, mailbox, None if gradients.kind == "network" else arena)
        self._knocker = Knocker(machine.me, host, keys, mailbox)
        self._group: Group | None = None
        self._registrations: Mapping[str, Registration] = {}
        self._rolls: Mapping[str, Roll] = {}  # of members that have given up a view
        self._queue: deque[m.Event] = deque()
        self._directive: m.Compute | m.Commit | None = None
        self._ended: m.End | None = None
        self._broken_at: float | None = None
        # Optimizers keep a few numbers per parameter, extras a copy or two: more than this is no snapshot of ours.
        bytes_max = 16 * arena.slot_bytes + (1 << 30)
        self._fetcher = Fetcher(machine.me, host, keys, holder, bytes_max=bytes_max)
        self._recomputed = 0
        self._idle_poll = select.poll()
        self._idle_poll.register(mailbox.fd, select.POLLIN)

    # ---- the loop's side

    def advance(self) -> m.Compute | m.Commit:
        """Run the protocol until the user's loop has something to do."""
        while True:
            self._drain()
            if self._ended is not None:
                self._leave(self._ended)
            if self._directive is not None and not self._must_pause(self._directive):
                directive, self._directive = self._directive, None
                self._pauses.over()
                self.spending.go_on(broken=self._broken_at is not None)
                return directive
            self._wait()

    def _must_pause(self, directive: m.Compute | m.Commit) -> bool:
        return isinstance(directive, m.Compute) and self._pauses.ledger_away_too_long(directive.step, self._clock())

    def wait_for_joiners(self) -> None:
        """Before the script's lines outside a step, which may change anything: joiners read our state as it is."""
        while self.machine.joiners_load():
            self._wait()
            self._drain()
            if self._ended is not None:
                self._leave(self._ended)
        self._checkpoints.wait_copied()

    def begin(self, step: int) -> None:
        """The user's loop starts to compute shards of this step, or goes on with it in another view."""
        assert self.machine.view is not None
        if step:
            self._checkpoints.prepare(self.machine.view.members)
        self.gradients.begin(step, self.machine.view.number)
        self.audits.begin(step)

    def computed(self, step: int, durations_s: Sequence[float]) -> None:
        """The user's loop is through with the shards it was given."""
        view = self.machine.view
        due = self._checkpoints.is_due(step + 1, first=view is None or view.members[0] == self.machine.me)
        pace = self._pace.took(durations_s)
        mark = secrets.randbits(63) if due else 0
        brings = self.gradients.brings() if self.machine.elastic else None
        said = self.audits.said(step)
        saving = self._checkpoints.saving
        self._queue.append(m.Computed(step, due, saving, pace, said=said, mark=mark, shards=brings))

    def save_last(self, step: int) -> None:
        """The loop over steps ends here. What the script does next may change the state."""
        view = self.machine.view
        if view is not None and not self.machine.has_just_come:  # or the others would wait for me, and I for them
            self._checkpoints.save_last(step, view.members, self._last_metrics())

    def hold(self, step: int) -> Snapshot:
        """A copy of the state, for `go_back_to`."""
        taken = self._holder.capture(step)
        return Snapshot(step, taken.tree, tuple(tensor.clone() for tensor in taken.tensors))

    def rewind(self, *, back_to: int, passed: tuple[int, ...], reason: str, **more: Any) -> NoReturn:
        """The run goes back, and this worker ends: see rewinding.py, whose `ask` takes the same."""
        self._checkpoints.settle_up_to(back_to)
        try:
            self.rewinding.ask(back_to=back_to, passed=passed, reason=reason, **more)
        except Evicted as end:
            self._leave(m.End("evicted", end.reason))

    def go_back_to(self, snapshot: Snapshot) -> None:
        self._holder.restore(snapshot)
        self._exact.rebase()

    def tell(self, event: m.Event) -> None:
        self._queue.append(event)

    @property
    def waits_for(self) -> str:
        return self.machine.reason

    def settle(self) -> None:
        """The script has ended well: so should its last checkpoint."""
        self._checkpoints.settle()

    def close(self) -> None:
        self._checkpoints.close()
        self._drop()
        self._feed.deregister()

    # ---- events

    def _drain(self) -> None:
        if not self._mailbox.is_empty:
            self._read_mail()
        while self._queue and self._ended is None:
            event = self._queue.popleft()
            for effect in self.machine.handle(event, self._clock()):
                self._perform(effect)

    def _wait(self) -> None:
        spending, phase, broken, now = self.spending, self.machine.phase, self._broken_at is not None, self._clock()
        if phase is not spending.phase or broken is not spending.broken or now >= spending.tell_at:
            spending.look(phase, broken=broken)
        if self._checkpoints.is_search_due(now):
            self._search()
            return
        group = self._group
        if group is None:
            self._idle_poll.poll(TICK_S * 1000)
            news: list[Said | Gone] = []
            if self.machine.view is not None:
                self._pauses.without_group(self.machine.next or 0, self.machine.reason, self._clock())
        else:
            news = group.poll(self.machine.wait_s(self._clock(), TICK_S))
        if news:
            assert group is not None
            for item in news:
                self._take(group, item)
        elif self._mailbox.is_empty:
            self._mailbox.clear()  # a wake-up whose item was taken before it came must not keep the poll awake
            self._queue.append(m.Tick())

    def _take(self, group: Group, item: Said | Gone) -> None:
        number = group.view.number
        if isinstance(item, Gone):
            self._queue.append(m.PeerLost(number, item.peer, item.reason))
            return
        try:
            if isinstance(item.message, m.Ready):
                self.gradients.heard(item.peer, item.message, item.note)
            elif isinstance(item.message, m.Result):
                self.gradients.receive(group, item.peer, item.message, item.note, self._interrupted)
        except PeerError as error:
            self._queue.append(m.PeerLost(number, item.peer, error.message))
            return
        self._queue.append(m.Heard(number, item.peer, item.message))
        if isinstance(item.message, m.Result):
            for more in group.resume(item.peer):
                self._take(group, more)

    def _read_mail(self) -> None:
        for item in self._mailbox.take_all():
            if isinstance(item, LedgerNews):
                self._registrations, self._rolls = item.registrations, item.state.rolls
                if why := self.rewinding.overtaken(item.rewinds):
                    self._ended = m.End("evicted", why)
                self._queue.append(m.LedgerSaw(item.state))
            elif isinstance(item, Connected):
                self._meeting.connected(item)
            elif isinstance(item, Unreachable):
                self._queue.append(m.PeerLost(item.view, item.peer, item.reason))
            elif isinstance(item, m.Knocked):
                self._queue.append(item)
            else:
                assert isinstance(item, LeaveRequested)
                self._queue.append(m.LeaveAsked())

    # ---- effects

    def _perform(self, effect: m.Effect) -> None:
        handler = self._EFFECTS[type(effect)]
        handler(self, effect)

    def _register(self, effect: m.Register) -> None:
        self._feed.register(effect.while_view)

    def _deregister(self, effect: m.Deregister) -> None:
        """Done in `_leave`, after the event log says why: an agent takes a silent disappearance for a hang."""

    def _propose(self, effect: m.Propose) -> None:
        self._feed.propose(effect.view, effect.expected)

    def _knock(self, effect: m.Knock) -> None:
        self._knocker.knock(effect, self._registrations)

    def _publish(self, effect: m.Publish) -> None:
        self._feed.publish(effect.roll)

    def _open(self, effect: m.Open) -> None:
        view = effect.view
        self._drop()
        self._desk.expect(view.number)
        self._group = self._meeting.open(view, self._registrations)
        self._events.write(
            "view", view=view.number, members=list(view.members), reason=view.reason, step=self.machine.next
        )

    def _drop_effect(self, effect: m.Drop) -> None:
        if effect.peer:
            self._broken_at = self._clock()
            self._events.write("lost", view=effect.view, peer=effect.peer, reason=effect.reason, step=self.machine.next)
            self._checkpoints.member_lost()
        self._drop()

    def _drop(self) -> None:
        """Close the group, if there is one, so that its other members notice."""
        self._desk.withdraw()
        group, self._group = self._group, None
        self.gradients.forget_view()
        if group is not None:
            group.close()

    def _broadcast(self, effect: m.Broadcast) -> None:
        group = self._group
        if group is None:
            return
        message = effect.message
        if isinstance(message, m.Ready):
            lost = self.gradients.say_ready(group, message, self._interrupted)
        else:
            lost = group.broadcast(encode(message), keep=not isinstance(message, m.Done))
        for gone in lost:
            self._queue.append(m.PeerLost(group.view.number, gone.peer, gone.reason))

    def _reduce(self, effect: m.Reduce) -> None:
        group = self._group
        assert group is not None
        try:
            began = time.monotonic()
            resumed = self.gradients.reduce(group, effect, self._interrupted)
            self.spending.took(REDUCING, began)
        except BrokenGroup as error:
            self._queue.appendleft(m.ReductionFailed(effect.step, error.peer, error.reason))
            return
        for peer in sorted(resumed):
            for item in group.resume(peer):
                self._take(group, item)
        self._queue.appendleft(m.Reduced(effect.step))

    def _interrupted(self) -> str:
        """Asked while bulk data is stuck: the member that, by the ledger, is gone or has given up this view."""
        if self._mailbox.is_empty:
            return ""
        self._read_mail()
        group = self._group
        assert group is not None
        for peer in group.connections:
            roll = self._rolls.get(peer)
            if peer not in self._registrations or (roll is not None and roll.view == group.view.number):
                return peer
        return ""

    def _give(self, effect: m.Give) -> None:
        group = self._group
        assert group is not None
        try:
            if not self.gradients.give(group, effect, self._interrupted):
                why = f"the mean of step {effect.step}, which others lack, is no longer whole here"
                self._leave(m.End("evicted", why))
        except BrokenGroup as error:
            self._queue.append(m.PeerLost(group.view.number, error.peer, error.reason))

    def _serve(self, effect: m.Serve) -> None:
        assert self.machine.view is not None
        self._exact.layout()
        self._desk.offer(self.machine.view.number, self._holder.capture(effect.step))

    def _fetch(self, effect: m.Fetch) -> None:
        view = self.machine.view
        assert view is not None
        started = self._clock()
        self._checkpoints.wait_copied()  # who was left behind may still be saving what it had before
        try:
            snapshot = self._fetcher.fetch(view.number, effect.step, effect.sources, self._registrations)
        except (PeerError, IntegrityError) as error:
            # Parameters are received where they live: what was begun cannot be used, neither now nor as a start.
            self._leave(m.End("evicted", f"the snapshot did not arrive: {error.message}"))
        if snapshot is None:
            self._queue.append(m.PeerLost(view.number, effect.sources[0], "it cannot be reached"))
            return
        self._holder.restore(snapshot, adopt=True)
        self._exact.rebase()
        self._checkpoints.arrived(effect.step)
        duration_s = round(self._clock() - started, 4)
        self._events.write("joined", view=view.number, step=effect.step, duration_s=duration_s, bytes=snapshot.nbytes)
        self._queue.appendleft(m.Loaded(effect.step))

    def _save(self, effect: m.Save) -> None:
        self._checkpoints.save(effect.step, effect.members, self._last_metrics(), mark=effect.mark)

    def _last_metrics(self) -> Mapping[str, float]:
        return self.gradients.kept.metrics if self.gradients.kept is not None else {}

    def _restore(self, effect: m.Restore) -> None:
        self._checkpoints.search_at(self._clock())

    def _search(self) -> None:
        if not self.machine.searching:
            self._checkpoints.search_at(None)  # another view has come meanwhile
        elif (found := self._checkpoints.search()) is not None:
            self._exact.rebase()
            self._queue.appendleft(found)

    def _accuse(self, effect: m.Accuse) -> None:
        assert self.machine.view is not None
        self.audits.accuse(effect.finding, self.machine.view.members)

    def _compute(self, effect: m.Compute) -> None:
        self._directive = effect
        if self._broken_at is not None:
            self._recomputed += len(effect.shards)

    def _commit(self, effect: m.Commit) -> None:
        kept = self.gradients.kept
        assert kept is not None and kept.step == effect.step
        self._desk.withdraw()
        self._catching.desk.clear_away()
        self._directive = effect
        if self._broken_at is not None:
            duration_s = self._clock() - self._broken_at
            self._broken_at = None
            about = {"view": self.machine._number(), "step": effect.step, "duration_s": round(duration_s, 4)}
            self._events.write("recovered", **about, recomputed_shards=self._recomputed)
            self._recomputed = 0

    def _late(self, effect: Late) -> None:
        caught = self._catching.perform(effect, self._registrations)
        if caught is not None:
            self._queue.append(caught)

    def _end(self, effect: m.End) -> None:
        self._ended = effect

    def _leave(self, end: m.End) -> NoReturn:
        if end.kind == "evicted":
            self._events.write("evicted", view=self.machine._number(), reason=end.reason)
            raise Evicted(end.reason)
        if end.kind == "rewind" and (found := self.audits.found) is not None:
            # Every member that is not accused asks for the same.
            more = {"kind": CORRUPTION, "evict": found.liars, "rewinds_max": REWINDS_MAX}
            self.rewind(back_to=found.good or 0, passed=(), reason=end.reason, **more)
        if end.kind == "corrupt":
            raise CorruptionError(end.reason, hint=self.audits.what_to_do())
        step, view = self.machine.next, self.machine.view
        if step is not None and view is not None:
            self._checkpoints.leave(step, view.members, self._last_metrics(), save=end.save)
        self._events.write("left", step=step, reason=end.reason)
        self._feed.deregister()
        raise Stopped(end.reason)

    def loaded(self, step: int, inspect: Callable[[Kept], None], missed: Kept | None = None) -> Kept:
        """Put the step's mean into the model, and have it looked at. Evicted if its memory was used again meanwhile."""
        kept = missed or self.gradients.kept
        assert kept is not None and kept.step == step
        self._checkpoints.wait_copied()  # the script's lines for the step may change anything
        self._exact.load(kept)
        inspect(kept)
        if not kept.is_intact():
            self._leave(m.End("evicted", "the others went on while this worker was away"))
        return kept

    _EFFECTS: ClassVar[dict[type, Callable[[Worker, Any], None]]] = {
        m.Register: _register,
        m.Deregister: _deregister,
        m.Propose: _propose,
        m.Knock: _knock,
        m.Publish: _publish,
        m.Open: _open,
        m.Drop: _drop_effect,
        m.Broadcast: _broadcast,
        m.Reduce: _reduce,
        m.Give: _give,
        m.Serve: _serve,
        m.Fetch: _fetch,
        m.Restore: _restore,
        m.Save: _save,
        m.Compute: _compute,
        m.Accuse: _accuse,
        m.Commit: _commit,
        **dict.fromkeys((m.Keep, m.Catch, m.LeftBehind, m.CaughtUp), _late),
        m.End: _end,
    }
