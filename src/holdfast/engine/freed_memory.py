"""Keep freed memory in the process: a step frees and allocates all gradients, the same sizes every time.

By default the C library gives large blocks back to the system when they are freed, and every step pays for fresh,
zeroed pages: with 25 M parameters a fifth of the step (benchmarks/steady_state.py, with and without). The price is
that memory which a script freed for good stays with the process.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """True if the C library took the setting: glibc only, and only if the user has not set it otherwise."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
