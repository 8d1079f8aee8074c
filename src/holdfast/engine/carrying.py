"""Process groups of torch that carry a run's gradients: built for each view beside the training, given up with it.

The loop's thread owns this. A thread builds the group of a view and puts into the mailbox what it has for the other
members' stores, and that it stands; another one ends the group of a view that is over, and nobody waits for either. A
group whose end does not come holds its peers' sockets, or a device: this worker is replaced then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holdfast.core.errors import ConfigError
from holdfast.core.words import View
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.codec import encode
from holdfast.net.groups import Gone, Group
from holdfast.net.kernel import Kernel
from holdfast.net.mailbox import Mailbox
from holdfast.reduce.carrier import BUILD_S, Carrier, CarrierFailed, library_for, open_backend, prefixed

if TYPE_CHECKING:
    from holdfast.reduce.view_store import ViewStore

POLL_S = 0.001
END_S = 60.0  # beyond the library's own patience with a peer that does not answer
FAILURES_MAX = 3  # in a row: then this worker builds no more


@dataclass(frozen=True)
class CarrierNews:
    """From a thread of this module: a value for the others' stores (`key`), a group that stands, or `why` not."""

    view: int
    key: str = ""
    value: bytes = b""
    stands: bool = False
    why: str = ""
    stuck: bool = False  # a group's end does not come


class _Attempt:
    """The group of one view, from its beginning to its end. A lock is between who builds it and who ends it."""

    def __init__(self, view: View, store: ViewStore, kernel: Kernel) -> None:
        self.view = view
        self.store = store
        self.carrier: Carrier | None = None
        self.stands = False
        self.began = kernel.now()
        self._kernel = kernel
        self._lock = kernel.condition()
        self._over = False

    def built(self, carrier: Carrier) -> None:
        with self._lock:
            if self._over:
                raise CarrierFailed("the view is over")
            self.carrier = carrier

    @property
    def patience_s(self) -> float:
        """How long its library may wait for a peer: at least until its largest move has failed."""
        return self.carrier.patience_s if self.carrier is not None else BUILD_S

    def end(self) -> None:
        """May wait for a peer for as long as the library does."""
        self.store.close()
        with self._lock:
            self._over = True
            held = self.carrier.surrender() if self.carrier is not None else []
        if held and (abort := getattr(held[0], "abort", None)) is not None:
            abort()
        while held:
            held.pop()


