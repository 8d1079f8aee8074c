"""Where the erasure code's arithmetic comes from: the ISA-L library, which the pyeclib wheel brings along.

Kept apart from the code itself, so that a command line can say that it is missing without loading torch.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from holdfast.core.errors import ConfigError

FRAGMENTS_MAX = 64  # of a code, in all
TABLE_BYTES = 32  # that `ec_init_tables` makes of each factor


def needs_library(k: int, m: int) -> bool:
    """One parity is a plain XOR, and one fragment of data is only copied."""
    return k > 1 and m > 1


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library; ConfigError if there is none on this machine."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            library.ec_init_tables.restype = None
            library.ec_init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
            library.ec_encode_data.restype = None
            pointers = ctypes.POINTER(ctypes.c_void_p)
            library.ec_encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_char_p, pointers, pointers]
            return library
        except (OSError, AttributeError):
            continue  # of another architecture, or not what its name says
    raise ConfigError(
        "an erasure code with more than one parity needs the ISA-L library, and it is not installed",
        hint="pip install 'holdfast[memory]', or choose --memory plain or K+1",
    )


def _candidates() -> list[str]:
    try:
        files = metadata.files("pyeclib") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [str(Path(str(file.locate()))) for file in files if file.name.startswith("libisal") and ".so" in file.name]
    system = ctypes.util.find_library("isal")
    return [*found, *([system] if system else [])]
