"""Which rows: compiled ones where they can be had."""

from __future__ import annotations

from holdfast.native.choosing import native_wanted
from holdfast.tables.rows import native
from holdfast.tables.rows.plain import PlainKernels
from holdfast.tables.rows.port import Kernels


def kernels() -> Kernels:
    if native_wanted(native.available, "the rows of tables", "numpy"):
        return native.NativeKernels()
    return PlainKernels()
