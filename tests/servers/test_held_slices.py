"""A worker leaves while slices are captured: its last update is in all of them or in none."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from holdfast.core.words import KEY_WORKERS
from holdfast.ledger.memory import MemoryLedger
from holdfast.servers.asking import Ask
from holdfast.servers.client import RemoteCapture, RemoteServers, RemoteTicket, name_of
from holdfast.servers.server import SliceServer
from tests.agent.agent_harness import wait_for
from tests.servers.serving import in_threads
from tests.servers.test_port import WAIT_S, Worker

TOKEN = "w0.1:by hand"


def hold(servers: RemoteServers, number: int) -> dict[tuple[str, int], int]:
    """What this slice alone has taken, and takes no more."""
    heads: list[dict[str, list[tuple[str, int, int]]]] = []
    ticket, one = RemoteTicket(1), servers.cutting.slices[number]

    def done(ask: Ask, head: dict[str, list[tuple[str, int, int]]]) -> None:
        heads.append(head)
        ticket.answered(0, 0)

    asked = {"op": "hold", "token": TOKEN}
    servers._asking.submit([Ask(name_of(one), asked, (), done, lambda error: ticket.answered(0, 0, error))])
    ticket.wait(WAIT_S)
    return {(worker, incarnation): last for worker, incarnation, last in heads[0]["newest"]}


def versions(servers: RemoteServers) -> list[int]:
    return [head["version"] for head in servers._query({"kind": "clocks"}, time.monotonic() + WAIT_S)]


def test_a_worker_that_is_gone_is_forgotten_after_the_capture() -> None:
    ledger, running = MemoryLedger(), list[SliceServer]()
    with in_threads(2, ledger=ledger, running=running) as connect, ThreadPoolExecutor() as pool:
        first, leaving = Worker(connect, "w0", momentum=0.0), Worker(connect, "w1", momentum=0.0)
        first.open()
        leaving.open()
        leaving.servers.join(0)
        ledger.put(KEY_WORKERS + "w1.1", b"{}")
        servers = first.servers
        assert isinstance(servers, RemoteServers)
        taken = hold(servers, 0)
        pushing = pool.submit(leaving.push, 1.0, 1)
        wait_for(lambda: versions(servers) == [0, 1], "the update to be in the slice that is not held", WAIT_S)
        newest = hold(servers, 1)
        assert newest["w1", 1] == taken["w1", 1] + 1
        ledger.delete(KEY_WORKERS + "w1.1")
        wait_for(lambda: all(("w1", 1) in server.facts.gone for server in running), "the news", WAIT_S)
        turns = {server.me: server._next_tick for server in running}
        wait_for(lambda: all(server._next_tick > turns[server.me] for server in running), "a tick of each", WAIT_S)
        limits = [[worker, incarnation, last] for (worker, incarnation), last in newest.items()]
        heads = servers._ask_each({"op": "capture", "token": TOKEN, "limits": limits}, time.monotonic() + WAIT_S)
        captured = RemoteCapture(servers, TOKEN, heads, time.monotonic() + WAIT_S)
        assert captured.versions == (1, 1)
        assert captured.clocks == {"w1": 1}
        assert pushing.result(WAIT_S) == (1, 1)
        wait_for(lambda: not servers.clocks(), "it to be forgotten", WAIT_S)


def test_what_was_captured_of_a_slice_is_given_up_when_it_has_been_read() -> None:
    running = list[SliceServer]()
    with in_threads(2, running=running) as connect:
        worker = Worker(connect, "w0", momentum=0.0)
        worker.open()

        def kept() -> list[str]:
            replicas = [one for server in running for one in server.replicas.values()]
            return sorted(one.name for one in replicas if one.capturing._kept)

        captured = worker.servers.capture(timeout_s=WAIT_S)
        assert kept() == ["parameters/0", "parameters/1"]
        pieces = captured.pieces()
        next(pieces)
        wait_for(lambda: kept() == ["parameters/1"], "the first slice's copy to be given up", WAIT_S)
        list(pieces)
        wait_for(lambda: not kept(), "the other's", WAIT_S)
