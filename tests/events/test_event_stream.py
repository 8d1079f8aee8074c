"""Logs in batches: the same events as when all are read at once, in order, whatever is in the files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events import EventLog, EventReader, reading
from holdfast.events.parsing import Lists, parse


def line(at: float, who: str, **fields: Any) -> bytes:
    return json.dumps({"t": at, "who": who, "kind": "warning", **fields}).encode() + b"\n"


def all_of(stream: EventReader) -> list[dict[str, Any]]:
    return [event for batch in stream.batches() for event in batch]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES_MAX", 256)
    monkeypatch.setattr(reading, "PIECE_BYTES", 64)


@settings(max_examples=30)
@given(times=st.lists(st.lists(st.floats(0, 1000), max_size=60), max_size=6))
def test_batches_are_the_log_by_time(times: list[list[float]], tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("events")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES_MAX", 256)
        patch.setattr(reading, "PIECE_BYTES", 64)
        for number, some in enumerate(times):
            own = sorted(some)  # a writer's clock goes forward
            (directory / f"w{number}.1.jsonl").write_bytes(b"".join(line(at, f"w{number}.1") for at in own))
        stream = EventReader(directory)
        batches = list(stream.batches())
        given_times = [event["t"] for batch in batches for event in batch]
        assert given_times == sorted(at for some in times for at in some)
        assert list(stream.batches()) == []
        assert stream.bytes_read == stream.bytes_known


@settings(max_examples=50)
@given(own=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3) | st.none()), max_size=60), others=st.integers(0, 3))
def test_a_writers_events_stay_in_its_order_whatever_its_clock_does(
    own: list[tuple[int, int | None]], others: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("events")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES_MAX", 256)
        patch.setattr(reading, "PIECE_BYTES", 64)
        for number in range(others + 1):
            lines = [line(at, f"w{number}.1", step=step, view=view) for step, (at, view) in enumerate(own)]
            (directory / f"w{number}.1.jsonl").write_bytes(b"".join(lines))
        found = all_of(EventReader(directory))
    for number in range(others + 1):
        mine = [event["step"] for event in found if event["who"] == f"w{number}.1"]
        assert mine == list(range(len(own)))


@pytest.mark.usefixtures("small")
def test_a_batch_is_small_however_long_the_log(tmp_path: Path) -> None:
    for number in range(4):
        own = (line(at + number / 10, f"w{number}.1") for at in range(500))
        (tmp_path / f"w{number}.1.jsonl").write_bytes(b"".join(own))
    batches = list(EventReader(tmp_path).batches())
    assert sum(map(len, batches)) == 2000
    assert max(map(len, batches)) < 40
    assert all(one[-1]["t"] <= two[0]["t"] for one, two in pairwise(batches))


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    junk = [b"{", b"[1]", b"null", b"\xff\xfe", b'{"t":NaN,"who":"a","kind":"x"}', b'{"t":"1","who":"a","kind":"x"}']
    junk += [b'{"t":1,"kind":"x"}', b'{"t":1,"who":"a","kind":[]}', b"[" * 100_000, b""]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*junk, line(1, "a").strip(), b""]) + b'{"t":2,"who"')
    assert [event["t"] for event in all_of(EventReader(tmp_path))] == [1]
    assert parse(b"[],[]\n", Lists()) == []


@pytest.mark.usefixtures("small")
def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LINE_BYTES_MAX", 4096)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 10_000 + b"\n" + line(3, "a"))
    assert [event["t"] for event in all_of(EventReader(tmp_path))] == [3]


def test_it_follows_what_grows_and_what_is_rotated(tmp_path: Path) -> None:
    clock = iter(range(10_000))
    turning = {"file_bytes_max": 2000, "files_max": 1000}
    writer = EventLog(tmp_path / "w0.1.jsonl", "w0.1", wall_clock=lambda: float(next(clock)), **turning)
    stream, seen = EventReader(tmp_path), []
    for number in range(300):
        writer.write("warning", text="about forty characters of text and more")
        if number % 7 == 0:
            seen += all_of(stream)
    seen += all_of(stream)
    writer.close()
    assert (tmp_path / "w0.1.jsonl.1").exists()
    assert [event["t"] for event in seen] == list(range(300))


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.jsonl", line(1, "a")
    path.write_bytes(whole[:10])
    stream = EventReader(tmp_path)
    assert all_of(stream) == []
    with path.open("ab") as file:
        file.write(whole[10:])
    assert len(all_of(stream)) == 1


def test_there_is_nothing_where_there_is_no_directory(tmp_path: Path) -> None:
    assert all_of(EventReader(tmp_path / "none")) == []
