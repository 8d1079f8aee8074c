"""The heart of this very process: what it sees of a thread that computes, sleeps or has ended."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.agent.workers import stacks
from holdfast.detection import heartbeat
from holdfast.detection.beat import Activity, Beat
from holdfast.detection.heartbeat import Heartbeat, Pulse
from holdfast.detection.pages import Note, Page, note_path
from holdfast.detection.progress import Level, Limits, Sight, suspect
from holdfast.events.telling import first_line_of_code
from holdfast.placement.proc import busiest_state, catches, family_cpu_s, process_started


class Trainer:
    """A thread that does what it is told, as the training thread would."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.go_on = threading.Event()
        self.compute = False
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()
        assert self.ready.wait(10)

    def _train(self) -> None:
        self.pulse.adopt()
        self.pulse.enter(Activity.SHARD, 7)
        self.ready.set()
        while not self.go_on.is_set():
            if self.compute:
                sum(range(1000))
            else:
                self.wait_for_ever()

    def wait_for_ever(self) -> None:
        self.go_on.wait()

    def end(self) -> None:
        self.compute = False
        self.go_on.set()
        self._thread.join(10)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.end()


@pytest.fixture
def heart(trainer: Trainer, tmp_path: Path) -> Iterator[Heartbeat]:
    started = process_started(os.getpid()) or 0
    heart = Heartbeat(trainer.pulse, tmp_path, "w0.1", started=started)
    yield heart
    heart.close()


@pytest.fixture
def page(heart: Heartbeat, tmp_path: Path) -> Iterator[Page]:
    note = Note.read(note_path(tmp_path, "w0.1"))
    assert note is not None
    page = Page(note)
    yield page
    page.close()


def wait_for(page: Page, condition: Callable[[Beat], bool]) -> Beat:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        beat = page.read()
        if beat is not None and condition(beat):
            return beat
        time.sleep(0.01)
    raise AssertionError(f"the last beat: {page.read()}")


def test_a_thread_that_waits_stands_still_and_one_that_computes_does_not(trainer: Trainer, page: Page) -> None:
    beat = wait_for(page, lambda beat: beat.at - beat.moved_at > 0.5)
    assert (beat.activity, beat.step, beat.thread) == (Activity.SHARD, 7, trainer.pulse.thread)
    trainer.compute = True
    trainer.go_on.set()  # out of its wait
    moved_at = beat.moved_at
    wait_for(page, lambda beat: beat.moved_at > moved_at)


def test_what_it_is_in_and_how_long_that_took_before(trainer: Trainer, page: Page) -> None:
    for step in range(20):
        trainer.pulse.enter(Activity.LOADING, step)
        trainer.pulse.enter(Activity.SHARD, step)
    beat = wait_for(page, lambda beat: beat.step == 19 and beat.usual.count >= 20)
    assert beat.activity == Activity.SHARD and beat.has_state
    assert beat.usual.mean_s <= beat.usual.longest_s
    later = wait_for(page, lambda other: other.number >= beat.number + 5)
    assert later.pace.count >= 5 and 0.0 < later.cost_s < later.at


def test_a_thread_that_has_ended_is_no_trouble(trainer: Trainer, page: Page) -> None:
    trainer.end()
    number = wait_for(page, lambda beat: True).number
    wait_for(page, lambda beat: beat.number > number + 3)


def test_the_last_beat_says_that_it_was_the_last(heart: Heartbeat, page: Page, tmp_path: Path) -> None:
    heart.close()
    heart.close()
    beat = page.read()
    assert beat is not None and beat.activity == Activity.CLOSED
    assert not note_path(tmp_path, "w0.1").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heart_that_breaks_accuses_nobody(heart: Heartbeat, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> tuple[int, ...]:
        raise MemoryError

    monkeypatch.setattr(heart, "_where", no_memory)
    beat = wait_for(page, lambda beat: beat.activity == Activity.CLOSED)
    assert suspect(Sight(beat=beat, silent_s=100.0, still_s=100.0), Limits()).level == Level.OK
    monkeypatch.undo()


def test_stacks_are_written_on_request_with_the_training_thread_first(trainer: Trainer, page: Page) -> None:
    assert catches(os.getpid(), page.note.signal)
    for _ in range(2):  # each answer is a new one
        text = stacks.collect(page.note, thread=trainer.pulse.thread)
        assert f"0x{trainer.pulse.thread:016x}" in text.splitlines()[0]
        assert text.count("wait_for_ever") == 1
        assert "test_stacks_are_written_on_request" in text
        assert "in " in first_line_of_code(text)


def test_who_cannot_be_asked_is_said_to_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda _: None)
    monkeypatch.setattr(stacks.sys, "executable", "/nowhere/python")
    me = Note(pid=os.getpid(), started=process_started(os.getpid()) or 0, page=0)
    assert stacks.collect(me, thread=1).startswith("the process does not answer (state ")
    assert first_line_of_code(stacks.collect(me, thread=1)) == ""


def test_nobody_else_is_sent_the_signal(page: Page) -> None:
    """Without a handler it would end the process: whoever has the number now is not asked."""
    other = Note(
        pid=page.note.pid, started=page.note.started + 1, page=0, stacks=page.note.stacks, signal=signal.SIGKILL
    )
    assert not catches(os.getpid(), signal.SIGKILL)
    assert stacks._ask(other, other.pid, time.monotonic() + 1.0) == ""
    assert not stacks._signal(page.note, os.getppid())


def test_stacks_are_bounded_and_py_spys_are_understood() -> None:
    other = 'Process 7: python\nThread 8 (idle): "other"\n    f (a.py:1)\n'
    text = other + 'Thread 7 (active): "MainThread"\n    stuck (b.py:3)'
    assert first_line_of_code(stacks._first(text, "MainThread")) == "b.py:3 in stuck"
    assert len(stacks._bounded("x" * 10**6)) < stacks.STACKS_BYTES_MAX + 100


def test_a_signal_that_the_script_uses_is_left_to_it(tmp_path: Path) -> None:
    previous = signal.signal(heartbeat.STACKS_SIGNAL, lambda *_: None)
    try:
        heart = Heartbeat(Pulse(), tmp_path, "w0.1", started=1)
        note = Note.read(note_path(tmp_path, "w0.1"))
        heart.close()
        assert note is not None and note.signal == 0
    finally:
        signal.signal(heartbeat.STACKS_SIGNAL, previous)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "{}", '{"pid": "1"}', '{"pid": 1, "started": 2, "page": 3, "more": 4}']
)
def test_a_note_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w0.1.json"
    path.write_text(text)
    assert Note.read(path) is None and Note.read(tmp_path / "nothing") is None


def test_a_note_there_and_back(tmp_path: Path) -> None:
    note = Note(pid=1, started=2, page=3, stacks=4, signal=5)
    note.write(note_path(tmp_path, "w1.1"))
    assert Note.read(note_path(tmp_path, "w1.1")) == note
    assert set(json.loads(note_path(tmp_path, "w1.1").read_text())) == {"pid", "started", "page", "stacks", "signal"}


def test_what_the_kernel_says_of_this_process() -> None:
    before = family_cpu_s(os.getpid())
    while family_cpu_s(os.getpid()) <= before:
        sum(range(10_000))
    assert busiest_state(os.getpid()) == "R"
    assert busiest_state(2**22 + 1) == "" and family_cpu_s(2**22 + 1) == 0.0
