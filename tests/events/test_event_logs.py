"""Event logs: one file for each writer, bounded, and read as one story while they are written and turned over."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events import EventLog, EventReader, prune, read_events
from holdfast.events.reading import LINE_BYTES_MAX, PIECE_BYTES


class Clock:
    """One more second each time."""

    def __init__(self, start: float = 0.0) -> None:
        self._times = count(int(start))

    def __call__(self) -> float:
        return float(next(self._times))


def log_in(directory: Path, who: str, *, clock: Clock | None = None, bytes_max: int = 400, files: int = 4) -> EventLog:
    return EventLog(
        directory / f"{who}.jsonl", who, wall_clock=clock or Clock(), file_bytes_max=bytes_max, files_max=files
    )


def steps(events: list[dict[str, object]]) -> list[object]:
    return [event["step"] for event in events]


def test_a_full_file_gets_a_number_and_is_read(tmp_path: Path) -> None:
    log = log_in(tmp_path, "w0.1")
    for step in range(24):
        log.write("left", step=step)
    assert len(list(tmp_path.iterdir())) > 2
    assert steps(read_events(tmp_path)) == list(range(24))


def test_a_writer_keeps_so_many_files_and_the_newest_events(tmp_path: Path) -> None:
    log = log_in(tmp_path, "w0.1", files=3)
    for step in range(1000):
        log.write("left", step=step)
    assert len(list(tmp_path.iterdir())) == 3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * 400
    kept = steps(read_events(tmp_path))
    assert kept == list(range(1000 - len(kept), 1000)) and len(kept) > 12


def test_a_writer_that_starts_again_uses_no_number_twice(tmp_path: Path) -> None:
    for first in (0, 20, 40):
        log = log_in(tmp_path, "agent", files=100)
        for step in range(first, first + 20):
            log.write("left", step=step)
        log.close()
    assert sorted(steps(read_events(tmp_path))) == list(range(60))


@settings(max_examples=60, deadline=None)
@given(
    bursts=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    bytes_max=st.integers(100, 2000),
)
def test_whoever_follows_has_every_event_once_however_often_files_turn(
    tmp_path_factory: pytest.TempPathFactory, bursts: list[int], bytes_max: int
) -> None:
    directory = tmp_path_factory.mktemp("events")
    log = log_in(directory, "w0.1", bytes_max=bytes_max, files=1000)
    reader = EventReader(directory)
    had: list[object] = []
    written = 0
    for burst in bursts:
        for _ in range(burst):
            log.write("left", step=written)
            written += 1
        had += steps(reader.poll())
    assert had == list(range(written))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_files_that_turn_in_the_middle_of_a_look_lose_and_repeat_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The writers go on between any two events that the reader takes."""
    directory = tmp_path_factory.mktemp("events")
    clock = Clock()
    logs = [log_in(directory, f"w{slot}.1", clock=clock, bytes_max=300, files=1000) for slot in range(2)]
    reader = EventReader(directory)
    written, had = count(), []

    def write_some() -> None:
        for _ in range(data.draw(st.integers(0, 9))):
            data.draw(st.sampled_from(logs)).write("left", step=next(written))

    for _ in range(4):
        write_some()
        for event in reader.stream():
            had.append(event["step"])
            if len(had) < 60:
                write_some()
    had += steps(reader.poll())
    assert sorted(had) == list(range(next(written)))  # type: ignore[type-var]


def test_a_reader_that_comes_back_late_goes_on_with_the_oldest_that_is_left(tmp_path: Path) -> None:
    log = log_in(tmp_path, "w0.1", files=3)
    reader = EventReader(tmp_path)
    log.write("left", step=0)
    assert steps(reader.poll()) == [0]
    for step in range(1, 500):
        log.write("left", step=step)
    late = steps(reader.poll())
    assert late == list(range(500 - len(late), 500)) and late
    log.write("left", step=500)
    assert steps(reader.poll()) == [500]


