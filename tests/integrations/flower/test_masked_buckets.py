"""Masked buckets on Flower: what the server learns, what clients can do to a round, and what a client refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from holdfast.byzantine.agreement.canonical import encode
from holdfast.byzantine.privacy.messages import (
    Advertise,
    Announce,
    Masked,
    Parcels,
    Phase,
    Roster,
    Survivors,
    from_client,
    from_server,
)
from holdfast.byzantine.privacy.noise import Noise
from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ConfigError
from holdfast.integrations.flower import MaskedBuckets, MaskedUpdates, Rounds
from holdfast.integrations.flower.masked_records import PLAIN, RECORD, SAID, said_in
from tests.harness.flower_grid import Client, ScriptedGrid
from tests.integrations.flower.training import InVirtualTime, context, model, tensors, trained

NOISE = Noise(multiplier=1.0, clip=8.0)


def phase_of(message: Message) -> Phase:
    said = said_in(message.content, 1 << 20)
    assert isinstance(said, bytes)
    return {Announce: Phase.ADVERTISE, Roster: Phase.SHARE, Parcels: Phase.MASK, Survivors: Phase.UNMASK}[
        type(from_server(said))
    ]


class Clients:
    """Each a function of its message, as Flower has them. `seen` is all that reached the server."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.seen: list[tuple[int, RecordDict]] = []

    def honest(self, node: int, **settings: Any) -> Client:
        mod = MaskedUpdates(directory=self._place, **settings)

        def client(message: Message) -> Message:
            reply = mod(message, context(node), lambda came, _: Message(trained(came, node), reply_to=came))
            if reply.has_content():
                self.seen.append((node, reply.content))
            return reply

        return client

    def hostile(self, node: int, instead: Callable[[Phase, Message], Message | None]) -> Client:
        """`instead` makes of its honest reply what it sends."""
        honest = self.honest(node)

        def client(message: Message) -> Message | None:
            phase = phase_of(message)
            reply = honest(message)
            return instead(phase, reply)

        return client


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    return Clients(tmp_path / "masked")


def strategy(combiner: MaskedBuckets, **settings: Any) -> InVirtualTime:
    return InVirtualTime(combiner, rounds=Rounds(deadline_s=100.0, late_s=5.0), **settings)


def expected_update(nodes: list[int], round: int = 1) -> dict[str, Any]:
    """The mean of what these clients would send in the open."""
    start = model()
    sums: dict[str, Any] = {}
    for node in nodes:
        content = RecordDict({"arrays": start, "config": ConfigRecord({"server-round": round})})
        made = trained(Message(content, node, "train"), node)["arrays"]
        assert isinstance(made, ArrayRecord)
        for name, array in made.items():
            step = array.numpy().astype("f8") - start[name].numpy().astype("f8")
            sums[name] = sums.get(name, 0.0) + step / len(nodes)
    return sums


# -- what comes out, and what is seen


def test_the_model_moves_by_the_mean_and_the_server_has_seen_nothing_but_masks(clients: Clients) -> None:
    nodes = list(range(1, 8))
    grid = ScriptedGrid({node: clients.honest(node) for node in nodes})
    found = strategy(MaskedBuckets("mean", f=0, buckets=3, limit=4.0)).start(grid, model(), num_rounds=1)
    # Buckets of two and three: the mean of their means is not that of all, so it is only nearly so.
    was, moved, wanted = tensors(model()), tensors(found.arrays), expected_update(nodes)
    for name in ("weight", "bias", "half"):
        step = moved[name].double().numpy() - was[name].double().numpy()
        np.testing.assert_allclose(step, wanted[name], atol=0.2)
    assert moved["seen"].tolist() == was["seen"].tolist(), "whole numbers stay what they are"
    assert len(clients.seen) == 4 * len(nodes)
    for _, content in clients.seen:
        assert list(content) == [RECORD], "no metrics, no arrays in the open"
    answers = [from_client(said_in(content, 1 << 20)) for _, content in clients.seen]  # type: ignore[arg-type]
    sent = [np.frombuffer(one.content, dtype="<u4") for one in answers if isinstance(one, Masked)]
    assert len(sent) == len(nodes) and len({bytes(one) for one in sent}) == len(nodes)
    assert not found.train_metrics_clientapp


