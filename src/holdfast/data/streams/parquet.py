"""Rows of Parquet files as samples, by row groups: a source for streams.

Nothing smaller than a row group can be read by itself. So the stream's blocks are whole row groups, and those of a
window are kept decoded. A row group that is larger than a window is decoded from its beginning to its end, a piece as
large as a window at a time, and the stream takes its rows in that order; to go back in it is to begin again. Owns the
rows that are kept, and the files that are open in this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from holdfast.core.errors import ConfigError
from holdfast.data.streams.data_files import DataFile

_OPEN_MAX = 16
_PIECE_ROWS = 1024  # at least, where a window is smaller
_UNDER_WAY = 2  # row groups of which a piece was decoded: one ends in the window in which another begins
_READ_BYTES = 1 << 20  # of a column at a time, where a row group is decoded piece by piece
Columns = tuple[str, ...] | None


class KeptRows:
    """Pieces of row groups as they were decoded, the last used ones: of two windows, each of `window` rows.

    A stream has one for all its files: one window ends while another begins.
    """

    def __init__(self, window: int) -> None:
        self.piece_rows = max(_PIECE_ROWS, window)
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._pieces: dict[tuple[DataFile, Columns, int, int], Any] = {}
        self._files: dict[DataFile, Any] = {}
        self._under_way: dict[tuple[DataFile, Columns, int], tuple[int, Iterator[Any]]] = {}

    @property
    def rows(self) -> int:
        return sum(len(piece) for piece in self._pieces.values())

    def piece(self, file: DataFile, columns: Columns, group: int, number: int, *, whole: bool) -> Any:
        """Rows `number` * piece_rows and on of a row group. `whole`: the row group has no other piece."""
        if self._process != os.getpid():  # a forked process would move the other one's place in the file
            self._forget()
        key = (file, columns, group, number)
        found = self._pieces.pop(key, None)
        if found is None:
            found = self._decoded(*key, whole=whole)
            kept = self.rows
            while self._pieces and kept + len(found) > 2 * self.piece_rows:
                kept -= len(self._pieces.pop(next(iter(self._pieces))))
        self._pieces[key] = found
        return found

    def _decoded(self, file: DataFile, columns: Columns, group: int, number: int, *, whole: bool) -> Any:
        names = None if columns is None else list(columns)
        if whole:
            return self._file(file).read_row_group(group, columns=names, use_threads=False)
        key = (file, columns, group)
        at, pieces = self._under_way.pop(key, (0, iter(())))
        if at == 0 or at > number:
            file.check()
            at, pieces = 0, _pieces(_open(file.path, buffer_size=_READ_BYTES), group, names, self.piece_rows)
        while at < number:
            next(pieces)
            at += 1
        found = next(pieces)
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.pop(next(iter(self._under_way)))
        self._under_way[key] = at + 1, pieces
        return found

    def _file(self, file: DataFile) -> Any:
        found = self._files.pop(file, None)
        if found is None:
            file.check()
            found = _open(file.path)
        while len(self._files) >= _OPEN_MAX:
            self._files.pop(next(iter(self._files)))
        self._files[file] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"piece_rows": self.piece_rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


class Parquet:
    """A sample is a row, as a dict by column; `columns`: those that are read, all if nothing is said."""

    def __init__(self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None) -> None:
        self.path, self._columns = Path(path), None if columns is None else tuple(columns)
        about = _open(self.path)
        self.file = DataFile.found(self.path)
        names = about.schema_arrow.names
        unknown = [name for name in self._columns or () if name not in names]
        if unknown:
            raise ConfigError(
                f"{self.path} has no column {unknown[0]!r:.60}", hint=f"it has {', '.join(map(str, names[:12]))}"
            )
        self.groups = [about.metadata.row_group(group).num_rows for group in range(about.metadata.num_row_groups)]
        about.close()
        self._ends = numpy.cumsum(numpy.array(self.groups, dtype=numpy.int64))
        self._kept = KeptRows(0)
        self.identity = ("Parquet", *self.file.identity, *self.groups, *(self._columns or names))

    def keep_in(self, kept: KeptRows) -> None:
        """The stream's, of all its files."""
        self._kept = kept

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, number: int) -> dict[str, Any]:
        group = int(numpy.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[group - 1]) if group else 0)
        piece, row = divmod(row, self._kept.piece_rows)
        whole = self.groups[group] <= self._kept.piece_rows
        table = self._kept.piece(self.file, self._columns, group, piece, whole=whole)
        return {name: column[row].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}


def _pieces(opened: Any, group: int, columns: list[str] | None, rows: int) -> Iterator[Any]:
    """The rows of a row group, so many at a time."""
    from pyarrow import Table

    held, count = [], 0
    for batch in opened.iter_batches(batch_size=rows, row_groups=[group], columns=columns, use_threads=False):
        held.append(batch)
        count += len(batch)
        while count >= rows:
            table = Table.from_batches(held)
            yield table.slice(0, rows)
            count -= rows
            held = table.slice(rows).to_batches()
    if count:
        yield Table.from_batches(held)


def _open(path: Path, *, buffer_size: int = 0) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Parquet file, and reading it needs the package pyarrow: {error}",
            hint="pip install 'holdfast[parquet]'",
        ) from error
    try:
        return parquet.ParquetFile(path, buffer_size=buffer_size)
    except (OSError, ArrowInvalid) as error:
        raise ConfigError(f"{path} cannot be read as a Parquet file ({error})", hint="give the path of one") from error
