"""A file of data as it was when a stream was opened: what makes it another one, and whether it still is the same.

Two files of one size are told apart by their base names and by a hash of a few blocks of each, which is found in
moments for thousands of files. A change that leaves the name, the size and these blocks as they are is not seen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.core.errors import ConfigError

_BLOCKS, _BLOCK_BYTES = 4, 4096  # at the beginning, at the end, and evenly between
UNCHANGED = "a stream's files must not change during a run: begin another one over the files as they are"


@dataclass(frozen=True)
class DataFile:
    path: Path
    size: int
    changed_ns: int
    content: str  # a hash of a few blocks

    @classmethod
    def found(cls, path: Path) -> DataFile:
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                return cls(path, about.st_size, about.st_mtime_ns, _content(file.fileno(), about.st_size))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})", hint="give the path of a file") from error

    @property
    def identity(self) -> tuple[str, int, str]:
        """The same on every host that has this file, in whatever directory."""
        return (self.path.name, self.size, self.content)

    def is_in(self, descriptor: int) -> bool:
        """Whether what is open there is this file: it may have been touched, or copied back."""
        about = os.fstat(descriptor)
        if about.st_size != self.size:
            return False
        return about.st_mtime_ns == self.changed_ns or _content(descriptor, self.size) == self.content

    def check(self) -> None:
        """ConfigError if another file is at its path by now."""
        try:
            with self.path.open("rb") as file:
                same = self.is_in(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read any more ({error.strerror})", hint=UNCHANGED) from error
        if not same:
            raise self.changed()

    def changed(self) -> ConfigError:
        return ConfigError(f"{self.path} has changed since the stream was opened", hint=UNCHANGED)


def _content(descriptor: int, size: int) -> str:
    found = xxhash.xxh3_64()
    last = max(0, size - _BLOCK_BYTES)
    for place in range(_BLOCKS):
        found.update(os.pread(descriptor, _BLOCK_BYTES, last * place // (_BLOCKS - 1)))
    return found.hexdigest()
