"""One worker after the other ends at the same line: when is that the script's, and said so once?"""

from __future__ import annotations

from typing import Any

from holdfast.agent.repeats import Repeats

RAISED = "FileNotFoundError: no such directory: plots"


def failed(worker: str, step: int, *, place: str = "train.py:31", reason: str = RAISED) -> dict[str, Any]:
    return {"kind": "failed", "who": worker, "step": step, "place": place, "reason": reason}


def test_a_leader_that_raises_is_followed_by_one_that_raises() -> None:
    repeats = Repeats()
    assert not repeats.take(failed("w0.1", 10)) and not repeats.are(2)
    warning = repeats.take(failed("w1.1", 11))
    assert "at train.py:31 in w0.1, w1.1: FileNotFoundError: no such directory: plots" in warning
    assert "if run.leader:" in warning
    assert not repeats.take(failed("w2.1", 12))  # it is said once
    assert repeats.are(3)


def test_an_outage_that_all_meet_at_once_is_one_round() -> None:
    repeats = Repeats()
    assert not any(repeats.take(failed(f"w{slot}.1", 10)) for slot in range(8))
    assert not repeats.are(2)
    assert repeats.take(failed("w3.2", 10)) and repeats.are(2)  # and so does who was started since


def test_a_run_that_gets_on_in_spite_of_it_goes_on() -> None:
    repeats = Repeats()
    assert not any(repeats.take(failed("w0.1", step)) for step in (100, 200, 300, 400))
    assert not repeats.are(2)


def test_other_exceptions_and_other_lines_are_no_repetition() -> None:
    repeats = Repeats()
    for number, place in enumerate(("a.py:1", "a.py:2", "a.py:1")):
        assert not repeats.take(failed(f"w{number}.1", number, place=place))
    assert not repeats.take(failed("w3.1", 3, place="a.py:1", reason="ValueError: 3"))
    assert not repeats.are(2)


def test_a_message_may_name_another_file_each_time() -> None:
    repeats = Repeats()
    repeats.take(failed("w0.1", 1, reason="OSError: /tmp/1"))
    assert repeats.take(failed("w1.1", 2, reason="OSError: /tmp/2"))


def test_an_event_without_a_place_says_nothing() -> None:
    assert not Repeats().take({"kind": "failed", "who": "w0.1", "reason": RAISED})