class ProcessGroups:
    """See the module."""

    def __init__(
        self,
        me: str,
        kernel: Kernel,
        mailbox: Mailbox,
        events: EventLog,
        *,
        device: torch.device | None,
        address: str,
    ) -> None:
        """`device`: where the gradients are; None: in this process's memory. `address`: where gloo listens."""
        self.replace_me: Callable[[str], object] = lambda reason: None
        self._me = me
        self._kernel = kernel
        self._put = mailbox.put
        self._events = events
        self._library, self._device = library_for(device)
        self._address = address
        self._attempt: _Attempt | None = None
        self._early: list[m.Stored] = []  # said by peers before I began
        self._failures = 0

    # ---- what the path asks (reduce/carrier.py)

    @property
    def carrier(self) -> Carrier | None:
        attempt = self._attempt
        return attempt.carrier if attempt is not None and attempt.stands else None

    def open(self, view: View) -> None:
        if self._attempt is not None or len(view.members) < 2 or self._failures >= FAILURES_MAX:
            return
        from holdfast.reduce.view_store import ViewStore  # which there is not in every build of torch

        store = ViewStore(lambda key, value: self._put(CarrierNews(view.number, key, value)), self._kernel, BUILD_S)
        for message in self._early:
            store.heard(message.key, message.value)
        attempt = self._attempt = _Attempt(view, store, self._kernel)
        self._kernel.start("holdfast-process-group", partial(self._build, attempt))

    def close(self) -> None:
        attempt, self._attempt, self._early = self._attempt, None, []
        if attempt is None:
            return
        over = self._kernel.event()
        self._kernel.start("holdfast-process-group-end", partial(_end, attempt, over.set))
        self._kernel.start("holdfast-process-group-watch", partial(self._watch, attempt, over))

    def worked(self) -> None:
        self._failures = 0

    def failed(self, why: str) -> None:
        self._count_failure(f"its process group has failed: {why}")

    # ---- what the loop hears

    def heard(self, message: m.Stored) -> None:
        """A peer has set something, in this view."""
        if self._attempt is not None:
            self._attempt.store.heard(message.key, message.value)
        elif len(self._early) < m.STORED_MAX:
            self._early.append(message)

    def take(self, news: CarrierNews, group: Group | None) -> list[m.PeerLost]:
        """What a thread of this module has put into the mailbox. Whom that shows to be gone."""
        if news.stuck:
            self.replace_me(news.why)
        attempt = self._attempt
        if attempt is None or attempt.view.number != news.view:
            return []
        if news.key:
            lost = group.broadcast(encode(m.Stored(news.key, news.value))) if group is not None else []
            return [_lost(news.view, gone) for gone in lost]
        if news.stands:
            attempt.stands = True
            took_s = round(self._kernel.now() - attempt.began, 4)
            self._events.write("carried", view=news.view, library=self._library, duration_s=took_s)
        else:
            self._count_failure(f"there is no process group for view {news.view}: {news.why}")
        return []

    def _count_failure(self, text: str) -> None:
        self._failures += 1
        end = "none is built any more" if self._failures >= FAILURES_MAX else "steps go without"
        self._events.write("warning", text=f"{text}; {end}")

    # ---- threads

    def _build(self, attempt: _Attempt) -> None:
        view = attempt.view
        rank, count = view.rank(self._me), len(view.members)
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            store = prefixed(attempt.store, f"view-{view.number}")
            backend = open_backend(self._library, store, rank, count, self._address)
            attempt.built(Carrier(backend, rank, count, self._device))
            del backend
            self._try_out(attempt)
        except Exception as error:  # whatever a library raises
            self._put(CarrierNews(view.number, why=str(error).partition("\n")[0][:300] or type(error).__name__))
        else:
            self._put(CarrierNews(view.number, stands=True))

    def _try_out(self, attempt: _Attempt) -> None:
        """Some libraries connect when they are first used, and wait for all others then."""
        carrier = attempt.carrier
        assert carrier is not None
        until = self._kernel.now() + BUILD_S
        mine = torch.full((64,), carrier.rank % 251, dtype=torch.uint8)
        move = carrier.all_gather(mine)
        while not move.is_done():
            if self._kernel.now() > until:
                raise CarrierFailed(f"nothing came within {BUILD_S:.0f} s")
            self._kernel.sleep(POLL_S)
        if move.arrived[::64].tolist() != [rank % 251 for rank in range(carrier.count)]:
            raise CarrierFailed("it moves other bytes than it is given")

    def _watch(self, attempt: _Attempt, over: Any) -> None:
        if not over.wait(attempt.patience_s + END_S):
            view = attempt.view.number
            why = f"the process group of view {view} does not end, and holds what it has"
            self._put(CarrierNews(view, why=why, stuck=True))


def _end(attempt: _Attempt, over: Callable[[], None]) -> None:
    attempt.end()
    over()


def _lost(view: int, gone: Gone) -> m.PeerLost:
    return m.PeerLost(view, gone.peer, gone.reason)


def process_groups(
    me: str, kernel: Kernel, mailbox: Mailbox, events: EventLog, device: torch.device | None, address: str
) -> ProcessGroups:
    """ConfigError where there can be none."""
    if not dist.is_available():
        raise ConfigError(
            f"--path process-group needs torch.distributed, and torch {torch.__version__} was built without it",
            hint="leave --path out, or install a build of torch that has it",
        )
    return ProcessGroups(me, kernel, mailbox, events, device=device, address=address)
