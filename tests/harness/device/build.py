"""Compiles the simulated device with torch's own headers: once for each version of torch and of its sources.

    python -m tests.harness.device.build      about a minute; `make install` does it

Owns the folder in which the compiled module is kept, and writes only there. Needs g++; without it the tests of devices
are skipped, and say so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
NAME = "simulated_device"
FOLDER = Path(__file__).parents[3] / ".tools" / "device"


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])


def place() -> Path:
    """Where the module of these sources and this torch is, once it is compiled."""
    mark = hashlib.blake2b(f"{torch.__version__} {sys.version}".encode(), digest_size=6)
    for source in sources():
        mark.update(source.read_bytes())
    folder = Path(os.environ.get("SIMULATED_DEVICE_FOLDER", FOLDER))
    return folder / mark.hexdigest() / f"{NAME}.so"


def build() -> Path | None:
    """None: there is no compiler."""
    made = place()
    compiler = shutil.which("g++")
    if made.exists() or compiler is None:
        return made if made.exists() else None
    made.parent.mkdir(parents=True, exist_ok=True)
    partial = made.with_name(f"{os.getpid()}.so")
    includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = [f"-L{path}" for path in library_paths()]
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=" + NAME),
            *("-DTORCH_API_INCLUDE_EXTENSION_H", *includes, str(HERE / "device.cpp"), "-o", str(partial)),
            *(*libraries, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        ],
        check=True,
    )
    partial.replace(made)
    return made


if __name__ == "__main__":
    print(build() or "g++ is not here: the tests of devices will be skipped")
