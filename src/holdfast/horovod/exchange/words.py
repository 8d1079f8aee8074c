"""What ranks say to each other about a collective, as types, and whether what they say fits together. Pure.

A request names what a rank wants done with which tensors. Ranks that mean the same collective give it the same name, in
any order; what else must be the same, and what may differ, depends on the kind (`disagreement`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.sharding import misfit
from holdfast.reduce.tree import Range

DIMENSIONS_MAX = 64
SHARDS_MAX = 65536
Shape = tuple[int, ...]


class Kind(IntEnum):
    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    BARRIER = 6
    JOIN = 7

    @property
    def word(self) -> str:
        return self.name.lower()


class Op(IntEnum):
    """How tensors are combined; Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    @property
    def word(self) -> str:
        return self.name.capitalize()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one rank asks for. `splits`: how many rows of an all-to-all go to each rank. `stamp`: when it joined.

    `trouble`: what is wrong with it already here. It is sent all the same, so that the others need not wait.
    `shards`: the reduction has so many leaves, whatever the number of ranks, and this rank brings these `nodes` of the
    tree over them, one set of tensors for each. 0: every rank is a leaf.
    """

    kind: Kind
    name: str = ""  # empty: the next one without a name
    members: int = 0  # the process set
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    op: Op = Op.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    stamp: int = 0
    trouble: str = ""
    shards: int = 0
    nodes: tuple[Range, ...] = ()

    @property
    def key(self) -> str:
        """What ranks find each other by. Requests without a name are counted, whatever they are."""
        return f"{self.kind.word}.{self.name}" if self.name else ""

    @property
    def words(self) -> str:
        return f"{self.kind.word} {self.name!r}" if self.name else f"{self.kind.word} (without a name)"

    def encode(self) -> bytes:
        fields: list[Any] = [self.kind, self.name, self.members, self.dtypes, self.shapes, self.op]
        fields += [self.prescale.hex(), self.postscale.hex(), self.root, self.splits, self.stamp, self.trouble]
        fields += [self.shards, self.nodes]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """ProtocolError for what no rank says."""
        try:
            kind, name, members, dtypes, shapes, op, pre, post, root, splits, stamp, trouble, shards, nodes = (
                json.loads(data)
            )
            request = cls(
                kind=Kind(kind),
                name=str(name),
                members=_whole(members),
                dtypes=tuple(map(str, dtypes)),
                shapes=tuple(tuple(map(_whole, shape)) for shape in shapes),
                op=Op(op),
                prescale=float.fromhex(pre),
                postscale=float.fromhex(post),
                root=_whole(root),
                splits=tuple(map(_whole, splits)),
                stamp=_whole(stamp),
                trouble=str(trouble),
                shards=_whole(shards),
                nodes=tuple((_whole(start), _whole(stop)) for start, stop in nodes),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"not a request for a collective: {data[:80]!r}") from error
        if len(request.dtypes) != len(request.shapes) or any(len(one) > DIMENSIONS_MAX for one in request.shapes):
            raise ProtocolError(f"a request with tensors that cannot be: {data[:80]!r}")
        if request.shards > SHARDS_MAX or any(not start < stop <= request.shards for start, stop in request.nodes):
            raise ProtocolError(f"a request with shards that cannot be: {data[:80]!r}")
        return request


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return value


def disagreement(requests: Mapping[int, Request], joined: Sequence[int] = ()) -> str:
    """Why these requests of ranks are not one collective; empty if they are. The same sentence on every rank."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if not joined and all(request is first for request in requests.values()) and not first.trouble:
        return _impossible(first)
    for rank in ranks:
        if requests[rank].trouble:
            return f"rank {rank}: {requests[rank].trouble}"
    for rank in ranks[1:]:
        if difference := _difference(first, requests[rank], ranks[0], rank):
            return f"the ranks do not agree on {first.words}: {difference}"
    if joined and first.kind not in (Kind.ALLREDUCE, Kind.BARRIER, Kind.JOIN):
        return f"{first.words} cannot be done after rank {min(joined)} has joined: only allreduce can"
    if first.shards:
        brought = [(rank, requests[rank].nodes) for rank in ranks]
        if why := misfit(first.shards, brought, whole=not joined):
            return f"the ranks do not agree on {first.words}: {why}"
    return _impossible(first)


def _difference(one: Request, other: Request, rank: int, another: int) -> str:
    def differ(what: str, mine: Any, theirs: Any) -> str:
        return f"rank {rank} has the {what} {mine}, rank {another} {theirs}"

    if one.kind != other.kind:
        return f"rank {rank} asks for {one.kind.word}, rank {another} for {other.kind.word}"
    if len(one.dtypes) != len(other.dtypes):
        return differ("number of tensors", len(one.dtypes), len(other.dtypes))
    if one.dtypes != other.dtypes:
        return differ("dtype", *_first_difference(one.dtypes, other.dtypes))
    loose = one.kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    shapes = [[shape[1:] if loose and shape else shape for shape in request.shapes] for request in (one, other)]
    ranks_of = [[len(shape) for shape in request.shapes] for request in (one, other)]
    if shapes[0] != shapes[1] or ranks_of[0] != ranks_of[1]:
        return differ("shape", *_first_difference(one.shapes, other.shapes))
    if one.op != other.op:
        return differ("op", one.op.word, other.op.word)
    if (one.prescale, one.postscale) != (other.prescale, other.postscale):
        return differ("scale factors", (one.prescale, one.postscale), (other.prescale, other.postscale))
    if one.shards != other.shards:
        return differ("number of shards", one.shards, other.shards)
    if one.root != other.root:
        return differ("root", one.root, other.root)
    return ""


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, Any]:
    return next((pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]), (one, other))


def _impossible(request: Request) -> str:
    """What cannot be done although all ask for it."""
    if request.kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER) and () in request.shapes:
        return f"{request.words} needs tensors with a first dimension, and got a scalar"
    if request.kind is Kind.REDUCESCATTER and request.op not in (Op.SUM, Op.AVERAGE):
        return f"{request.words} can sum and average, not {request.op.word}"
    if request.shards and (request.kind is not Kind.ALLREDUCE or request.op is Op.ADASUM):
        return f"{request.words} with shards: they are for allreduce, and not for Adasum"
    return ""


def share_of(rows: int, parts: int) -> list[int]:
    """How many of `rows` rows each of so many ranks gets of a reducescatter: the first ones get one more."""
    least, more = divmod(rows, parts)
    return [least + (part < more) for part in range(parts)]
