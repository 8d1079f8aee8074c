"""What a server learns of one client's update: nothing beyond its bucket's sum, whatever it asks for.

**Equal views.** For every set of updates with the same sum in each bucket there is one set of masks, as likely as the
one that was drawn, with which every byte that reaches the server is the same. Here it is constructed and tried.

**No two secrets.** A survivor's self mask and its key together would open its update. However a server tells members
different lists of survivors, it gets too few shares of one of the two; with a lower threshold it would get both.
"""

from __future__ import annotations

import hashlib
from itertools import combinations, product

import numpy as np
import pytest
from Crypto.Protocol import SecretSharing

from holdfast.byzantine.agreement.canonical import decode, digest_of, encode
from holdfast.byzantine.privacy.ciphers import KeyPair, expand
from holdfast.byzantine.privacy.client import MaskedClient, pair_mask_key
from holdfast.byzantine.privacy.exchange import carried
from holdfast.byzantine.privacy.fixed_point import Residues
from holdfast.byzantine.privacy.masked_round import MaskedRound
from holdfast.byzantine.privacy.masks import masked
from holdfast.byzantine.privacy.messages import Masked, Member, Phase, Survivors, Unmask, from_client
from holdfast.byzantine.privacy.sharing import recovered
from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ProtocolError
from tests.byzantine.privacy.parties import SECRET, names, parties, secrets, terms, values

View = list[tuple[str, bytes]]


class SameDraws:
    """The coefficients of shares, drawn from a seed: they do not depend on updates, and are held fixed here."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, length: int) -> bytes:
        self._count += 1
        return hashlib.sha256(f"{self._count}".encode()).digest()[:length]


def seen_by_the_server(
    monkeypatch: pytest.MonkeyPatch,
    agreed: Terms,
    updates: dict[str, Residues],
    shifts: dict[bytes, Residues],
    silent: dict[str, Phase],
) -> tuple[View, list[int]]:
    """All that reaches the server, and the sum that it finds. `shifts`: by how much a mask differs, by its key."""
    monkeypatch.setattr(SecretSharing, "rng", SameDraws())

    def shifted(key: bytes, length: int) -> bytes:
        stream = agreed.encoding.from_bytes(expand(key, length))
        return agreed.encoding.to_bytes(stream + shifts[key] if key in shifts else stream)

    clients, view = list(updates), list[tuple[str, bytes]]()
    made = parties(agreed, clients, updates=updates, expand=shifted, silent=silent)
    server = MaskedRound(1, clients, agreed, SECRET, expand=shifted)
    found = carried(server, made, lambda client, content: view.append((client, content)))
    assert len(found.sums) == 1
    return view, [int(one) for one in found.sums[0].total]


@pytest.mark.parametrize("lost", [[], ["c01"], ["c01", "c04"]])
def test_updates_with_the_same_sum_look_the_same(monkeypatch: pytest.MonkeyPatch, lost: list[str]) -> None:
    """Also where the server is given the keys of those who were lost, and so all masks that they had with others."""
    agreed, clients = terms(5), names(5)
    updates = {name: values(agreed, name) for name in clients}
    first, *rest = [name for name in clients if name not in lost]
    moved = {name: values(agreed, name, draw=9) for name in rest}  # other numbers for all survivors …
    others = updates | {name: updates[name] + moved[name] for name in rest}
    for name in rest:
        others[first] = others[first] - moved[name]  # … with the same sum
    about = digest_of(MaskedRound(1, clients, agreed, SECRET).begin()[0].content)
    own = KeyPair(secrets(first).mask_seed)
    shifts = {pair_mask_key(own, about, member(name)): moved[name] for name in rest}
    silent = dict.fromkeys(lost, Phase.MASK)
    view, total = seen_by_the_server(monkeypatch, agreed, updates, {}, silent)
    again, same = seen_by_the_server(monkeypatch, agreed, others, shifts, silent)
    assert view == again and total == same and len(view) >= 4 * len(rest)
    assert all((updates[name] != others[name]).any() for name in (first, *rest))
    other, _ = seen_by_the_server(monkeypatch, agreed, others, {}, silent)  # it is the masks that hide them
    assert [one for one in other if one not in view]


def member(name: str) -> Member:
    own = secrets(name)
    return Member(name, KeyPair(own.cipher_seed).public, KeyPair(own.mask_seed).public)


def test_over_all_masks_views_of_the_same_sum_are_equally_likely() -> None:
    """Counted, for numbers modulo 4 and three members: every pair's mask has four values."""

    def views(numbers: tuple[int, int, int]) -> dict[tuple[int, ...], int]:
        counted: dict[tuple[int, ...], int] = {}
        for ab, ac, bc in product(range(4), repeat=3):
            pairs = {"a": [("b", ab), ("c", ac)], "b": [("a", ab), ("c", bc)], "c": [("a", ac), ("b", bc)]}
            sent = tuple(
                int(masked(word(number), word(0), name, [(peer, word(mask)) for peer, mask in pairs[name]])[0]) % 4
                for name, number in zip("abc", numbers, strict=True)
            )
            counted[sent] = counted.get(sent, 0) + 1
        return counted

    def word(number: int) -> Residues:
        return np.array([number], dtype=np.uint32)

    assert views((1, 2, 3)) == views((0, 3, 3)) == views((2, 2, 2))
    assert len(views((1, 2, 3))) == 16 and set(views((1, 2, 3)).values()) == {4}  # any three with that sum, alike
    assert views((1, 2, 3)) != views((1, 2, 2))


