"""`holdfast run --tensorboard DIR`: the run's curves as event files of TensorBoard, written beside the agent.

Thread: `holdfast-tensorboard` alone reads the events and writes the file. Needs the package `tensorboard`, and neither
torch nor the workers.
"""

from __future__ import annotations

import importlib
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.events import EventReader
from holdfast.observe.scalars import Scalars

LOOK_S = 1.0


class Curves:
    """Follows the events from now on: what an earlier agent wrote is in the file of its time."""

    def __init__(self, events: Path, place: Path) -> None:
        self._summary, self._event, writer = _protocol()
        try:
            self._writer = writer(str(place))
        except OSError as error:
            raise ConfigError(
                f"--tensorboard cannot write to {place}: {error.strerror or error}", hint="name a directory of yours"
            ) from error
        self._reader = EventReader(events)
        self._scalars = Scalars()
        self._since = time.time()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-tensorboard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            with suppress(OSError):  # a full disk: the curves have a gap, the training goes on
                self._look()

    def _look(self) -> None:
        for event in self._reader.stream():
            points = self._scalars.feed(event)
            if event["t"] < self._since:
                continue
            for tag, step, value, when in points:
                summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
                self._writer.add_event(self._event(wall_time=when, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            with suppress(OSError):
                self._look()
                self._writer.close()


def _protocol() -> tuple[Any, Any, Any]:
    """Its messages and its writer, of whose types nothing is known."""
    try:
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard needs the package tensorboard: {error}", hint="pip install 'holdfast[tensorboard]'"
        ) from error
    return summary, event, writer
