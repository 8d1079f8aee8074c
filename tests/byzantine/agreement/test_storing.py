"""What a server has on disk is there after a kill, and a second process of the same server is kept out."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.byzantine.agreement import storing
from holdfast.byzantine.agreement.canonical import digest_of
from holdfast.byzantine.agreement.messages import Ballot
from holdfast.byzantine.agreement.statements import Prepared
from holdfast.byzantine.agreement.storing import Store
from holdfast.core.errors import ConfigError
from tests.byzantine.agreement.test_verify import FEDERATION, FIRST, claim


def test_everything_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path, FEDERATION)
    ballot = Ballot(1, 2, b"a" * 32, b"", Prepared(1, FIRST.value, FIRST.commits))
    store.persist(Ballot(1))
    store.persist(ballot)
    store.keep_update(claim("c0", 1), b"update")
    model = store.keep_blob(b"model")
    store.close()
    again = Store(tmp_path, FEDERATION)
    found = again.found()
    assert found.ballot == ballot and found.claims == (claim("c0", 1),)
    assert found.blobs == {digest_of(b"update"), model} and found.last is None
    again.append(FIRST)
    again.forget((digest_of(b"update"),))
    assert again.read_blob(digest_of(b"update")) is None
    again.close()
    last = Store(tmp_path, FEDERATION)
    assert last.found().last == FIRST and last.found().claims == () and last.found().blobs == {model}
    last.close()


def test_bytes_that_are_not_what_their_name_says_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path, FEDERATION)
    digest = store.keep_blob(b"model")
    (tmp_path / "blobs" / digest.hex()).write_bytes(b"changed")
    (tmp_path / "blobs" / f"{digest.hex()}.new").write_bytes(b"half written")
    assert store.found().blobs == frozenset()
    store.close()


def test_one_process_a_server(tmp_path: Path) -> None:
    store = Store(tmp_path, FEDERATION)
    with pytest.raises(ConfigError, match="another process"):
        Store(tmp_path, FEDERATION)
    store.close()


def test_old_votes_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "VOTES_BYTES_MAX", 20_000)
    store = Store(tmp_path, FEDERATION)
    ballot = Ballot(1, 1, b"a" * 32, b"", Prepared(0, FIRST.value, FIRST.commits))
    for _ in range(40):
        store.persist(ballot)
    assert sum(path.stat().st_size for path in (tmp_path / "votes").iterdir()) <= 40_000
    assert store.found().ballot == ballot
    store.close()