def test_with_one_bucket_the_sum_is_exact(clients: Clients) -> None:
    nodes = [3, 5, 9]
    grid = ScriptedGrid({node: clients.honest(node) for node in nodes})
    found = strategy(MaskedBuckets("mean", f=0, buckets=1, limit=4.0)).start(grid, model(), num_rounds=1)
    step = tensors(found.arrays)["weight"].double().numpy() - tensors(model())["weight"].double().numpy()
    np.testing.assert_allclose(step, expected_update(nodes)["weight"], atol=1e-6)


def test_hostile_clients_spoil_their_buckets_and_not_the_model(clients: Clients) -> None:
    class Shouting(MaskedUpdates):
        def numbers(self, update: Any, terms: Terms, members: int) -> Any:
            return terms.encoding.encode(np.full(update.shape, -terms.encoding.limit))

    shouting = [9, 10]
    grid = ScriptedGrid({node: clients.honest(node) for node in range(1, 11)})
    for node in shouting:
        mod = Shouting(directory=clients._place)
        grid.clients[node] = lambda message, mod=mod, node=node: mod(  # type: ignore[misc]
            message, context(node), lambda came, _: Message(trained(came, node), reply_to=came)
        )
    robust = strategy(MaskedBuckets("trimmed-mean", f=2))
    found = robust.start(grid, model(), num_rounds=6)
    step = tensors(found.arrays)["weight"] - tensors(model())["weight"]
    assert (step > 0.7 * 6).all(), "six steps of about one"
    suspect = {node: robust.book.standings[node].left_out for node in grid.clients}
    assert min(suspect[node] for node in shouting) >= 5, "their bucket is left out, whoever is in it with them"


# -- what a client can do to a round


def plain(data: bytes, *, stype: str = PLAIN, name: str = SAID) -> RecordDict:
    return RecordDict({RECORD: ArrayRecord({name: Array("uint8", (len(data),), stype, data)})})


