"""What a hostile client or server may say in a masked round: one sentence, a bucket at most, never the round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.byzantine.agreement.canonical import decode, encode
from holdfast.byzantine.privacy import dealing
from holdfast.byzantine.privacy.ciphers import KeyPair
from holdfast.byzantine.privacy.client import MaskedClient
from holdfast.byzantine.privacy.masked_round import MaskedRound
from holdfast.byzantine.privacy.messages import (
    Advertise,
    Announce,
    FromClient,
    Lot,
    Masked,
    Member,
    Parcel,
    Parcels,
    Phase,
    Roster,
    Share,
    Shares,
    Survivors,
    Unmask,
    from_server,
)
from holdfast.byzantine.privacy.sharing import split
from holdfast.core.errors import ProtocolError
from tests.byzantine.privacy.parties import SECRET, Party, Tamper, assert_sums, names, parties, run, secrets, terms

LIAR = "c00"


def said_in(phase: Phase, change: Callable[[FromClient], FromClient | bytes]) -> Tamper:
    return lambda now, said: change(said) if now is phase else said


@pytest.mark.parametrize(
    ("phase", "change", "sentence"),
    [
        (Phase.ADVERTISE, lambda said: b"?", "bytes that encode nothing"),
        (Phase.SHARE, lambda said: b"", "bytes that encode nothing"),
        (Phase.MASK, lambda said: encode(Announce(1, b"", terms(2))), "a message 'Announce'"),
        (Phase.UNMASK, lambda said: b"t\xff\xff\xff\xff", "a length beyond the end"),
        (Phase.ADVERTISE, lambda said: Advertise(bytes(16), bytes(32), said.mask_key), "are no keys"),
        (Phase.ADVERTISE, lambda said: Advertise(bytes(16), said.mask_key, said.mask_key), "a key for a second time"),
        (Phase.ADVERTISE, lambda said: Advertise(b"", said.cipher_key, said.mask_key), "are no keys"),
        (Phase.ADVERTISE, lambda said: Masked(bytes(24)), "when it was not asked"),
        (Phase.SHARE, lambda said: Shares(said.commitment, said.parcels[1:]), "not one for every other member"),
        (Phase.SHARE, lambda said: Shares(b"", said.parcels), "its commitment is none"),
        (Phase.SHARE, lambda said: Unmask((), ()), "when it was not asked"),
        (Phase.MASK, lambda said: Masked(said.content[:-1]), "have 23 bytes, and must have 24"),
        (Phase.UNMASK, lambda said: Unmask(said.masks * 2, ()), "not those that it was asked for"),
        (Phase.UNMASK, lambda said: Unmask(said.masks, said.masks), "not those that it was asked for"),
        (Phase.UNMASK, lambda said: Unmask((Share("c01", b"short"),), ()), "not those that it was asked for"),
    ],
)
def test_a_client_that_says_what_none_would_is_left_out(
    phase: Phase, change: Callable[[FromClient], FromClient | bytes], sentence: str
) -> None:
    agreed = terms(5)
    found = run(agreed, names(5), tampering={LIAR: said_in(phase, change)})
    assert sentence in found.left_out[LIAR] and found.left_out[LIAR].startswith("c00 is left out: ")
    is_in_the_sum = phase is Phase.UNMASK  # its numbers had come before, and may be poisoned: it is still to be borne
    assert found.hostile == (0 if is_in_the_sum else 1) and found.left_out.keys() == {LIAR}
    assert set(found.sums[0].clients) == set(names(5)) - (set() if is_in_the_sum else {LIAR})
    assert_sums(found, agreed)


def test_a_client_that_says_two_things_is_left_out_and_one_that_repeats_itself_is_not() -> None:
    agreed = terms(5)
    for phase in (Phase.ADVERTISE, Phase.SHARE, Phase.MASK):
        for is_other in (True, False):
            found = _doubled(phase, is_other)
            assert (LIAR in found.left_out) == is_other, (phase, is_other)
            assert_sums(found, agreed)
            assert len(found.sums) == 1


def _doubled(phase: Phase, is_other: bool):  # type: ignore[no-untyped-def]
    """c00's answer in this phase reaches the server twice, or two different ones do."""
    agreed, clients = terms(5), names(5)
    made, server = parties(agreed, clients), MaskedRound(1, clients, agreed, SECRET)
    waiting = server.begin()
    while server.outcome is None:
        more = []
        for send in waiting:
            answer = made[send.client].hear(send.content)
            assert answer is not None
            more += server.hear(send.client, answer)
            if send.client == LIAR and made[LIAR].client.phase == phase + 1:
                more += server.hear(LIAR, _another(answer) if is_other else answer)
        waiting = more or server.close()
    return server.outcome


