"""Append-only event logs: one file for each writer, read together as one story."""

from holdfast.events.log import EventLog, prune
from holdfast.events.reading import EventReader, read_events

__all__ = ["EventLog", "EventReader", "prune", "read_events"]
