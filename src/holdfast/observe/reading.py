"""The record of a run, read from its event logs."""

from __future__ import annotations

from pathlib import Path

from holdfast.events import EventReader
from holdfast.observe.fold import RunRecord, record_of


def read_record(events: Path) -> RunRecord:
    """What the logs in this directory tell so far."""
    return record_of(EventReader(events).stream())