KINDS: dict[str, tuple[RecordDict, str]] = {
    "no record": (RecordDict(), "it has no record 'holdfast.masked'"),
    "another record": (RecordDict({RECORD: ConfigRecord({"said": b"x"})}), "it has no record"),
    "two arrays": (
        RecordDict({RECORD: ArrayRecord({"said": Array("uint8", (0,), PLAIN, b""), "b": Array(np.ones(1))})}),
        "2 arrays of other names",
    ),
    "another name": (plain(b"x", name="told"), "1 arrays of other names"),
    "an array of numbers": (plain(b"x", stype="numpy.ndarray"), "serialized as 'numpy.ndarray'"),
    "too much": (plain(bytes(1 << 20)), "are the most"),
    "nothing": (plain(b""), "bytes that encode nothing"),
    "no message": (plain(b"hello"), "bytes that encode nothing"),
    "a message of the server's": (plain(encode(Survivors(("1",)))), "a message 'Survivors'"),
    "another phase's": (plain(encode(Advertise(b"", b"", b""))), "it advertised two sets|are no keys"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", [Phase.ADVERTISE, Phase.SHARE, Phase.MASK, Phase.UNMASK])
def test_a_malformed_answer_costs_its_sender_its_place(
    clients: Clients, caplog: pytest.LogCaptureFixture, kind: str, phase: Phase
) -> None:
    content, sentence = KINDS[kind]

    def instead(now: Phase, reply: Message) -> Message:
        if now is phase:
            reply.content = content
        return reply

    grid = ScriptedGrid({node: clients.honest(node) for node in range(1, 10)})
    grid.clients[9] = clients.hostile(9, instead)
    robust = strategy(MaskedBuckets("trimmed-mean", f=1))
    found = robust.start(grid, model(), num_rounds=1)
    step = tensors(found.arrays)["weight"] - tensors(model())["weight"]
    assert (step > 0.7).all(), "the round went on"
    assert robust.book.standings[9].malformed == 1
    (line,) = [one.message for one in caplog.records if "without client 9" in one.message]
    assert re.search(sentence, line), line
    assert all(robust.book.standings[node].malformed == 0 for node in range(1, 9))


@pytest.mark.parametrize("phase", [Phase.ADVERTISE, Phase.SHARE, Phase.MASK, Phase.UNMASK])
@pytest.mark.parametrize("way", ["silent", "error"])
def test_clients_that_drop_out_in_any_phase_hold_nobody_up(clients: Clients, phase: Phase, way: str) -> None:
    def instead(now: Phase, reply: Message) -> Message | None:
        if now < phase:
            return reply
        return None if way == "silent" else Message(Error(2, "gone"), reply_to=Message(RecordDict(), 9, "train"))

    grid = ScriptedGrid({node: clients.honest(node) for node in range(1, 10)})
    grid.clients[9] = clients.hostile(9, instead)
    robust = strategy(MaskedBuckets("trimmed-mean", f=1))
    found = robust.start(grid, model(), num_rounds=1)
    assert ((tensors(found.arrays)["weight"] - tensors(model())["weight"]) > 0.7).all()
    assert grid.now_s < 30.0, "the missing one was waited for shortly"
    assert robust.book.standings[9].strikes == 1 and robust.book.standings[9].malformed == 0


def test_a_round_with_too_few_buckets_left_leaves_the_model_as_it_was(
    clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    def dies(node: int) -> Client:
        honest = clients.honest(node)
        return lambda message: None if phase_of(message) is Phase.MASK else honest(message)

    grid = ScriptedGrid({node: clients.honest(node) for node in range(1, 11)})
    grid.clients |= {node: dies(node) for node in (1, 2, 3)}  # of two buckets at least
    robust = strategy(MaskedBuckets("trimmed-mean", f=2))
    found = robust.start(grid, model(), num_rounds=1)
    told = "\n".join(one.message for one in caplog.records)
    assert tensors(found.arrays)["weight"].tolist() == tensors(model())["weight"].tolist()
    assert "round 1 is left out, and the model stays as it was" in told
    assert re.search(r"needs 5 buckets, and [23] are left: bucket \d is lost: [01] of 2 are left", told), told
    assert {node: one.strikes for node, one in robust.book.standings.items() if one.strikes} == {1: 1, 2: 1, 3: 1}
    assert robust.combiner.state_dict() == {"opened": 1}, "sums of the others were seen"


# -- privacy's cost, checkpoints, and what is refused at once


def test_every_round_says_what_it_has_cost_and_a_restart_counts_one_more(clients: Clients, tmp_path: Path) -> None:
    place = str(tmp_path / "state")

    def run(rounds: int) -> tuple[Any, MaskedBuckets]:
        grid = ScriptedGrid({node: clients.honest(node, noise=NOISE) for node in range(1, 7)})
        combiner = MaskedBuckets("trimmed-mean", f=1, noise=NOISE)
        return strategy(combiner, checkpoints=place).start(grid, model(), num_rounds=rounds), combiner

    found, _ = run(2)
    epsilons = [found.train_metrics_clientapp[number]["epsilon"] for number in (1, 2)]
    assert 0.0 < epsilons[0] < epsilons[1]
    for path in clients._place.glob("*"):
        path.unlink()  # for Flower, a server app that is started again is a new run
    found, combiner = run(3)
    assert combiner.state_dict() == {"opened": 4}, "three rounds, and one that the first server may have opened"
    assert found.train_metrics_clientapp[3]["epsilon"] == combiner._accountant.epsilon(4)  # type: ignore[union-attr]


def test_what_cannot_be_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="2 hostile clients spoil up to 2 buckets, and trimmed-mean with f=2 needs 5"):
        MaskedBuckets("trimmed-mean", f=2, buckets=4)
    with pytest.raises(ConfigError, match="is not a number of clients"):
        MaskedBuckets("median", f=-1)
    with pytest.raises(ConfigError, match="moves no model"):
        MaskedBuckets("median", f=1, server_lr=0.0)
    with pytest.raises(ConfigError, match="needs 10 clients, and 9 are asked"):
        InVirtualTime(MaskedBuckets("trimmed-mean", f=2), rounds=Rounds(clients=9))
    with pytest.raises(ConfigError, match="do not fit into 32 bits"):
        MaskedBuckets("median", f=1, limit=1e30)