def _another(answer: bytes) -> bytes:
    message = decode(answer, {kind.__name__: kind for kind in (Advertise, Shares, Masked)})
    if isinstance(message, Advertise):
        return encode(dataclasses.replace(message, nonce=bytes(16)))
    if isinstance(message, Shares):
        return encode(dataclasses.replace(message, commitment=bytes(32)))
    return encode(Masked(bytes(len(message.content))))


def test_a_stranger_and_one_that_was_left_out_are_not_heard() -> None:
    agreed, clients = terms(3), names(3)
    server = MaskedRound(1, clients, agreed, SECRET)
    assert server.hear("stranger", b"x") == [] and server.hear("c00", b"x") == []
    assert server.hear("c00", encode(Advertise(bytes(16), KeyPair(bytes(16)).public, KeyPair(b"1" * 16).public))) == []
    assert server.phase is Phase.ADVERTISE


# -- lies about shares


def wrong_shares(said: FromClient) -> FromClient:
    assert isinstance(said, Unmask)
    return Unmask(tuple(Share(one.client, bytes(16)) for one in said.masks), said.keys)


def test_one_wrong_share_is_borne_by_five_and_loses_a_bucket_of_two() -> None:
    agreed = terms(5)
    found = run(agreed, names(5), tampering={LIAR: said_in(Phase.UNMASK, wrong_shares)})
    assert len(found.sums) == 1
    assert_sums(found, agreed)
    agreed = terms(6, 3)
    found = run(agreed, names(6), tampering={LIAR: said_in(Phase.UNMASK, wrong_shares)})
    assert len(found.sums) == 2 and found.hostile == 1
    assert (
        "cannot be opened, so a member lied about its shares" in found.lost[0].reason
        and "\n" not in found.lost[0].reason
    )
    assert_sums(found, agreed)


class DealsOtherSeeds(Party):
    """Its parcels hold shares of seeds that are not its own, well sealed."""

    def hear(self, content: bytes) -> bytes | None:
        if self.client.phase is Phase.SHARE:
            own = self.client._secrets
            self.client._secrets = dataclasses.replace(own, mask_seed=bytes(16), self_seed=b"\1" * 16)
            answer = super().hear(content)
            self.client._secrets = own
            assert answer is not None
            message = decode(answer, {"Shares": Shares})
            return encode(message)
        return super().hear(content)


@pytest.mark.parametrize("silent", [Phase.OVER, Phase.MASK])
def test_shares_of_other_secrets_lose_their_bucket_alone(silent: Phase) -> None:
    """It stays, and its self mask cannot be opened; or it falls silent, and its key cannot."""
    agreed, clients = terms(10, 2), names(10)
    made = parties(agreed, clients)
    made[LIAR] = DealsOtherSeeds(made[LIAR].client, silent, _commits_to_its_own)
    from holdfast.byzantine.privacy.exchange import carried

    found = carried(MaskedRound(1, clients, agreed, SECRET), made)
    assert len(found.sums) == 1 and LIAR in found.lost[0].members and found.hostile == 1
    what = "self mask" if silent is Phase.OVER else "key"
    assert f"the {what} of c00 cannot be opened" in found.lost[0].reason
    assert_sums(found, agreed)


def _commits_to_its_own(phase: Phase, said: FromClient) -> FromClient:
    return dataclasses.replace(said, commitment=bytes(32)) if isinstance(said, Shares) else said


def test_parcels_that_cannot_be_opened_cost_their_bucket() -> None:
    agreed = terms(5)

    def spoiled(said: FromClient) -> FromClient:
        assert isinstance(said, Shares)
        return Shares(said.commitment, tuple(Parcel(one.peer, bytes(len(one.sealed))) for one in said.parcels))

    found = run(agreed, names(5), tampering={LIAR: said_in(Phase.SHARE, spoiled)})
    assert found.sums == () and "the self mask of c00 cannot be opened" in found.lost[0].reason


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(Phase)[:4]), st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_a_flipped_byte_anywhere_never_raises_and_no_wrong_sum_has_all_clients(
    phase: Phase, at: int, flip: int, cut: bool
) -> None:
    agreed = terms(6, 2)

    def flipped(said: FromClient) -> bytes:
        content = bytearray(encode(said))
        content[at % len(content)] ^= flip
        return bytes(content[: at % len(content)] if cut else content)

    found = run(agreed, names(6), tampering={LIAR: said_in(phase, flipped)})
    for one in found.sums:
        if LIAR not in one.clients:
            assert_sums(dataclasses.replace(found, sums=(one,)), agreed)
    assert len(found.sums) + len(found.lost) in (1, 2)


# -- a server that lies to a client


