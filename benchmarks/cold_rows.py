"""Rows of a table on disk: SQLite, which the table uses, beside LMDB where it is installed (`pip install lmdb`).

    python benchmarks/cold_rows.py
    python benchmarks/cold_rows.py --json f.json

Records of one size under random 64-bit ids are written in one transaction, some are read at random, in the way that
each store is read fastest, and those are deleted. Nothing is synced: the file need not survive its process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sqlite3
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import conclude

IDS_AT_ONCE = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--read", type=int, default=50_000)
    parser.add_argument("--bytes", type=int, default=528, help="of a record: 64 values with Adagrad")
    parser.add_argument("--check", action="store_true", help="there are no bars")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    draws = random.Random(1)
    ids = [draws.getrandbits(63) for _ in range(args.rows)]
    some = sorted(draws.sample(ids, args.read))
    record = os.urandom(args.bytes)
    figures: dict[str, float] = {}
    print(f"{'store':<8} {'written/s':>11} {'read/s':>11} {'deleted/s':>11} {'bytes/row':>10}")
    for name, store in (("sqlite", Sqlite), ("lmdb", Lmdb)):
        if name == "lmdb" and importlib.util.find_spec("lmdb") is None:
            print("lmdb: not installed")
            continue
        with tempfile.TemporaryDirectory() as directory:
            made = store(Path(directory))
            found = {
                "written_per_s": args.rows / timed(lambda made=made: made.write(sorted(ids), record)),
                "bytes_per_row": made.size() / args.rows,
                "read_per_s": args.read / timed(lambda made=made: made.read(some)),
                "deleted_per_s": args.read / timed(lambda made=made: made.delete(some)),
            }
        figures |= {f"{name}_{what}": value for what, value in found.items()}
        rates = " ".join(f"{found[what]:>11,.0f}" for what in ("written_per_s", "read_per_s", "deleted_per_s"))
        print(f"{name:<8} {rates} {found['bytes_per_row']:>10.0f}")
    return conclude(args, figures, [])


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Sqlite:
    def __init__(self, directory: Path) -> None:
        self._path = directory / "rows.sqlite3"
        self._rows = sqlite3.connect(self._path, isolation_level=None)
        for setting in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-16384"):
            self._rows.execute(f"PRAGMA {setting}")
        self._rows.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, record BLOB NOT NULL)")

    def write(self, ids: list[int], record: bytes) -> None:
        self._rows.execute("BEGIN")
        self._rows.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", ((one, record) for one in ids))
        self._rows.execute("COMMIT")

    def read(self, ids: list[int]) -> None:
        for start in range(0, len(ids), IDS_AT_ONCE):
            wanted = ",".join(map(str, ids[start : start + IDS_AT_ONCE]))
            self._rows.execute(f"SELECT record FROM rows WHERE id IN ({wanted})").fetchall()

    def delete(self, ids: list[int]) -> None:
        self._rows.execute("BEGIN")
        self._rows.executemany("DELETE FROM rows WHERE id = ?", ((one,) for one in ids))
        self._rows.execute("COMMIT")

    def size(self) -> int:
        return self._path.stat().st_size


class Lmdb:
    def __init__(self, directory: Path) -> None:
        import lmdb

        self._file = directory / "data.mdb"
        self._rows = lmdb.open(str(directory), map_size=1 << 36, sync=False, writemap=True, map_async=True, lock=False)

    def write(self, ids: list[int], record: bytes) -> None:
        with self._rows.begin(write=True) as transaction:
            transaction.cursor().putmulti((struct.pack(">Q", one), record) for one in ids)

    def read(self, ids: list[int]) -> None:
        with self._rows.begin() as transaction:
            transaction.cursor().getmulti([struct.pack(">Q", one) for one in ids])

    def delete(self, ids: list[int]) -> None:
        with self._rows.begin(write=True) as transaction:
            for one in ids:
                transaction.delete(struct.pack(">Q", one))

    def size(self) -> int:
        return self._file.stat().st_blocks * 512


if __name__ == "__main__":
    sys.exit(main())
