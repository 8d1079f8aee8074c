"""A client of masked rounds on Flower: what it answers, and what it refuses a server that asks for more than it may."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from holdfast.byzantine.agreement.canonical import encode
from holdfast.byzantine.privacy import dealing
from holdfast.byzantine.privacy.ciphers import KeyPair
from holdfast.byzantine.privacy.fixed_point import Encoding
from holdfast.byzantine.privacy.messages import (
    Advertise,
    Announce,
    Lot,
    Member,
    Parcel,
    Parcels,
    Roster,
    Survivors,
    from_client,
)
from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ConfigError
from holdfast.integrations.flower import MaskedUpdates
from holdfast.integrations.flower.masked_records import RECORD, record_of, said_in
from tests.integrations.flower.training import context, model, trained

PARCELS = Parcels((Parcel("2", bytes(48)), Parcel("3", bytes(48))))


def announce(round: int = 1, numbers: int = 9, *, colluding: int = 0) -> Announce:
    terms = Terms(1, numbers, Encoding.fitting(4.0, 3), colluding)
    return Announce(round, dealing.commitment_to(bytes(32)), terms)


class Server:
    """Talks to one client, whose name is 1, and is all other members of its bucket itself."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.trained = 0
        self._mod = MaskedUpdates(directory=place, **settings)

    def say(self, message: object, node: int = 1, run: int = 1) -> Message:
        content = RecordDict({RECORD: record_of(encode(message))})
        if isinstance(message, Parcels):
            content["arrays"], content["config"] = model(), ConfigRecord({"server-round": 1})
        return self._mod(Message(content, node, "train"), context(node, run), self._train)

    def _train(self, message: Message, _: Context) -> Message:
        self.trained += 1
        return Message(trained(message, 1), reply_to=message)

    def roster(self, advertised: Message) -> Roster:
        said = said_in(advertised.content, 1 << 20)
        assert isinstance(said, bytes)
        mine = from_client(said)
        assert isinstance(mine, Advertise)
        others = [
            Member(name, KeyPair(bytes([7, number] * 8)).public, KeyPair(bytes([8, number] * 8)).public)
            for number, name in enumerate(("2", "3"))
        ]
        members = (Member("1", mine.cipher_key, mine.mask_key), *others)
        lots = (Lot("1", mine.nonce), Lot("2", bytes(16)), Lot("3", bytes(16)))
        return Roster(bytes(32), lots, members)


def why(reply: Message) -> str:
    assert reply.has_error()
    return str(reply.error.reason)


def test_an_update_in_the_open_is_not_to_be_had(tmp_path: Path) -> None:
    content = RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": 1})})
    mod = MaskedUpdates(directory=tmp_path)
    reply = mod(Message(content, 1, "train"), context(1), lambda came, _: pytest.fail("it trained"))
    assert "asks for an update in the open, and this client sends masked ones only" in why(reply)
    asked = Message(RecordDict(), 1, "evaluate")
    assert mod(asked, context(1), lambda came, _: Message(RecordDict(), reply_to=came)).has_content()


def test_two_lists_of_survivors_are_answered_once_also_by_another_process(tmp_path: Path) -> None:
    server = Server(tmp_path)
    shares = server.say(server.roster(server.say(announce())))
    assert shares.has_content()
    assert server.say(PARCELS).has_content() and server.trained == 1
    assert "Parcels for a second time" in why(server.say(PARCELS)), "Flower sends nothing twice"
    assert "Parcels for a second time" in why(server.say(Survivors(("1", "2")))), "it takes no further part"

    server = Server(tmp_path)
    server.say(server.roster(server.say(announce(2))))
    server.say(PARCELS)
    assert server.say(Survivors(("1", "2"))).has_content()
    for again in (("1", "2"), ("1", "3"), ("1", "2", "3")):
        assert "of which nothing is known here" in why(Server(tmp_path).say(Survivors(again)))


def test_of_two_lists_at_once_one_is_answered(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.say(server.roster(server.say(announce())))
    server.say(PARCELS)
    with ThreadPoolExecutor(4) as pool:
        lists = [("1", "2"), ("1", "3"), ("1", "2", "3"), ("1", "2")]
        replies = list(pool.map(lambda names: Server(tmp_path).say(Survivors(names)), lists))
    assert sum(not reply.has_error() for reply in replies) == 1


def test_a_round_that_was_announced_is_not_announced_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.say(announce(3)).has_content()
    for number in (3, 2):
        assert f"announced round {number}, and round 3 was announced already" in why(server.say(announce(number)))
    assert server.say(announce(4)).has_content()
    assert server.say(announce(1), node=2).has_content(), "another client's rounds are its own"
    assert server.say(announce(1), run=2).has_content()


def test_terms_that_hide_too_little_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, colluding=1)
    assert "bear 0 members that collude with it, and this client asks for 1" in why(server.say(announce()))
    assert server.say(announce(colluding=1)).has_content()
    wild = Announce(5, bytes(32), Terms(1, 9, Encoding(32, 0, 1 << 40), 1))
    assert "terms on which no sum is right" in why(server.say(wild))
    nonsense = Message(RecordDict({RECORD: record_of(b"?")}), 1, "train")
    assert "bytes that encode nothing" in why(server._mod(nonsense, context(1), server._train))


def test_a_model_of_another_size_than_was_announced_is_not_masked(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.say(server.roster(server.say(announce(numbers=8))))
    reply = server.say(PARCELS)
    assert "an update has (9,) numbers, and the round's have 8" in why(reply)


def test_secrets_are_readable_by_their_owner_only_and_go_with_the_round(tmp_path: Path) -> None:
    server = Server(tmp_path / "place")
    server.say(announce())
    kept = tmp_path / "place" / "1-1"
    assert kept.stat().st_mode & 0o077 == 0 and len(kept.read_bytes()) > 200
    assert (tmp_path / "place").stat().st_mode & 0o077 == 0
    server = Server(tmp_path / "place")
    server.say(server.roster(server.say(announce(2))))
    server.say(PARCELS)
    server.say(Survivors(("1", "2", "3")))
    assert len(kept.read_bytes()) < 40


def test_a_place_where_nothing_can_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot keep what it must in" in why(Server(tmp_path / "file" / "below").say(announce()))


def test_settings_without_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="no number of clients"):
        MaskedUpdates(colluding=-1)


def test_a_client_needs_no_torch_for_masks() -> None:
    code = "import holdfast.integrations.flower as f, sys; f.MaskedUpdates(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout.split() == ["False"], done.stderr