def announced(agreed, secret: bytes = SECRET) -> bytes:  # type: ignore[no-untyped-def]
    return encode(Announce(1, dealing.commitment_to(secret), agreed))


def member(name: str) -> Member:
    own = secrets(name)
    return Member(name, KeyPair(own.cipher_seed).public, KeyPair(own.mask_seed).public)


def lots(clients: list[str]) -> tuple[Lot, ...]:
    return tuple(Lot(name, secrets(name).nonce) for name in clients)


def client_of(clients: int, *contents: object) -> MaskedClient:
    made = parties(terms(clients), names(clients))[LIAR].client
    made.hear(announced(made.terms))
    for content in contents:
        made.hear(encode(content))
    return made


FIVE = names(5)
ROSTER = Roster(SECRET, lots(FIVE), tuple(map(member, FIVE)))


@pytest.mark.parametrize(
    ("roster", "said"),
    [
        (dataclasses.replace(ROSTER, secret=b"1" * 32), "another secret than it had committed to"),
        (dataclasses.replace(ROSTER, lots=ROSTER.lots[1:]), "without the nonce of c00"),
        (dataclasses.replace(ROSTER, lots=ROSTER.lots * 2), "with a client twice"),
        (dataclasses.replace(ROSTER, members=ROSTER.members[:3]), "not the one that the seed deals"),
        (
            dataclasses.replace(ROSTER, members=(Member("c00", b"1" * 32, b"2" * 32), *ROSTER.members[1:])),
            "changed the keys of c00",
        ),
        (
            dataclasses.replace(
                ROSTER, members=(*ROSTER.members[:4], dataclasses.replace(ROSTER.members[3], client="c04"))
            ),
            "two members have one key",
        ),
        (
            dataclasses.replace(ROSTER, members=(*ROSTER.members[:4], Member("c04", bytes(32), b"2" * 32))),
            "a public key of c04 that is none",
        ),
        (Survivors(tuple(FIVE)), "too early"),
    ],
)
def test_a_client_does_not_share_its_secrets_on_a_servers_word(roster: object, said: str) -> None:
    client = client_of(5)
    with pytest.raises(ProtocolError, match=said):
        client.hear(encode(roster))
    with pytest.raises(ProtocolError, match=said):  # and takes no further part
        client.hear(encode(ROSTER))


def test_a_client_takes_part_in_the_round_that_was_agreed_on_only() -> None:
    agreed = terms(5)
    for wrong in (Announce(2, bytes(32), agreed), Announce(1, bytes(32), dataclasses.replace(agreed, buckets=2))):
        client = MaskedClient(LIAR, 1, agreed, secrets(LIAR))
        with pytest.raises(ProtocolError, match="on other terms than were agreed on"):
            client.hear(encode(wrong))
    with pytest.raises(ProtocolError, match="the server sent bytes that encode nothing"):
        MaskedClient(LIAR, 1, agreed, secrets(LIAR)).hear(b"?")


def test_a_client_does_not_send_its_numbers_where_too_few_share() -> None:
    sealed = bytes(48)
    for peers, said in ((["c01"], "too few to hide among"), (["c01", "c01"], "twice"), (["c09", "c01"], "not of the")):
        client = client_of(5, ROSTER)
        with pytest.raises(ProtocolError, match=said):
            client.hear(encode(Parcels(tuple(Parcel(peer, sealed) for peer in peers))))


def test_a_message_that_comes_again_gets_the_same_answer_and_another_in_its_place_none() -> None:
    parcels = Parcels(tuple(Parcel(peer, bytes(48)) for peer in FIVE[1:]))
    client = client_of(5, ROSTER, parcels)
    content = encode(Survivors(tuple(FIVE)))
    first = client.hear(content)
    assert client.hear(content) == first and from_server(content) == Survivors(tuple(FIVE))
    with pytest.raises(ProtocolError, match="for a second time, and differently"):
        client.hear(encode(Survivors(tuple(FIVE[:4]))))


@pytest.mark.parametrize(
    ("survivors", "said"),
    [
        (FIVE[1:], "a sum without c00"),
        (FIVE[:2], "a sum of 2, which are too few"),
        (["c00", "c00", "c01"], "survivors twice"),
        ([*FIVE, "c09"], "that sent no shares"),
    ],
)
def test_a_client_opens_no_sum_that_hides_too_little(survivors: list[str], said: str) -> None:
    client = client_of(5, ROSTER, Parcels(tuple(Parcel(peer, bytes(48)) for peer in FIVE[1:])))
    with pytest.raises(ProtocolError, match=said):
        client.hear(encode(Survivors(tuple(survivors))))


def test_shares_are_of_the_size_that_is_checked() -> None:
    assert {len(share) for share in split(bytes(16), 2, 3)} == {16}
