"""Rows through rows.c. All memory is allocated here; the compiled functions never allocate."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.native import compiling
from holdfast.tables.rows.port import (
    KINDS,
    Counts,
    FirstValues,
    Ids,
    Layout,
    MarkValues,
    Records,
    Rule,
    United,
    Values,
)
from holdfast.tables.settings import ROWS_MAX, TableSettings

SOURCE = Path(__file__).with_name("rows.c")
LOAD_MAX = 0.8  # of an index: it doubles then
ROWS_MIN = 1024
RESERVED_BYTES = 16 << 30  # addresses for records, not memory
MAP_NORESERVE = 0x4000  # Linux's; Python has a name for it from 3.13 on
HUGE_BYTES = 4 << 20  # memory from this size on is asked for in large pages: random rows miss the TLB otherwise


class _Rows(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("records", ctypes.c_void_p),
        ("words", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("kind", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class _Marks(ctypes.Structure):
    _fields_ = (("entries", ctypes.c_void_p), ("bits", ctypes.c_int64), ("count", ctypes.c_int64))


class _Rule(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("lr", "decay", "eps", "first", "second", "rest_first", "rest_second")),
        ("correction_first", ctypes.c_void_p),
        ("correction_second", ctypes.c_void_p),
        ("corrections", ctypes.c_int64),
    )


class Memory:
    """Zeros that can grow without being copied, in addresses that are reserved: a page counts once it is written to."""

    def __init__(self, nbytes: int, reserved_bytes: int = 0) -> None:
        try:
            self._map = _mapped(max(nbytes, reserved_bytes))
        except OSError:  # a limit on addresses
            self._map = _mapped(nbytes)
        self.array = self._looked_at(nbytes)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def grow(self, nbytes: int) -> None:
        if nbytes > len(self._map):
            used = len(self.array)
            del self.array
            try:
                self._map.resize(nbytes)  # the kernel moves pages
            except (BufferError, OSError, SystemError):  # somebody looks at it, or this kernel cannot
                larger = _mapped(nbytes)
                larger[:used] = self._map[:used]
                self._map = larger
        self.array = self._looked_at(nbytes)

    def _looked_at(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes)


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


@lru_cache(maxsize=1)
def functions() -> ctypes.CDLL | None:
    loaded = compiling.library(SOURCE)
    if loaded is not None:
        for name in ("index_all", "remove_rows", "marks_all", "unite"):
            getattr(loaded, name).restype = ctypes.c_int64
        for name in ("look_up", "find_all", "put_records", "marks_get", "marks_put", "marks_remove", "add_up", "admit"):
            getattr(loaded, name).restype = None
        loaded.step_rows.restype = None
    return loaded


def available() -> bool:
    return functions() is not None


def _c() -> ctypes.CDLL:
    loaded = functions()
    assert loaded is not None, "asked only where it is available"
    return loaded


class NativeKernels:
    def unite(self, ids: Ids, times: Counts | None) -> United:
        count = len(ids)
        bits = max(4, (2 * count - 1).bit_length())
        scratch, which = np.zeros(1 << bits, dtype=np.uint32), np.empty(count, dtype=np.int32)
        unique, seen = np.empty(count, dtype=np.uint64), np.empty(count, dtype=np.uint32)
        given: tuple[Any, ...] = _address(ids), None if times is None else _address(times), _size(count)
        given += _address(scratch), _size(bits), _address(which), _address(unique), _address(seen)
        found = _c().unite(*given)
        return United(unique[:found], which, seen[:found])

    def add_up(self, united: United, gradients: Values) -> Values:
        count, dim = gradients.shape
        sums = np.empty((len(united.ids), dim), dtype=np.float32)
        reached = np.zeros(len(united.ids), dtype=np.uint8)
        given = _address(gradients), _address(united.which), _size(count), _size(dim)
        _c().add_up(*given, _address(reached), _address(sums))
        return sums

    def rows(self, settings: TableSettings) -> NativeRows:
        return NativeRows(settings)

    def marks(self) -> NativeMarks:
        return NativeMarks()


class NativeMarks:
    def __init__(self) -> None:
        self._size = _Marks(bits=8)
        self._memory = Memory(16 << 8)
        self._size.entries = self._memory.address

    def __len__(self) -> int:
        return int(self._size.count)

    @property
    def nbytes(self) -> int:
        return 16 << int(self._size.bits)

    @property
    def reference(self) -> Any:
        return ctypes.byref(self._size)

    def reserve(self, more: int) -> None:
        needed, bits = len(self) + more, int(self._size.bits)
        if needed <= LOAD_MAX * (1 << bits):
            return
        while needed > LOAD_MAX * (1 << bits):
            bits += 1
        ids, marks = self.all()
        self._memory = Memory(16 << bits)
        self._size = _Marks(self._memory.address, bits, 0)
        self.put(ids, marks)

    def get(self, ids: Ids) -> MarkValues:
        found = np.empty(len(ids), dtype=np.uint64)
        _c().marks_get(self.reference, _address(ids), _size(len(ids)), _address(found))
        return found

    def put(self, ids: Ids, marks: MarkValues) -> None:
        self.reserve(len(ids))
        _c().marks_put(self.reference, _address(ids), _address(marks), _size(len(ids)))

    def remove(self, ids: Ids) -> None:
        _c().marks_remove(self.reference, _address(ids), _size(len(ids)))

    def all(self) -> tuple[Ids, MarkValues]:
        ids, marks = np.empty(len(self), dtype=np.uint64), np.empty(len(self), dtype=np.uint64)
        _c().marks_all(self.reference, _address(ids), _address(marks))
        return ids, marks


class NativeRows:
    def __init__(self, settings: TableSettings) -> None:
        self.layout = Layout.of(settings)
        self._first = FirstValues.of(settings)
        self.clear()

    def clear(self) -> None:
        self.candidates = NativeMarks()
        self._room = ROWS_MIN
        self._records = Memory(ROWS_MIN * self.layout.nbytes, RESERVED_BYTES)
        self._index = Memory(8 << 11)
        first = self._first
        self._size = _Rows(
            entries=self._index.address,
            bits=11,
            records=self._records.address,
            words=self.layout.words,
            dim=self.layout.dim,
            count=0,
            seed=first.seed,
            kind=int(not first.uniform),
            scale=float(first.scale),
        )

    def __len__(self) -> int:
        return int(self._size.count)

    @property
    def nbytes(self) -> int:
        return len(self) * self.layout.nbytes + (8 << int(self._size.bits)) + self.candidates.nbytes

    def records(self) -> Records:
        used = self._records.array[: len(self) * self.layout.nbytes]
        return used.view(np.uint32).reshape(-1, self.layout.words)

    def _reserve(self, more: int) -> None:
        needed = len(self) + more
        assert needed <= ROWS_MAX, "a shard with more rows than it has numbers for"
        if needed > self._room:
            self._room = max(needed, self._room + self._room // 4)
            self._records.grow(self._room * self.layout.nbytes)
            self._size.records = self._records.address
        bits = int(self._size.bits)
        if needed > LOAD_MAX * (1 << bits):
            while needed > LOAD_MAX * (1 << bits):
                bits += 1
            self._size.entries, self._size.bits = None, bits
            self._index = Memory(8 << bits)
            self._size.entries = self._index.address
            twice = _c().index_all(ctypes.byref(self._size))
            assert not twice, "an id is there twice"

    def look_up(self, ids: Ids) -> Values:
        out = np.empty((len(ids), self.layout.dim), dtype=np.float32)
        _c().look_up(ctypes.byref(self._size), _address(ids), _size(len(ids)), _address(out))
        return out

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        found = np.empty(len(ids), dtype=np.int64)
        _c().find_all(ctypes.byref(self._size), _address(ids), _size(len(ids)), _address(found))
        return found

    def step(self, united: United, sums: Values, rule: Rule, *, update: int, admit: int) -> None:
        count = len(united.ids)
        self._reserve(count)
        if admit > 1:
            self.candidates.reserve(count)
        found, size = np.empty(count, dtype=np.int64), ctypes.byref(self._size)
        given = _address(united.ids), _address(united.seen), _size(count)
        changed = ctypes.c_uint64(update)
        _c().admit(size, self.candidates.reference, *given, ctypes.c_uint64(admit), changed, _address(found))
        told = _Rule(
            KINDS.index(rule.kind),
            *(float(one) for one in (rule.lr, rule.decay, rule.eps, *rule.betas, *rule.rests)),
            *(one.ctypes.data for one in rule.corrections),
            len(rule.corrections[0]),
        )
        _c().step_rows(size, _address(found), _size(count), _address(sums), ctypes.byref(told), changed)

    def put(self, records: Records) -> None:
        self._reserve(len(records))
        _c().put_records(ctypes.byref(self._size), _address(records), _size(len(records)))

    def remove(self, ids: Ids) -> int:
        return int(_c().remove_rows(ctypes.byref(self._size), _address(ids), _size(len(ids))))


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _size(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)
