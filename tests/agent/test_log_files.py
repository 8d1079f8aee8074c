"""Lines of many logs in the order of their times, the last of them, and files that are cut, large or gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.output.log_files import PIECE_BYTES, LogFile, by_time, log_files
from holdfast.agent.output.log_times import NAME, LogTimes, read_times
from holdfast.agent.output.tail import Tails


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(logs: Path, *, last: int | None = None, whole: bool = True) -> list[str]:
    return [f"{name} {line}" for name, line in by_time(log_files(logs), logs, whole=whole, last=last)]


def test_lines_of_two_workers_come_in_the_order_in_which_they_were_read(tmp_path: Path) -> None:
    clock = Clock()
    tails = Tails(LogTimes(tmp_path, wall_clock=clock).note)
    for name in ("w0.1", "w1.1"):
        (tmp_path / f"{name}.log").write_text("")
        tails.follow(name, tmp_path / f"{name}.log", from_end=False)
    for turn in range(3):
        for name in ("w1.1", "w0.1"):
            with (tmp_path / f"{name}.log").open("a") as file:
                file.write(f"turn {turn}\n")
            clock.now += 1.0
            tails.look(clock.now)
    expected = [f"{name} turn {turn}" for turn in range(3) for name in ("w1.1", "w0.1")]
    assert lines_of(tmp_path) == expected
    assert lines_of(tmp_path, last=3) == expected[-3:]
    assert lines_of(tmp_path, last=0) == []
    assert lines_of(tmp_path, last=100) == expected


def test_the_last_words_of_a_worker_that_ended_have_their_time_too(tmp_path: Path) -> None:
    (tmp_path / "w0.1.log").write_text("digest\n")
    tails = Tails(LogTimes(tmp_path, wall_clock=Clock()).note)
    tails.follow("w0.1", tmp_path / "w0.1.log", from_end=False)
    tails.end("w0.1", failed=False)
    assert tails.last_lines("w0.1", 1.0) == ["digest"]
    assert read_times(tmp_path)["w0.1"].of(0) == 100.0


def test_without_times_one_log_follows_another_by_its_last_change(tmp_path: Path) -> None:
    import os

    for age, name in ((10, "w1.1"), (20, "w0.1")):
        path = tmp_path / f"{name}.log"
        path.write_text("a\nb\n")
        os.utime(path, (1000 - age, 1000 - age))
    assert lines_of(tmp_path) == ["w0.1 a", "w0.1 b", "w1.1 a", "w1.1 b"]


@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize("lines", [0, 1, 2, 5, 6])
def test_the_last_lines_of_a_file(tmp_path: Path, ending: str, lines: int) -> None:
    texts = ["one", "two" * PIECE_BYTES, "", "four", "five"]
    path = tmp_path / "w0.1.log"
    path.write_text("\n".join(texts) + ending)
    log = LogFile("w0.1", path)
    log.skip_to_last(lines)
    wanted = "\n".join(texts[max(0, len(texts) - lines) :]) if lines else ""
    assert "".join(line for _, line in log.lines(whole=True)) == wanted.replace("\n", "")


def test_a_line_that_does_not_end_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "w0.1.log"
    path.write_text("whole\nhal")
    log = LogFile("w0.1", path)
    assert [line for _, line in log.lines(whole=False)] == ["whole"]
    with path.open("a") as file:
        file.write("f\n")
    assert [line for _, line in log.lines(whole=False)] == ["half"]
    assert log.position == path.stat().st_size


def test_workers_are_sorted_by_their_numbers_and_the_terminal_is_safe(tmp_path: Path) -> None:
    for name in ("w10.1", "w2.1", "w2.10", "w2.9", "imports", "w1.1@b"):
        (tmp_path / f"{name}.log").write_bytes(b"\x1b[31mred\x1b[0m \xff\rlast\n")
    assert [log.name for log in log_files(tmp_path)] == ["imports", "w1.1@b", "w2.1", "w2.9", "w2.10", "w10.1"]
    assert all(line.endswith(" last") for line in lines_of(tmp_path))


def test_what_is_not_there_or_makes_no_sense_is_passed_over(tmp_path: Path) -> None:
    assert log_files(tmp_path / "none") == []
    assert list(LogFile("w0.1", tmp_path / "none").lines(whole=True)) == []
    (tmp_path / NAME).write_text("not a time\n1.0 x w0.1\n2.0 5 w0.1\n\n3.0 4 w0.1\n4.0 9 w0.1\n")
    times = read_times(tmp_path)["w0.1"]
    assert (times.offsets, times.at) == ([5, 9], [2.0, 4.0])
    assert [times.of(position) for position in (0, 4, 5, 8, 9)] == [2.0, 2.0, 4.0, 4.0, None]


def test_the_times_stay_small(tmp_path: Path) -> None:
    clock = Clock()
    times = LogTimes(tmp_path, wall_clock=clock, bytes_max=10_000)
    for number in range(5_000):
        clock.now += 1.0
        times.note(f"w{number % 2}.1", number + 1)
    assert (tmp_path / NAME).stat().st_size <= 10_100
    found = read_times(tmp_path)
    assert set(found) == {"w0.1", "w1.1"}
    for known in found.values():
        assert len(known.at) > 50
        assert all(at == 100.0 + offset for at, offset in zip(known.at, known.offsets, strict=True))


def test_a_disk_that_refuses_costs_nothing(tmp_path: Path) -> None:
    LogTimes(tmp_path / "nowhere").note("w0.1", 5)
    assert read_times(tmp_path / "nowhere") == {}
