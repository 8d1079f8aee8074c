"""A worker's way to the parameter servers over the network: port.ParameterServers. See asking.py for who is asked.

The worker's thread puts updates and reads together, a request for each slice; the thread of `Asking` moves them. A
gradient that is to be copied goes into memory that is used again for the next update, so a worker needs as much as its
gradients for each update that is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import ConfigError, DivergedError, LedgerError, PeerError
from holdfast.core.words import KEY_SLICE, KEY_SLICES, decode_json, encode_json
from holdfast.ledger.port import Ledger
from holdfast.servers.asking import Ask, Asking
from holdfast.servers.compressing import Compressor
from holdfast.servers.cutting import Cutting, fingerprint, slices_of
from holdfast.servers.frames import Head
from holdfast.servers.gathering import Wanted, gather
from holdfast.servers.log_codec import decode_configuration, encode_configuration
from holdfast.servers.parameter_slice import captured_clocks, captured_pieces, join_head
from holdfast.servers.placing import first_placement
from holdfast.servers.port import Initial, Layout, Piece, Versions
from holdfast.servers.recipe import Settings
from holdfast.servers.replicated import Answer, Payload
from holdfast.servers.slicing import Segment, Slice
from holdfast.servers.wires import shared_memory_bytes
from holdfast.trust.keys import Keys

CREATING_S = 10.0  # a creator that has not finished after this is taken for gone
READ_WAIT_S = 1.0  # a read waits so long on a server until it is asked again
LOOK_S = 0.02
ROOM_S = 5.0  # a server that has not said whether it has room after this is not waited for
DROP_S = 5.0  # to tell servers that a capture is not needed any more; they drop it by themselves after a while
NAMED_MAX = 3  # slices that a sentence names
SKIP: Head = {"kind": "skip"}


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    servers: int = 1  # that are waited for before slices are created; 0: those that the run's hosts have
    replicas: int = 1  # of each slice; 0: the usual number
    slices: int | None = None  # None: as many as their size asks for
    updates_max: int = 2  # under way at once
    patience_s: float = 120.0
    share_memory: bool = True  # with servers of the same host

    @property
    def wanted(self) -> Wanted:
        return Wanted(servers=self.servers, replicas=self.replicas)


class RemoteTicket:
    """Done when every slice has answered. `finish` is called then, in the thread that asks."""

    def __init__(self, slices: int, finish: Callable[[], None] = lambda: None) -> None:
        self._left = slices
        self._finish = finish
        self._versions = [0] * slices
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._asks: dict[int, Ask] = {}  # that have no answer

    @property
    def done(self) -> bool:
        return not self._left

    def asks(self, asks: Sequence[Ask]) -> list[Ask]:
        """These, a slice each, are what it is done with."""
        self._asks = dict(enumerate(asks))
        return list(asks)

    def waits_for(self) -> str:
        with self._changed:
            asks = list(self._asks.values())
        named = [f"{ask.slice} ({ask.why})" if ask.why else ask.slice for ask in asks[:NAMED_MAX]]
        return ", ".join([*named, "others"] if len(asks) > NAMED_MAX else named)

    def answered(self, number: int, version: int, error: Exception | None = None) -> None:
        with self._changed:
            self._versions[number] = version
            self._asks.pop(number, None)
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
            self._finish()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> Versions:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left, timeout_s):
                raise TimeoutError(f"{self._left} slices have not answered within {timeout_s:g} s")
            if self._error is not None:
                raise self._error
            return tuple(self._versions)


class RemoteServers:
    """`worker` has no incarnation in it, as `run_facts.author_of` gives it. `open_ledger` is called for each user."""

    def __init__(
        self,
        worker: str,
        incarnation: int,
        host: str,
        keys: Keys,
        open_ledger: Callable[[], Ledger],
        settings: ClientSettings | None = None,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._settings = settings or ClientSettings()
        self._open_ledger = open_ledger
        self._asking = Asking(f"{worker}.{incarnation}", host, keys, open_ledger, patience_s=self._settings.patience_s)
        self._cutting: Cutting | None = None
        self._sequence = 0
        self._captures = 0
        self._under_way = threading.Semaphore(self._settings.updates_max)
        self._stages: list[list[torch.Tensor | None]] = []

    @property
    def cutting(self) -> Cutting:
        assert self._cutting is not None, "open comes first"
        return self._cutting

    @property
    def moved_bytes(self) -> int:
        """Over sockets so far, sent and received."""
        return self._asking.moved_bytes

    def close(self) -> None:
        self._asking.close()

    # ---- beginning

    def open(self, layout: Layout, initial: Initial, *, timeout_s: float) -> bool:
        give_up = time.monotonic() + timeout_s
        if self._settings.servers and self._settings.replicas > self._settings.servers:
            raise ConfigError(
                f"{self._settings.replicas} replicas of each slice need as many servers, and the run has "
                f"{self._settings.servers}",
                hint=f"start more servers, or give --replicas {self._settings.servers}",
            )
        ledger = self._open_ledger()
        try:
            plan, creator = self._agree(ledger, layout, give_up)
            self._cutting = Cutting(layout, plan["slices"])
            if self._settings.share_memory:  # only what is touched of it is there
                largest = max(one.nbytes(layout.sizes) for one in self._cutting.slices)
                self._asking.shared_bytes = shared_memory_bytes(largest)
            self._place(ledger, plan)
            if creator:
                self._create(ledger, initial, give_up)
                return True
            while not self._is_created(give_up):
                if time.monotonic() > give_up:
                    raise PeerError(f"the slices were not created within {timeout_s:g} s by {plan['creator']}")
                if time.time() - plan["began"] > CREATING_S:
                    self._create(ledger, initial, give_up)
                    return True
                time.sleep(LOOK_S)
            return False
        finally:
            ledger.close()

    def _agree(self, ledger: Ledger, layout: Layout, give_up: float) -> tuple[dict[str, Any], bool]:
        """How the parameters are cut: what the ledger has, or what this worker has put there."""
        mark, wanted, began = fingerprint(layout), self._settings.wanted, time.monotonic()
        while True:
            try:
                entry = ledger.get(KEY_SLICES)
                if entry is not None:
                    plan = decode_json(entry.value)
                    if plan.get("fingerprint") != mark:
                        raise ConfigError(
                            "the run has other parameters or optimizers than this worker",
                            hint="every worker of a run must build the same model and the same optimizers",
                        )
                    return plan, False
                present = gather(ledger)
                if wanted.are_enough(present):
                    slices = self._settings.slices or slices_of(layout, len(present.hosts))
                    plan = {
                        "slices": slices,
                        "fingerprint": mark,
                        "creator": f"{self._worker}.{self._incarnation}",
                        "began": time.time(),
                    }
                    if ledger.compare_and_set(KEY_SLICES, encode_json(plan), expected=0) is not None:
                        return plan, True
                    continue
            except LedgerError:
                present = None
            if time.monotonic() > give_up:
                raise wanted.too_few(present, time.monotonic() - began)
            time.sleep(LOOK_S)

    def _place(self, ledger: Ledger, plan: Mapping[str, Any]) -> None:
        """Where no one has placed a slice yet, place it."""
        placed = {entry.key for entry in ledger.read(KEY_SLICE).entries}
        missing = [one for one in self.cutting.slices if KEY_SLICE + name_of(one) not in placed]
        if not missing:
            return
        present = gather(ledger)
        replicas = self._settings.wanted.replicas_of(present)
        placement = first_placement(present.hosts, len(self.cutting.slices), replicas)
        for one in missing:
            value = encode_json(encode_configuration(placement[one.number]))
            ledger.compare_and_set(KEY_SLICE + name_of(one), value, expected=0)

    def _create(self, ledger: Ledger, initial: Initial, give_up: float) -> None:
        self._sequence += 1
        placed = {entry.key: decode_configuration(decode_json(entry.value)) for entry in ledger.read(KEY_SLICE).entries}
        for one in self.cutting.slices:  # one after the other: no more than a slice is copied at a time
            payload = self.cutting.initial(one, initial)
            configuration = placed.get(KEY_SLICE + name_of(one))
            if configuration is not None:
                self._check_room(one, payload, configuration.replicas)
            ticket = RemoteTicket(1)
            self._asking.submit([self._push_ask(one, payload, ticket, place=0)])
            ticket.wait(max(0.1, give_up - time.monotonic()))

    def _check_room(self, one: Slice, payload: Answer, replicas: Sequence[str]) -> None:
        """ConfigError if one of the servers that are to have this slice has no memory for it, and says so."""
        ticket = RemoteTicket(len(replicas))
        head = {"op": "room", "payload": payload.head, "nbytes": sum(view.nbytes for view in payload.views)}

        def ask(number: int, server: str) -> Ask:
            def failed(error: Exception) -> None:
                ticket.answered(number, 0, error if isinstance(error, ConfigError) else None)

            deadline = time.monotonic() + ROOM_S
            done: Callable[[Ask, Head], None] = lambda ask, head: ticket.answered(number, 0)  # noqa: E731
            return Ask(name_of(one), head, (), done, failed, at=server, deadline=deadline)

        self._asking.submit([ask(number, server) for number, server in enumerate(replicas)])
        with suppress(TimeoutError):
            ticket.wait(2 * ROOM_S)

    def _is_created(self, give_up: float) -> bool:
        return all(head["created"] for head in self._query({"kind": "clocks"}, give_up))

    def join(self, clock: int | None = None) -> int:
        if clock is None:
            clock = min(self.clocks().values(), default=0)
        self._sequence += 1
        ticket = RemoteTicket(len(self.cutting.slices))
        head = Answer(join_head(clock))
        self._asking.submit([self._push_ask(one, head, ticket) for one in self.cutting.slices])
        ticket.wait(self._settings.patience_s)
        return clock

    # ---- updates

    def push(
        self,
        gradients: Sequence[torch.Tensor | None],
        settings: Sequence[Settings],
        *,
        clock: int,
        copy: bool = True,
        compressor: Compressor | None = None,
    ) -> RemoteTicket:
        if not self._under_way.acquire(timeout=self._settings.patience_s):
            raise PeerError("no server has taken the updates before this one")
        self._sequence += 1
        flat = [None if one is None else one.detach().reshape(-1) for one in gradients]
        stage: list[torch.Tensor | None] | None = None
        if compressor is not None and not compressor.takes(flat):
            compressor = None
        if copy and compressor is None:
            stage = self._stages.pop() if self._stages else [None] * len(flat)
            flat = [_copied(stage, number, one) for number, one in enumerate(flat)]

        def finish() -> None:
            if stage is not None:
                self._stages.append(stage)
            self._under_way.release()

        ticket = RemoteTicket(len(self.cutting.slices), finish)
        updates = [(one, self.cutting.update(one, flat, settings, clock, compressor)) for one in self.cutting.slices]
        self._asking.submit(ticket.asks([self._push_ask(one, update, ticket) for one, update in updates]))
        return ticket

    def _push_ask(self, one: Slice, payload: Answer, ticket: RemoteTicket, place: int | None = None) -> Ask:
        number = one.number if place is None else place
        author = {"worker": self._worker, "incarnation": self._incarnation, "sequence": self._sequence}

        def failed(error: Exception) -> None:
            if not isinstance(error, DivergedError):
                ticket.answered(number, 0, error)
                return
            # Its place in the order stays empty: say so, or what comes behind it is taken for what is too early.
            named = DivergedError(self._named(error.message))
            nothing = Ask(
                name_of(one),
                {"op": "push", "payload": SKIP, **author},
                (),
                lambda ask, head: ticket.answered(number, 0, named),
                lambda other: ticket.answered(number, 0, named),
            )
            self._asking.submit([nothing])

        return Ask(
            name_of(one),
            {"op": "push", "payload": payload.head, **author},
            payload.views,
            lambda ask, head: ticket.answered(number, int(head["version"])),
            failed,
        )

    def _named(self, message: str) -> str:
        """The parameter by its name, where the server has only its number."""
        before, found, rest = message.partition("of parameter ")
        number, _, after = rest.partition(" ")
        if not found or not number.isdecimal() or int(number) >= len(self.cutting.layout.names):
            return message
        return f"{before}{found}{self.cutting.layout.names[int(number)]} {after}"

    # ---- reads

    def pull(
        self,
        into: Sequence[torch.Tensor],
        *,
        at_least: Versions | None = None,
        clock_floor: int | None = None,
    ) -> RemoteTicket:
        flat = [one.detach().view(-1) for one in into]

        def ask(one: Slice, ticket: RemoteTicket) -> Ask:
            query = {"kind": "pull", "clock_floor": max(0, clock_floor or 0)}
            if at_least is not None:
                query["at_least"] = at_least[one.number]
            head = {"op": "read", "fresh": at_least is None, "query": query, "wait_s": READ_WAIT_S}
            return Ask(
                name_of(one),
                head,
                (),
                lambda ask, head: ticket.answered(one.number, int(head["answer"]["version"])),
                lambda error: ticket.answered(one.number, 0, error),
                into=self.cutting.destinations(one, flat),
                anywhere=at_least is not None,
            )

        return self._ask_all(ask)

    def _ask_all(self, ask: Callable[[Slice, RemoteTicket], Ask]) -> RemoteTicket:
        ticket = RemoteTicket(len(self.cutting.slices))
        self._asking.submit(ticket.asks([ask(one, ticket) for one in self.cutting.slices]))
        return ticket

    def clocks(self) -> Mapping[str, int]:
        return dict(self._query({"kind": "clocks"}, time.monotonic() + self._settings.patience_s)[0]["clocks"])

    def _query(self, query: Head, give_up: float) -> list[Head]:
        head = {"op": "read", "fresh": True, "query": query, "wait_s": READ_WAIT_S}
        return [answer["answer"] for answer in self._ask_each(head, give_up)]

    def capture(self, *, timeout_s: float) -> RemoteCapture:
        """PeerError if servers fail all the time until then. It has to be read until then, too."""
        give_up = time.monotonic() + timeout_s
        while True:
            self._captures += 1
            token = f"{self._worker}.{self._incarnation}:{self._captures}"
            try:
                return self._capture(token, give_up)
            except (PeerError, TimeoutError) as error:
                self.drop_capture(token)
                if time.monotonic() > give_up:
                    raise PeerError(f"the slices could not be captured within {timeout_s:g} s: {error}") from error
                time.sleep(LOOK_S)

    def _capture(self, token: str, give_up: float) -> RemoteCapture:
        newest: dict[tuple[str, int], int] = {}
        for head in self._ask_each({"op": "hold", "token": token}, give_up):
            for worker, incarnation, sequence in head["newest"]:
                newest[worker, incarnation] = max(sequence, newest.get((worker, incarnation), 0))
        limits = [[worker, incarnation, sequence] for (worker, incarnation), sequence in newest.items()]
        heads = self._ask_each({"op": "capture", "token": token, "limits": limits}, give_up)
        return RemoteCapture(self, token, heads, give_up)

    def captured_slice(self, number: int, token: str, give_up: float) -> memoryview:
        """The bytes of one slice of a capture. PeerError if its server is gone, or says nothing until then."""
        bodies: list[memoryview] = []

        def done(ask: Ask, head: Head) -> None:
            bodies.append(ask.body)
            ticket.answered(0, 0)

        ticket, one = RemoteTicket(1), self.cutting.slices[number]
        head = {"op": "captured", "token": token}
        self._asking.submit([Ask(name_of(one), head, (), done, lambda error: ticket.answered(0, 0, error))])
        try:
            ticket.wait(max(0.1, give_up - time.monotonic()))
        except TimeoutError as error:
            raise PeerError(f"what was captured of {name_of(one)} did not come in time") from error
        return bodies[0]

    def drop_captured(self, number: int, token: str) -> None:
        """This slice has been read: its server need not keep it until the others are. Nobody waits for that."""
        head = {"op": "captured", "token": token, "drop": True}
        name, deadline = name_of(self.cutting.slices[number]), time.monotonic() + DROP_S
        self._asking.submit([Ask(name, head, (), lambda ask, head: None, lambda error: None, deadline=deadline)])

    def drop_capture(self, token: str) -> None:
        with suppress(PeerError, TimeoutError):
            self._ask_each({"op": "captured", "token": token, "drop": True}, time.monotonic() + DROP_S)

    def _ask_each(self, head: Head, give_up: float) -> list[Head]:
        """The same of all slices; their answers, without a body."""
        heads: list[Head] = [{} for _ in self.cutting.slices]

        def ask(one: Slice, ticket: RemoteTicket) -> Ask:
            def done(ask: Ask, answer: Head) -> None:
                heads[one.number] = answer
                ticket.answered(one.number, 0)

            return Ask(name_of(one), head, (), done, lambda error: ticket.answered(one.number, 0, error))

        self._ask_all(ask).wait(max(0.1, give_up - time.monotonic()))
        return heads

    def retire(self, worker: str, incarnation: int) -> None:
        head = {"op": "retire", "worker": worker, "incarnation": incarnation}
        self._ask_each(head, time.monotonic() + self._settings.patience_s)


class RemoteCapture:
    """port.Capture. Its slices are read from the servers that captured them, once; if one of these ends, it is
    PeerError."""

    def __init__(self, servers: RemoteServers, token: str, heads: Sequence[Head], give_up: float) -> None:
        self._servers = servers
        self._token = token
        self._heads = heads
        self._give_up = give_up
        self.versions: Versions = tuple(int(head["version"]) for head in heads)
        self.clocks: Mapping[str, int] = captured_clocks(heads[0]["state"])

    def pieces(self) -> Iterator[tuple[Segment, Piece]]:
        for number, head in enumerate(self._heads):
            body = self._servers.captured_slice(number, self._token, self._give_up)
            self._servers.drop_captured(number, self._token)
            yield from captured_pieces(Payload(head["state"], body))

    def close(self) -> None:
        self._servers.drop_capture(self._token)


def name_of(one: Slice) -> str:
    return f"parameters/{one.number}"


def _copied(stage: list[torch.Tensor | None], number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    kept = stage[number]
    if kept is None:
        kept = stage[number] = torch.empty_like(gradient)
    kept.copy_(gradient)
    return kept
