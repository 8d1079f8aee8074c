"""The event log of a run: one append-only file of JSON lines for each writer, merged by time when read."""

from holdfast.events.log import EventLog, EventReader, read_events

__all__ = ["EventLog", "EventReader", "read_events"]