def test_events_are_merged_by_time_then_by_view_and_a_writers_order_stays(tmp_path: Path) -> None:
    def put(who: str, *events: tuple[float, int, int]) -> None:
        lines = [{"t": t, "who": who, "kind": "view", "view": view, "step": step} for t, view, step in events]
        (tmp_path / f"{who}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    put("w0.1", (1.0, 1, 0), (5.0, 3, 4), (2.0, 3, 5))  # its clock was set back
    put("w1.1", (1.5, 1, 1), (5.0, 2, 3), (6.0, 4, 6))
    put("w2.1", (1.7, 1, 2))
    assert steps(read_events(tmp_path)) == list(range(7))


def test_many_writers_are_read_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(40):
        log = log_in(tmp_path, f"w{slot}.1", clock=Clock(slot), bytes_max=1 << 20)
        for _ in range(800):
            log.write("warning", text="x" * 200)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    read = 0
    pread = os.pread

    def counting(file: int, size: int, offset: int) -> bytes:
        nonlocal read
        data = pread(file, size, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting)
    stream = EventReader(tmp_path).stream()
    first = next(stream)
    assert first["t"] == 0.0 and read <= 40 * (PIECE_BYTES + 64) < total
    times = [event["t"] for event in stream]
    assert len(times) == 40 * 800 - 1 and times == sorted(times)


def test_since_leaves_out_what_is_older_and_does_not_read_old_files(tmp_path: Path) -> None:
    log = log_in(tmp_path, "w0.1", clock=Clock(1000), files=100)
    for step in range(50):
        log.write("left", step=step)
    oldest = tmp_path / "w0.1.jsonl.1"
    oldest.write_text("")  # were it read, its events would be missed
    os.utime(oldest, (900, 900))
    assert steps(list(EventReader(tmp_path).stream(since=1040.0))) == list(range(40, 50))


def test_a_torn_line_and_one_that_is_endless_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.jsonl"
    path.write_bytes(b'{"t":1,"who":"w0.1","ki')
    log = log_in(tmp_path, "w0.1", bytes_max=1 << 30)
    log.write("left", step=1)
    with path.open("ab") as file:
        file.write(b"x" * (LINE_BYTES_MAX * 2 + 5) + b"\n")
    log.write("left", step=2)
    reader = EventReader(tmp_path)
    assert steps(reader.poll()) == [1, 2]
    with path.open("ab") as file:
        file.write(b'{"t":9,"who":"w0.1",')
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(b'"kind":"left","step":3}\n{"t":NaN,"who":"w","kind":"left"}\n')
    assert steps(reader.poll()) == [3]


def test_what_is_not_finite_is_json_all_the_same(tmp_path: Path) -> None:
    log_in(tmp_path, "w0.1").write("progress", step=1, metrics={"loss": math.nan, "best": [math.inf, 1.0]})
    text = (tmp_path / "w0.1.jsonl").read_text()
    event = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert event["metrics"] == {"loss": "nan", "best": ["inf", 1.0]} and math.isnan(float(event["metrics"]["loss"]))


def test_all_files_of_a_run_together_are_bounded(tmp_path: Path) -> None:
    writers = ["agent", *(f"w{slot}.{number}" for slot in range(2) for number in range(1, 5))]
    for age, who in enumerate(writers):
        log = log_in(tmp_path, who)
        for step in range(20):
            log.write("left", step=step)
        log.close()
        for path in tmp_path.glob(f"{who}.jsonl*"):
            os.utime(path, (age, age))
    living = ["w0.4", "w1.4"]
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert prune(tmp_path, living, bytes_max=total) == total
    left = prune(tmp_path, living, bytes_max=3000)
    assert 0 < left <= 3000 and left == sum(path.stat().st_size for path in tmp_path.iterdir())
    prune(tmp_path, living, bytes_max=0)
    names = {path.name for path in tmp_path.iterdir()}
    assert {name.partition(".jsonl")[0] for name in names} == {"agent", *living}
    assert len([name for name in names if name.startswith("w0.4")]) == 2  # the open one, and the newest full one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_stops_the_log_and_it_goes_on_when_there_is_room(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(40 * 1024))
    log = log_in(small_disk, "w0.1", bytes_max=1 << 20)
    reader = EventReader(small_disk)
    written = 0
    while not log.failed:
        log.write("warning", text="x" * 300)
        written += 1
    log.write("warning", text="lost too")
    assert "space" in log.failed
    had = reader.poll()
    assert len(had) == written - 1  # whole lines only
    (small_disk / "ballast").unlink()
    log.write("left", step=7)
    assert not log.failed
    told = reader.poll()
    assert [event["kind"] for event in told] == ["warning", "left"] and told[1]["step"] == 7
    assert told[0]["text"].startswith("2 events could not be written: ")


def test_a_disk_that_is_full_when_a_file_turns_stops_nothing(small_disk: Path) -> None:
    log = log_in(small_disk, "w0.1", bytes_max=8 * 1024, files=1000)
    for step in range(2000):
        log.write("left", step=step)
    assert log.failed
    oldest = min(small_disk.glob("*.jsonl.*"), key=lambda path: int(path.suffix[1:]))
    lost = len(oldest.read_bytes().splitlines())
    oldest.unlink()
    log.write("left", step=2000)
    kept = steps([event for event in read_events(small_disk) if event["kind"] == "left"])
    assert not log.failed and kept[-1] == 2000 and kept[:-1] == list(range(lost, lost + len(kept) - 1))