def test_no_secret_of_a_survivor_is_among_what_the_server_got() -> None:
    agreed, clients = terms(5), names(5)
    got: dict[str, bytes] = {}
    made = parties(agreed, clients, silent={"c03": Phase.MASK})
    carried(
        MaskedRound(1, clients, agreed, SECRET),
        made,
        lambda client, content: got.update({client: got.get(client, b"") + content}),
    )
    everything = b"".join(got.values())
    for name in clients:
        own = secrets(name)
        assert own.nonce in everything  # the search finds what is there
        assert own.mask_seed not in everything and own.cipher_seed not in everything
        assert own.self_seed not in everything
        assert agreed.encoding.to_bytes(values(agreed, name)) not in everything


def test_masked_numbers_say_nothing_by_their_size() -> None:
    """Masked zeros and masked large numbers are spread alike over the whole range: means within 5 standard errors."""
    agreed = terms(3, numbers=20_000)
    for size in (0.0, 7.0):
        update = agreed.encoding.encode(np.full(20_000, size))
        got: list[bytes] = []
        carried(
            MaskedRound(1, names(3), agreed, SECRET),
            parties(agreed, names(3), updates=dict.fromkeys(names(3), update)),
            lambda client, content, got=got: got.append(content),  # type: ignore[misc]
        )
        sent = [number for content in got for number in _numbers(agreed, content)]
        assert len(sent) == 3
        for one in sent:
            assert abs(float((one / 2.0**32).mean()) - 0.5) < 5 * (1 / 12 / 20_000) ** 0.5


def _numbers(agreed: Terms, content: bytes) -> list[Residues]:
    message = from_client(content)
    return [agreed.encoding.from_bytes(message.content)] if isinstance(message, Masked) else []


# -- a server that asks for both


def at_the_last_phase(agreed: Terms, clients: list[str]) -> tuple[dict[str, MaskedClient], bytes]:
    """All have sent their numbers; and what the announcement's digest is."""
    made, server = parties(agreed, clients), MaskedRound(1, clients, agreed, SECRET)
    waiting = server.begin()
    about = digest_of(waiting[0].content)
    while server.phase is not Phase.UNMASK:
        waiting = [
            more for send in waiting for more in server.hear(send.client, made[send.client].hear(send.content) or b"")
        ]
    return {name: party.client for name, party in made.items()}, about


def opened_of(victim: str, agreed: Terms, clients: list[str], told_lost: set[str]) -> tuple[bool, bool]:
    """Whether its self mask and its key can be opened, if these members are told that it was lost."""
    made, _ = at_the_last_phase(agreed, clients)
    masks: dict[int, bytes] = {}
    keys: dict[int, bytes] = {}
    for number, (name, client) in enumerate(made.items()):
        there = [one for one in clients if name not in told_lost or one != victim]
        try:
            said = decode(client.hear(encode(Survivors(tuple(there)))), {"Unmask": Unmask})
        except ProtocolError:
            continue
        for given, shares in ((masks, said.masks), (keys, said.keys)):
            given.update((number, share.content) for share in shares if share.client == victim)
        assert not {share.client for share in said.masks} & {share.client for share in said.keys}
    threshold, own = agreed.threshold(len(clients)), secrets(victim)
    return (
        recovered(masks, threshold, own.self_seed.__eq__) is not None,
        recovered(keys, threshold, own.mask_seed.__eq__) is not None,
    )


@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_lists_of_survivors_open_one_of_them(count: int) -> None:
    agreed, clients = terms(count), names(count)
    found = {
        opened_of("c01", agreed, clients, set(some))
        for size in range(count + 1)
        for some in combinations(clients, size)
    }
    assert (True, True) not in found and (True, False) in found
    assert (False, True) in found or count == 3  # an honest server that did lose it can open its key


def test_with_a_lower_threshold_two_lists_would_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the threshold is for: the same attack succeeds if half of the members are enough."""
    monkeypatch.setattr(Terms, "threshold", lambda self, members: members // 2)
    assert opened_of("c01", terms(5), names(5), {"c00", "c02"}) == (True, True)
