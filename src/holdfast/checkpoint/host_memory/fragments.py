"""Which host keeps what of a snapshot in its memory, and what the files there are called.

Plain, a host keeps all parts. With a code k+m, a part's file is filled up with zeros and cut into k fragments, to which
m parities are added; fragment i of part p is kept by host (p + i) modulo the number of hosts, those of the view sorted
by name. So the fragments of a part are spread as evenly as they can be, and so is the work. Where that would give one
host as much as a whole part, it keeps the part.

A fragment's name says all that a reader needs: of which file, which fragment of which code, how long the file is, and
the digest of the fragment's own bytes. Pure arithmetic; owns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.parts import HEADER_BYTES_MAX, PART_BYTES, number_of
from holdfast.checkpoint.host_memory.erasure import Code, fragment_bytes
from holdfast.checkpoint.host_memory.isal import FRAGMENTS_MAX
from holdfast.core.words import host_of

FILE_BYTES_MAX = 2 * (PART_BYTES + HEADER_BYTES_MAX)  # of a part; what says more is not one of ours
_NAME = re.compile(
    r"(part-\d{4,9}-[0-9a-f]{32}\.safetensors)\.(\d{1,2})of(\d{1,2})\+(\d{1,2})\.(\d{1,10})-([0-9a-f]{32})"
)


@dataclass(frozen=True)
class PlaceAmongHosts:
    """Where a worker stands in its view: which of the hosts is its own, and which of that host's workers it is."""

    hosts: int
    host: int
    workers: int
    worker: int

    @classmethod
    def of(cls, me: str, members: Sequence[str]) -> PlaceAmongHosts:
        hosts = sorted({host_of(member) for member in members})
        near = [member for member in members if host_of(member) == host_of(me)]
        return cls(len(hosts), hosts.index(host_of(me)), len(near), near.index(me))


@dataclass(frozen=True)
class Fragment:
    file: str  # the part's, inside the directory
    index: int
    k: int
    m: int
    size: int  # of the part's file
    digest: str

    @property
    def name(self) -> str:
        return f"{self.file}.{self.index}of{self.k}+{self.m}.{self.size}-{self.digest}"

    @property
    def length(self) -> int:
        return fragment_bytes(self.size, self.k)

    @classmethod
    def parse(cls, name: str) -> Fragment | None:
        """None: it is something else."""
        match = _NAME.fullmatch(name)
        if match is None or number_of(match[1]) is None:
            return None
        index, k, m, size = (int(match[group]) for group in (2, 3, 4, 5))
        if k < 1 or m < 1 or k + m > FRAGMENTS_MAX or index >= k + m or not 0 < size <= FILE_BYTES_MAX:
            return None
        found = cls(match[1], index, k, m, size, match[6])
        return found if found.name == name else None  # not with leading zeros


def code_for(kind: tuple[int, int] | None, hosts: int) -> Code | None:
    """The code that so many hosts use; None: each keeps whole parts."""
    if kind is None or -(-sum(kind) // hosts) >= kind[0]:
        return None
    return Code(*kind)


def indices_of(number: int, code: Code, place: PlaceAmongHosts) -> list[int]:
    """The fragments of a part that this host keeps."""
    return [index for index in range(code.k + code.m) if (number + index) % place.hosts == place.host]


def kept_by(place: PlaceAmongHosts, kind: tuple[int, int] | None, parts: int) -> frozenset[int]:
    """The parts that this worker keeps for its host, whole or in fragments."""
    code = code_for(kind, place.hosts)
    mine = (number for number in range(parts) if number % place.workers == place.worker)
    return frozenset(number for number in mine if code is None or indices_of(number, code, place))
