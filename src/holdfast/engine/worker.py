"""The runtime of one worker: turns what happens into events for the machine, and performs its effects.

Everything here runs in the thread of the user's loop, which owns the machine, the group and the gradients
(gradients.py). `advance` returns when the user's loop has the word: to compute shards, or to apply a step. Other
threads (ledger feed, listener, dialling) only put things into the mailbox; see docs/threads.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, SupportsFloat

from holdfast.core.errors import PeerError
from holdfast.core.spending import REDUCING
from holdfast.core.words import Registration
from holdfast.engine.between_loops import BetweenLoops
from holdfast.engine.carrying import CarrierNews
from holdfast.engine.computed import ComputedShares
from holdfast.engine.gradients import Gradients
from holdfast.engine.ledger_feed import LedgerNews
from holdfast.engine.lines import Lines
from holdfast.engine.pausing import Pauses
from holdfast.engine.recovery.auditing import Audits
from holdfast.engine.recovery.catching import Catching, Late
from holdfast.engine.recovery.knocking import Knocker
from holdfast.engine.recovery.leaving import LeaveRequested, Leaving
from holdfast.engine.recovery.repairing import Repair
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.sharing import Sharing
from holdfast.engine.transfer.state_transfer import StateTransfer
from holdfast.engine.waiting import Waiting
from holdfast.membership import messages as m
from holdfast.membership.codec import decode, encode
from holdfast.membership.machine import Machine
from holdfast.membership.reach import Roll
from holdfast.modes.port import Attendance
from holdfast.net.groups import BrokenGroup, Gone, Group, Said
from holdfast.net.meeting import Connected, Meeting, Unreachable
from holdfast.reduce.reduction import KeptMean

TICK_S = 0.2
FLUSH_S = 5.0  # for the last that was said: a slow member may still have to read it


class Worker:
    """Drives one machine. See the module. `ranks`: of the group that this worker is, if it is one (ranks/)."""

    ranks, rank = 1, 0

    def __init__(
        self,
        machine: Machine,
        lines: Lines,
        *,
        gradients: Gradients,
        transfer: StateTransfer,
        catching: Catching,
        audits: Audits,
        rewinding: Rewinding,
        pauses: Pauses,
        attendance: Attendance,
    ) -> None:
        self.machine = machine
        self.lines = lines
        self.gradients = gradients
        self.rewinding = rewinding
        self.audits = audits
        self.attendance = attendance
        self.sharing = Sharing(machine, lines.wires.kernel.now)
        self.recorded: Callable[[int], Mapping[str, float]] = lambda step: {}  # outside the shards, at so many steps
        self.before_serving: Callable[[], None] = lambda: None  # the state is complete when this returns
        self.mailbox = self._mailbox = lines.mailbox
        self.spending = lines.spending
        self.waiting = Waiting(machine, lines.feed, lines.spending)
        self.checkpoints = self._checkpoints = transfer.checkpoints
        self._feed = lines.feed
        self._events = lines.events
        self._transfer = transfer
        self._catching = catching
        self._pauses = pauses
        self.clock = self._clock = lines.wires.kernel.now
        self._meeting = Meeting(machine.me, lines.wires, lines.mailbox, decode, gradients.shared_arena)
        self._knocker = Knocker(machine.me, lines.wires, lines.mailbox)
        self._group: Group | None = None
        self._registrations: Mapping[str, Registration] = {}
        self._rolls: Mapping[str, Roll] = {}  # of members that have given up a view
        self._queue: deque[m.Event] = deque()
        self._shares = ComputedShares(machine, gradients, audits, transfer.checkpoints, self._queue.append)
        self._directive: m.Compute | m.Commit | m.Halt | None = None
        self._ended: m.End | None = None
        self._repair = Repair(lines.events, lines.wires.kernel.now)
        self.leaving = Leaving(
            machine,
            lines,
            checkpoints=transfer.checkpoints,
            audits=audits,
            rewinding=rewinding,
            save_now=self.save_now,
            settle=attendance.close,
        )
        self.between_loops = BetweenLoops(machine, transfer, wait_while=self._wait_while, metrics=self._metrics)
        attendance.attach(self)

    # ---- the loop's side

    def advance(self) -> m.Compute | m.Commit | m.Halt:
        """Run the protocol until the user's loop has something to do."""
        self.leaving.raise_if_over()
        while True:
            self.drain()
            if self._ended is not None:
                self.leaving.leave(self._ended)
            if self._directive is not None and not self._must_pause(self._directive):
                directive, self._directive = self._directive, None
                self._pauses.over()
                self.spending.go_on(broken=self._repair.is_under_way)
                if not isinstance(directive, m.Halt):
                    self.attendance.given(directive)
                return directive
            self.wait()
            self._leave_in_vain(save=True)

    def _must_pause(self, directive: m.Compute | m.Commit | m.Halt) -> bool:
        return isinstance(directive, m.Compute) and self._pauses.ledger_away_too_long(directive.step, self._clock())

    def _wait_while(self, holds: Callable[[], object]) -> None:
        while holds():
            self.listen(save=True)

    def _leave_in_vain(self, *, save: bool) -> None:
        if (end := self.waiting.in_vain(self._clock(), save=save)) is not None:
            self.leaving.leave(end)

    def replace_me(self, reason: str) -> NoReturn:
        """Only a new process can go on in this one's place."""
        self.leaving.leave(m.End("evicted", reason))

    def listen(self, at_most_s: float = TICK_S, *, save: bool = False) -> None:
        """Hear what there is; no view changes meanwhile. `save`: the script's lines between steps have not begun."""
        self.leaving.raise_if_over()
        self.wait(at_most_s)
        if at_most_s:
            self._leave_in_vain(save=save)
        self.drain()
        if self._ended is not None:
            self.leaving.leave(self._ended)

    def share(self, place: m.ScriptPlace, items: Mapping[str, Any]) -> None:
        """Tell all members. See sharing.py."""
        for gone in self.sharing.say(place, items, self._group):
            self._queue.append(m.PeerLost(self.machine._number(), gone.peer, gone.reason))

    def begin(self, step: int) -> None:
        """The user's loop starts to compute shards of this step, or goes on with it in another view."""
        assert self.machine.view is not None
        self._shares.forget()
        self.attendance.begins(self._transfer.capture)
        if step:
            self._checkpoints.prepare(self.machine.view.members)
        self.begin_step(step)
        self.audits.begin(step)

    def computed(self, step: int, durations_s: Sequence[SupportsFloat], *, over: str = "") -> None:
        """The user's loop is through with the shards it was given. `over`: it wants no further steps, and why."""
        self._shares.computed(step, durations_s, over)

    def tell(self, event: m.Event) -> None:
        self._queue.append(event)

    def applied(self, step: int, *, save: bool) -> None:
        """The user's lines for the step are done."""
        if not self.attendance.knows_of(step):
            self.tell(m.Applied(step, save=save))

    def save_now(self, step: int, *, save: bool = True) -> str:
        """This worker ends, and its state is that of `step`. Why it is not saved; empty: it is."""
        view = self.machine.view
        return self.checkpoints.leave(step, view.members, self._metrics(step), save=save) if view else ""

    def close(self) -> None:
        self.attendance.close()
        self._checkpoints.close()
        if self._group is not None:
            self._group.flush(FLUSH_S)
        self._drop()
        self._feed.deregister()

    # ---- what an attendance does while the training thread is away: see modes/port.py

    @property
    def kept(self) -> KeptMean | None:
        return self.gradients.kept

    @property
    def is_ending(self) -> bool:
        return self._ended is not None

    def wake(self) -> None:
        self._mailbox.wake()

    def begin_step(self, step: int) -> None:
        assert self.machine.view is not None
        self.gradients.begin(step, self.machine.view.number)

    def drop_directive(self) -> None:
        self._directive = None

    def put_back(self, directive: m.Commit | m.Halt) -> None:
        """It is given to the user's loop when that has come to it."""
        self._directive = directive

    def end(self, end: m.End) -> None:
        self._ended = end

    def note_pace(self, durations_s: Sequence[float]) -> None:
        self._shares.note_pace(durations_s)

    # ---- events

    def drain(self) -> None:
        self._shares.look()
        if not self._mailbox.is_empty:
            self._read_mail()
        while self._queue and self._ended is None:
            event = self._queue.popleft()
            for effect in self._decide(event):
                self._perform(effect)

    def _decide(self, event: m.Event) -> list[m.Effect]:
        return self.machine.handle(event, self._clock())

    def wait(self, at_most_s: float = TICK_S) -> None:
        spending, phase, broken, now = self.spending, self.machine.phase, self._repair.is_under_way, self._clock()
        if phase is not spending.phase or broken is not spending.broken or now >= spending.tell_at:
            spending.look(phase, broken=broken)
        if self._checkpoints.is_search_due(now):
            self._search()
            return
        at_most_s = self._shares.patience_s(at_most_s)
        group = self._group
        if group is None:
            self._mailbox.wait(at_most_s)
            news: list[Said | Gone] = []
            self._pauses.without_group(self.machine, self._clock())
        else:
            news = group.poll(self.machine.wait_s(self._clock(), at_most_s))
        if news:
            assert group is not None
            self.waiting.over()
            for item in news:
                self._take(group, item)
        elif self._mailbox.is_empty:
            self._mailbox.clear()  # a wake-up whose item was taken before it came must not keep the poll awake
            self._queue.append(m.Tick())
            self.waiting.say(paused=self._directive is not None)
        else:
            self.waiting.over()

    def _take(self, group: Group, item: Said | Gone) -> None:
        number = group.view.number
        if isinstance(item, Gone):
            self._queue.append(m.PeerLost(number, item.peer, item.reason))
            return
        if isinstance(item.message, m.Shared):
            self.sharing.heard(item.peer, item.message)
            return
        if self.gradients.carries(item.message):
            return
        try:
            if isinstance(item.message, m.Ready):
                self.gradients.heard(item.peer, item.message, item.note)
            elif isinstance(item.message, m.GivenMean):
                self.gradients.receive(group, item.peer, item.message, item.note, self._interrupted)
        except PeerError as error:
            self._queue.append(m.PeerLost(number, item.peer, error.message))
            return
        self._queue.append(m.Heard(number, item.peer, item.message))
        if isinstance(item.message, m.GivenMean):
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
            elif isinstance(item, CarrierNews):
                self._queue.extend(self.gradients.news_of_carrier(item, self._group))
            else:
                assert isinstance(item, LeaveRequested)
                self.leaving.asked_by = item.number
                self._queue.append(m.LeaveAsked())

    # ---- effects

    def _perform(self, effect: m.Effect) -> None:
        handler = self._EFFECTS[type(effect)]
        handler(self, effect)

    def _open(self, effect: m.Open) -> None:
        view = effect.view
        self._drop()
        self._transfer.desk.expect(view.number)
        self._group = self._meeting.open(view, self._registrations)
        self.sharing.say_again(self._group)
        about = {"view": view.number, "members": list(view.members), "reason": view.reason, "step": self.machine.next}
        self._events.write("view", **about, **({"own": True} if self.attendance.own_view else {}))

    def _drop_effect(self, effect: m.Drop) -> None:
        if effect.peer:
            self._repair.begin()
            self._events.write("lost", view=effect.view, peer=effect.peer, reason=effect.reason, step=self.machine.next)
            self._checkpoints.member_lost()
        self._drop()

    def _drop(self) -> None:
        """Close the group, if there is one, so that its other members notice."""
        self._transfer.desk.withdraw()
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
            began = self._clock()
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
                self.leaving.leave(m.End("evicted", why))
        except BrokenGroup as error:
            self._queue.append(m.PeerLost(group.view.number, error.peer, error.reason))

    def _serve(self, effect: m.Serve) -> None:
        assert self.machine.view is not None
        self.before_serving()
        self._transfer.serve(self.machine.view, effect)

    def _fetch(self, effect: m.Fetch) -> None:
        assert self.machine.view is not None
        self.waiting.say_fetching(effect.sources)
        found = self._transfer.fetch(self.machine.view, effect, self._registrations)
        if isinstance(found, m.End):
            self.leaving.leave(found)
        (self._queue.appendleft if isinstance(found, m.Loaded) else self._queue.append)(found)

    def _save(self, effect: m.Save) -> None:
        metrics = self._metrics(effect.step)
        self._checkpoints.save(effect.step, effect.members, metrics, mark=effect.mark, wanted=effect.wanted)

    def _metrics(self, step: int) -> Mapping[str, float]:
        """Of the state after so many steps: the last one's, and what the script has recorded since."""
        return {**(self.gradients.kept.metrics if self.gradients.kept is not None else {}), **self.recorded(step)}

    def note_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """They belong to a checkpoint that was begun before they were known."""
        self._checkpoints.note(step, metrics)

    def _search(self) -> None:
        found = self._transfer.search(wanted=self.machine.searching)
        if found is not None:
            self._queue.appendleft(found)

    def _accuse(self, effect: m.Accuse) -> None:
        assert self.machine.view is not None
        self.audits.accuse(effect.finding, self.machine.view.members)

    def _compute(self, effect: m.Compute) -> None:
        self._directive = effect
        self._repair.computing(len(effect.shards))

    def _commit(self, effect: m.Commit) -> None:
        kept = self.gradients.kept
        assert kept is not None and kept.step == effect.step
        self._transfer.desk.withdraw()
        self._catching.desk.clear_away()
        self._directive = effect
        if not effect.received and self.machine.view is not None:
            judged = self.gradients.judged(effect.step)
            self.audits.trusting.committed(effect.step, self.machine.view.members, *judged)
            self.audits.trusting.passed(effect.step, self.gradients.too_few)
        self._repair.committed(self.machine._number(), effect.step)

    def _late(self, effect: Late) -> None:
        caught = self._catching.perform(effect, self._registrations)
        if caught is not None:
            self._queue.append(caught)

    def _end(self, effect: m.End) -> None:
        self._ended = effect

    @property
    def is_over(self) -> bool:
        """It has left, for whatever reason."""
        return self.leaving.over is not None

    def loaded(self, step: int, inspect: Callable[[KeptMean], None], missed: KeptMean | None = None) -> KeptMean:
        """Put the step's mean into the model, and have it looked at. Evicted if its memory was used again meanwhile."""
        kept = missed or self.gradients.kept
        assert kept is not None and kept.step == step
        self._checkpoints.wait_copied()  # the script's lines for the step may change anything
        self._transfer.capture.load(kept)
        inspect(kept)
        if not kept.is_intact():
            self.leaving.leave(m.End("evicted", "the others went on while this worker was away"))
        return kept

    _EFFECTS: ClassVar[dict[type, Callable[[Worker, Any], None]]] = {
        m.Register: lambda worker, effect: worker._feed.register(effect.while_view),
        # Done in leaving.py, after the event log says why: an agent takes a silent disappearance for a hang.
        m.Deregister: lambda worker, effect: None,
        m.Propose: lambda worker, effect: worker._feed.propose(effect.view, effect.expected),
        m.Knock: lambda worker, effect: worker._knocker.knock(effect, worker._registrations),
        m.Publish: lambda worker, effect: worker._feed.publish(effect.roll),
        m.Open: _open,
        m.Drop: _drop_effect,
        m.Broadcast: _broadcast,
        m.Reduce: _reduce,
        m.Give: _give,
        m.Serve: _serve,
        m.Fetch: _fetch,
        m.Restore: lambda worker, effect: worker._checkpoints.search_at(worker._clock()),
        m.Save: _save,
        m.Compute: _compute,
        m.Halt: put_back,
        m.Accuse: _accuse,
        m.Commit: _commit,
        **dict.fromkeys((m.Keep, m.Catch, m.LeftBehind, m.CaughtUp), _late),
        m.End: _end,
    }
