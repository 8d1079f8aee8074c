"""The chain of rounds: what a stranger can verify, what it would not believe, and what is said of bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.byzantine.agreement import signing
from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.chain_file import FILE, ChainFile, read_chain
from holdfast.byzantine.agreement.checking import Checker
from holdfast.byzantine.agreement.client import Client
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.machine import genesis
from holdfast.byzantine.agreement.processes import RoundSettings
from holdfast.byzantine.agreement.signing import PrivateKey, verify
from holdfast.byzantine.agreement.statements import Attest, Claim, Header, Record, Result, Value, Vote
from holdfast.byzantine.agreement.verifying import chains_in, compare, verify_chain
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError, HoldfastError, IntegrityError
from holdfast.trust.keys import Keys

SERVERS = [f"s{number}" for number in range(4)]
CLIENTS = [f"c{number}" for number in range(3)]
KEYS = {name: PrivateKey(digest_of(name.encode())) for name in (*SERVERS, *CLIENTS, "stranger")}
FEDERATION = Federation(
    name="written",
    f=1,
    servers={name: KEYS[name].public for name in SERVERS},
    clients={name: KEYS[name].public for name in CLIENTS},
    rule="median",
    hostile=1,
    updates_min=2,
    model=digest_of(b"first"),
)
CHECKER = Checker(FEDERATION, verify)


def signed(statement: Any, by: str) -> Any:
    return replace(statement, signature=KEYS[by](CHECKER.said(statement.said)))


def claim(client: str, round: int, content: bytes = b"update") -> Claim:
    return signed(Claim(client, round, digest_of(content)), client)


def record_after(parent: Header, **changes: Any) -> Record:
    """A round as three servers decided it and two signed it."""
    round = parent.round + 1
    claims = changes.get("claims", tuple(claim(name, round) for name in CLIENTS))
    attests = tuple(signed(Attest(name, round, claims), name) for name in SERVERS[:3])
    value = Value(round, parent.digest, attests)
    voters = changes.get("voters", SERVERS[:3])
    commits = tuple(signed(Vote("commit", name, round, 0, value.digest), name) for name in voters)
    header = Header(round, parent.digest, value.digest, digest_of(b"model %d" % round + changes.get("model", b"")))
    results = tuple(signed(Result(name, header), name) for name in changes.get("signers", SERVERS[1:3]))
    return Record(header, value, commits, results)


def chain(directory: Path, *records: Record) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = ChainFile(directory, FEDERATION)
    for record in records:
        file.append(record)
    file.close()
    return directory / FILE


FIRST = record_after(genesis(FEDERATION.model))
SECOND = record_after(FIRST.header)


def test_a_good_chain_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain(tmp_path / "servers" / "s0", FIRST, SECOND)
    chain(tmp_path / "servers" / "s1", FIRST)
    FEDERATION.save(tmp_path / "federation.json")
    assert main(["federate", "verify", str(tmp_path), "--federation", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 rounds hold" in printed and "1 rounds hold" in printed and "s1, s2" in printed


def test_a_chain_survives_a_torn_end(tmp_path: Path) -> None:
    path = chain(tmp_path, FIRST, SECOND)
    path.write_bytes(path.read_bytes()[:-7])
    assert len(verify_chain(path).rounds) == 1
    file = ChainFile(tmp_path, FEDERATION)
    assert file.last == FIRST and file.read(1, 8) == (FIRST,) and file.read(2, 8) == ()
    file.append(SECOND)
    assert file.last == SECOND and file.read(1, 8) == (FIRST, SECOND) and file.read(2, 8) == (SECOND,)
    assert file.read(1, 1) == (FIRST,) and file.read(0, 8) == file.read(2**60, 8) == ()
    file.close()
    assert len(verify_chain(path).rounds) == 2
    again = ChainFile(tmp_path, FEDERATION)
    assert again.last == SECOND and again.read(1, 8) == (FIRST, SECOND)
    again.close()


BAD = {
    "two votes": (record_after(genesis(FEDERATION.model), voters=SERVERS[:2]), "2 of 3 votes"),
    "one vote three times": (record_after(genesis(FEDERATION.model), voters=["s0", "s0", "s0"]), "1 of 3 votes"),
    "one result": (record_after(genesis(FEDERATION.model), signers=["s0"]), "1 servers signed its model"),
    "one result twice": (record_after(genesis(FEDERATION.model), signers=["s0", "s0"]), "1 servers signed its model"),
    "a model that nobody signed": (
        replace(FIRST, header=replace(FIRST.header, model=digest_of(b"other"))),
        "0 servers signed its model",
    ),
    "another set": (replace(FIRST, value=SECOND.value), "not the one that its header names"),
    "too few updates": (record_after(genesis(FEDERATION.model), claims=(claim("c0", 1),)), "fewer than 2 updates"),
    "a stranger's update": (
        record_after(
            genesis(FEDERATION.model),
            claims=(claim("c0", 1), claim("c1", 1), signed(Claim("stranger", 1, digest_of(b"x")), "stranger")),
        ),
        "not a registered client",
    ),
    "an update that its client did not sign": (
        record_after(
            genesis(FEDERATION.model),
            claims=(claim("c0", 1), replace(claim("c1", 1), signature=claim("c0", 1).signature)),
        ),
        "the signature is not that of c1",
    ),
    "an update of another round": (
        record_after(genesis(FEDERATION.model), claims=(claim("c0", 2), claim("c1", 2))),
        "a claim of another round",
    ),
    "the second round first": (SECOND, "does not follow"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_record_that_does_not_hold_is_named(what: str) -> None:
    record, why = BAD[what]
    parent = genesis(FEDERATION.model)
    assert why in CHECKER.record(record, 1, parent.digest)


def test_a_chain_with_a_bad_record_ends_with_1_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = chain(tmp_path, FIRST, record_after(FIRST.header, signers=["s3"]))
    assert main(["federate", "verify", str(path)]) == 1
    assert "round 2 does not hold: 1 servers signed its model" in capsys.readouterr().err


def test_two_signed_chains_that_differ_are_found(tmp_path: Path) -> None:
    one = verify_chain(chain(tmp_path / "a", FIRST))
    two = verify_chain(chain(tmp_path / "b", record_after(genesis(FEDERATION.model), model=b"other")))
    with pytest.raises(IntegrityError, match="have different rounds 1"):
        compare([one, two])


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = chain(tmp_path, FIRST, SECOND)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="is damaged"):
        read_chain(path)


def test_another_federation_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = chain(tmp_path, FIRST)
    other = replace(FEDERATION, servers={**FEDERATION.servers, "s3": KEYS["stranger"].public})
    other.save(tmp_path / "other.json")
    assert main(["federate", "verify", str(path), "--federation", str(tmp_path / "other.json")]) == 1
    assert "another federation than the one that was named" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="chain of another federation"):
        ChainFile(tmp_path, other)


@pytest.mark.parametrize("name", ["nothing", "empty", "text"])
def test_what_is_no_chain_is_said_in_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / name
    if name == "empty":
        place.mkdir()
    if name == "text":
        place.write_text("nothing of the kind, and long enough to be looked at\n" * 5)
    assert main(["federate", "verify", str(place)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("holdfast: ") and "Traceback" not in error and "hint:" in error


SENTENCES = {
    "too few servers for f": (
        lambda: replace(FEDERATION, f=2).validate(),
        "4 servers cannot agree while f=2 of them lie: that takes 7",
    ),
    "a key for two": (
        lambda: replace(FEDERATION, clients={**FEDERATION.clients, "c0": KEYS["s0"].public}).validate(),
        "two participants have the same key",
    ),
    "more updates than clients": (lambda: replace(FEDERATION, updates_min=4).validate(), "with 3 clients"),
    "a key that is not registered": (
        lambda: Client(
            "c0", KEYS["stranger"], FEDERATION, {}, Keys.from_secret(b"s" * 32), public=KEYS["stranger"].public
        ),
        "the key of client 'c0' is not registered in the federation 'written'",
    ),
    "a lie that there is not": (
        lambda: RoundSettings(directory=Path("x"), liars={0: "rude"}).validate(),
        "there is no lie 'rude'",
    ),
    "more liars than f": (
        lambda: RoundSettings(directory=Path("x"), liars={0: "silent", 1: "silent"}).validate(),
        "2 of 4 servers lie, and f=1 are borne",
    ),
    "too few clients for the rule": (
        lambda: RoundSettings(directory=Path("x"), clients=4, rule="bulyan").validate(),
        "bulyan with f=1 needs 7 updates, and only 4 are sure",
    ),
}


@pytest.mark.parametrize("what", SENTENCES)
def test_bad_input_is_one_sentence_with_a_hint(what: str) -> None:
    act, sentence = SENTENCES[what]
    with pytest.raises(HoldfastError) as caught:
        act()
    assert sentence in caught.value.message and caught.value.hint and "\n" not in caught.value.message


def test_a_federation_comes_back_from_its_file(tmp_path: Path) -> None:
    FEDERATION.save(tmp_path / "f.json")
    assert Federation.load(tmp_path / "f.json") == FEDERATION
    (tmp_path / "g.json").write_text('{"servers": []}')
    with pytest.raises(ConfigError, match="does not describe a federation"):
        Federation.load(tmp_path / "g.json")


def test_a_private_key_is_its_owners_alone(tmp_path: Path) -> None:
    KEYS["c0"].save(tmp_path / "key")
    assert PrivateKey.load(tmp_path / "key").public == KEYS["c0"].public
    with pytest.raises(ConfigError, match="never overwritten"):
        KEYS["c1"].save(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        PrivateKey.load(tmp_path / "key")
    assert "PrivateKey of" in repr(KEYS["c0"])
    assert not verify(KEYS["c0"].public, b"said", b"short")


def test_what_was_verified_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "VERIFIED_KEPT", 4)
    monkeypatch.setattr(signing, "_verified", {})
    key = KEYS["c0"]
    for number in range(10):
        said = b"said %d" % number
        assert all(verify(key.public, said, key(said)) for _ in range(2))
        assert not verify(key.public, said, key(b"something else")) and not verify(KEYS["c1"].public, said, key(said))
    assert len(signing._verified) == 4


def test_chains_are_found_where_servers_keep_them(tmp_path: Path) -> None:
    path = chain(tmp_path / "servers" / "s0", FIRST)
    assert chains_in(path) == chains_in(path.parent) == chains_in(tmp_path / "servers") == chains_in(tmp_path) == [path]
