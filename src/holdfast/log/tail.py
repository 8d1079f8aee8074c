"""The entries of a log after some index, in memory. What is up to that index is covered by a snapshot."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.log.configuration import LogEnd
from holdfast.log.messages import Entry, Update


class Tail:
    """Invariant: indices follow each other without a gap, and epochs never fall."""

    def __init__(self, base: LogEnd, entries: Sequence[Entry] = ()) -> None:
        self.base = base
        self._entries: list[Entry] = []
        self.append(entries)

    @property
    def end(self) -> LogEnd:
        return LogEnd(self._entries[-1].epoch, self._entries[-1].index) if self._entries else self.base

    def __len__(self) -> int:
        return len(self._entries)

    def epoch_at(self, index: int) -> int | None:
        """The epoch of the entry at this index; None: it is not here."""
        if index == self.base.index:
            return self.base.epoch
        position = index - self.base.index - 1
        return self._entries[position].epoch if 0 <= position < len(self._entries) else None

    def at(self, index: int) -> Entry:
        return self._entries[index - self.base.index - 1]

    def after(self, index: int, count_max: int | None = None) -> tuple[Entry, ...]:
        start = index - self.base.index
        assert start >= 0, (index, self.base)
        return tuple(self._entries[start : None if count_max is None else start + count_max])

    def nbytes(self, first: int, last: int) -> int:
        """Of the payloads of these entries, as far as they are here."""
        start = max(0, first - self.base.index - 1)
        return sum(map(payload_bytes, self._entries[start : max(start, last - self.base.index)]))

    def append(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            end = self.end
            assert entry.index == end.index + 1 and entry.epoch >= end.epoch, (end, entry)
            self._entries.append(entry)

    def cut_after(self, index: int) -> None:
        assert index >= self.base.index, (index, self.base)
        del self._entries[index - self.base.index :]

    def drop_through(self, index: int) -> None:
        epoch = self.epoch_at(index)
        assert epoch is not None, (index, self.base, self.end)
        del self._entries[: index - self.base.index]
        self.base = LogEnd(epoch, index)


def payload_bytes(entry: Entry) -> int:
    return entry.content.nbytes if isinstance(entry.content, Update) else 0


def within(entries: tuple[Entry, ...], bytes_max: int, *, at_least: bool) -> tuple[Entry, ...]:
    """The first of them whose payloads are not more than that together; with `at_least`, at least one."""
    for count, entry in enumerate(entries):
        bytes_max -= payload_bytes(entry)
        if bytes_max < 0 and (count or not at_least):
            return entries[:count]
    return entries
