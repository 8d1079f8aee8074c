"""The carrier over connections: one thread at a time at the sockets, and nothing that waits to be sent is forgotten."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from holdfast.core.words import View
from holdfast.horovod.common.exceptions import CollectiveStall
from holdfast.horovod.exchange import engine, standstill
from holdfast.horovod.exchange import handle as handle_module
from holdfast.horovod.exchange.engine import Exchange
from holdfast.horovod.exchange.network import Network
from holdfast.horovod.exchange.records import Record, What, decode_record
from holdfast.horovod.exchange.words import Kind, Request
from holdfast.net.groups import Connection, Gone, Group, Said
from holdfast.trust.keys import create_keys, load_keys
from tests.net.connected_pairs import MEMBERS, tcp_pair, tls_pair

WAIT_S = 20.0
ALL = View(1, MEMBERS)


class Watched(Group):
    """Says when somebody waits in it, and remembers whether another thread came in meanwhile."""

    def __init__(self, me: str) -> None:
        super().__init__(ALL, me, decode_record)
        self.polling = threading.Event()
        self.intruders: list[str] = []

    def poll(self, timeout_s: float) -> list[Said | Gone]:
        if timeout_s > 0:
            self.polling.set()
        try:
            return super().poll(timeout_s)
        finally:
            self.polling.clear()

    def send(self, peer: str, data: bytes) -> Gone | None:
        if self.polling.is_set():
            self.intruders.append(threading.current_thread().name)
        return super().send(peer, data)


class Rank:
    """A carrier with the bell that ends its waits."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.group = Watched(MEMBERS[rank])
        self.group.add(connection)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.group.watch(self._bell)
        self.carrier = Network(ALL, MEMBERS[rank], self.group, wake=self._ring, sort_mail=self._silence)

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _silence(self) -> None:
        if select.select([self._bell], [], [], 0)[0]:
            os.eventfd_read(self._bell)

    def close(self) -> None:
        self.carrier.close()
        os.close(self._bell)


@pytest.fixture(params=["plain", "TLS"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Rank]]:
    if request.param == "TLS":
        create_keys(tmp_path / "keys")
        left, right = tls_pair(load_keys(tmp_path / "keys"))
    else:
        left, right = tcp_pair()
    found = [Rank(0, Connection(MEMBERS[1], left)), Rank(1, Connection(MEMBERS[0], right))]
    yield found
    for rank in found:
        rank.close()


def test_who_publishes_while_another_thread_waits_leaves_the_sockets_to_it(ranks: list[Rank]) -> None:
    """A driver in a poll, and a script that submits from another thread, as an optimizer's hooks do."""
    mine, other = ranks
    with ThreadPoolExecutor(1) as pool:
        for serial in range(1, 4):
            driving = pool.submit(mine.carrier.wait, WAIT_S)
            assert mine.group.polling.wait(WAIT_S)
            assert mine.carrier.publish(Record(What.WAIT, serial))
            driving.result(WAIT_S)  # woken by it, and has sent it
            assert not mine.carrier.unsent
            other.carrier.wait(WAIT_S)
            assert [record.serial for _, record in other.carrier.take()] == [serial]
    assert not mine.group.intruders


def test_what_others_were_not_given_yet_is_sent_though_this_rank_needs_nothing_more(ranks: list[Rank]) -> None:
    """The root of a broadcast is done with it at once, and computes; nobody drives its exchange but the thread."""
    big = torch.arange(4_000_000)
    request = Request(kind=Kind.BROADCAST, name="big", dtypes=("int64",), shapes=((4_000_000,),))
    exchanges = [Exchange(rank.carrier, number, 2) for number, rank in enumerate(ranks)]

    def take() -> torch.Tensor:
        return exchanges[1].synchronize(exchanges[1].submit(request, [torch.empty_like(big)], soon=True)).results[0]

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take)
        try:
            exchanges[0].synchronize(exchanges[0].submit(request, [big], soon=True))
            assert torch.equal(taking.result(WAIT_S), big)
        finally:
            for exchange in exchanges:
                exchange.close()


def test_ranks_that_ask_again_and_again_stand_still_like_those_that_wait(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`while not hvd.poll(handle)` on one rank, and a wait for something else on the other."""
    monkeypatch.setattr(handle_module, "POLLED_S", 0.3)
    monkeypatch.setattr(standstill, "STILL_S", 0.3)
    monkeypatch.setattr(engine, "SAY_WAIT_S", 0.1)
    exchanges = [Exchange(rank.carrier, number, 2) for number, rank in enumerate(ranks)]

    def ask_again_and_again() -> bool:
        mine = exchanges[0].submit(Request(kind=Kind.BARRIER, name="one"))
        until = time.monotonic() + WAIT_S
        while not exchanges[0].poll(mine) and time.monotonic() < until:
            time.sleep(0.01)
        return isinstance(mine.error, CollectiveStall)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_again_and_again)
        try:
            other = exchanges[1].submit(Request(kind=Kind.BARRIER, name="other"), soon=True)
            with pytest.raises(CollectiveStall, match="rank 0 waits for barrier 'one', which rank 1 has not submitted"):
                exchanges[1].synchronize(other)
            assert asking.result(WAIT_S)
        finally:
            for exchange in exchanges:
                exchange.close()


def test_who_asks_now_and_then_is_not_taken_to_wait() -> None:
    asked = handle_module.Handle((0, "", 0), submission=None)  # type: ignore[arg-type]
    assert not any(asked.polled(now) for now in (0.0, 0.1, 0.2, 3.0, 6.0, 9.0, 12.0))
    assert not any(asked.polled(20.0 + number * 0.1) for number in range(50))
    assert asked.polled(25.05)
