"""Rows of Parquet files as samples, by row groups: a source for streams.

A file is read a row group at a time, since nothing smaller can be read by itself. So the stream's blocks are row
groups, and those of a window are kept decoded; there are `groups` of them in a process, of all files. Owns these, and
the files that are open in this process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from holdfast.core.errors import ConfigError

_OPEN_MAX = 16


class KeptGroups:
    """Row groups as they were decoded, the last used ones."""

    def __init__(self) -> None:
        self.most = 2
        self._tables: dict[tuple[Path, int], Any] = {}
        self._files: dict[Path, tuple[int, Any]] = {}

    def table(self, path: Path, group: int, columns: Sequence[str] | None) -> Any:
        found = self._tables.pop((path, group), None)
        if found is None:
            while len(self._tables) >= self.most:
                self._tables.pop(next(iter(self._tables)))
            found = self._file(path).read_row_group(group, columns=columns, use_threads=False)
        self._tables[path, group] = found
        return found

    def _file(self, path: Path) -> Any:
        process, found = self._files.pop(path, (0, None))
        if found is None or process != os.getpid():  # a forked process would move the other one's place in the file
            found = _open(path)
        while len(self._files) >= _OPEN_MAX:
            self._files.pop(next(iter(self._files)))
        self._files[path] = os.getpid(), found
        return found


_GROUPS = KeptGroups()


class Parquet:
    """A sample is a row, as a dict by column; `columns`: those that are read, all if nothing is said."""

    def __init__(self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None) -> None:
        self.path, self._columns = Path(path), None if columns is None else list(columns)
        about = _open(self.path)
        names = about.schema_arrow.names
        unknown = [name for name in self._columns or () if name not in names]
        if unknown:
            raise ConfigError(
                f"{self.path} has no column {unknown[0]!r:.60}", hint=f"it has {', '.join(map(str, names[:12]))}"
            )
        sizes = [about.metadata.row_group(group).num_rows for group in range(about.metadata.num_row_groups)]
        self._ends = numpy.cumsum(numpy.array(sizes, dtype=numpy.int64))
        self.block = max(sizes, default=1)  # samples that are read together
        self.identity = ("Parquet", *sizes, *(self._columns or names))
        about.close()

    def keep(self, groups: int) -> None:
        """So many row groups are needed at a time."""
        _GROUPS.most = max(_GROUPS.most, groups)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, number: int) -> dict[str, Any]:
        group = int(numpy.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[group - 1]) if group else 0)
        table = _GROUPS.table(self.path, group, self._columns)
        return {name: column[row].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}


def _open(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} is a Parquet file, and reading it needs the package pyarrow: {error}",
            hint="pip install 'holdfast[parquet]'",
        ) from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, ArrowInvalid) as error:
        raise ConfigError(f"{path} cannot be read as a Parquet file ({error})", hint="give the path of one") from error
