"""The parameters of a slice as a replicated state: what its updates look like, and what they do.

    initial   the slice's segments, the optimizers' recipe, and what the run begins with. The first one counts
    join      a worker is counted from this clock on
    update    a gradient of each segment, as a codec writes it, and the settings of each group; the worker's clock
              afterwards
    skip      nothing, in the place of an update that was refused

A body is the pieces one after the other, each beginning on a cache line. `capture` writes what `initial` does, with the
number of updates and the clocks, so that a replica and a checkpoint begin in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.core.errors import ConfigError, DivergedError, ProtocolError
from holdfast.core.words import encode_json
from holdfast.servers.codecs import Codec, codec_of
from holdfast.servers.needed_memory import state_bytes
from holdfast.servers.port import Piece
from holdfast.servers.recipe import GroupRecipe, Recipe, Settings, settled
from holdfast.servers.replicated import INITIAL, Answer, Author, Head, Payload
from holdfast.servers.slice_state import SliceState, first_not_finite
from holdfast.servers.slicing import LINE_BYTES, Segment
from holdfast.state.layout import DTYPES

SEGMENTS_MAX = 1 << 16
CLOCK_MAX = 1 << 62
NUMBER_MAX = 1e300  # of a setting
_PADDING = memoryview(bytearray(LINE_BYTES))  # writable, as torch wants what it reads; nobody writes to it


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor, where they lie."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()).cast("B") if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def padded(views: Sequence[memoryview]) -> list[memoryview]:
    """These, each followed by what brings the next one to a cache line."""
    found: list[memoryview] = []
    for view in views:
        found.append(view)
        if missing := -view.nbytes % LINE_BYTES:
            found.append(_PADDING[:missing])
    return found


def padded_bytes(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


def initial_payload(
    segments: Sequence[Segment], dtypes: Sequence[str], recipe: Recipe, pieces: Sequence[Piece], *, updates: int = 0
) -> Answer:
    """What a slice begins with: of each segment its elements, its dtype, its piece."""
    states = [{name: piece.optimizer[name] for name in sorted(piece.optimizer)} for piece in pieces]
    head = {
        "kind": INITIAL,
        "segments": [
            [one.parameter, one.start, one.stop, dtype, recipe.of_parameter[one.parameter]]
            for one, dtype in zip(segments, dtypes, strict=True)
        ],
        "recipes": [{"kind": group.kind, "settings": dict(group.settings)} for group in recipe.groups],
        "optimizer": [{name: [_name(one), one.dim()] for name, one in state.items()} for state in states],
        "updates": updates,
        "clocks": {},
    }
    tensors = [piece.values for piece in pieces] + [one for state in states for one in state.values()]
    return Answer(head, padded([view_of(one) for one in tensors]))


def join_head(clock: int) -> Head:
    return {"kind": "join", "clock": clock}


def update_head(
    clock: int, settings: Sequence[Settings], absent: Sequence[int], codec: str | None = None
) -> dict[str, Any]:
    head = {"kind": "update", "clock": clock, "settings": [dict(one) for one in settings], "absent": list(absent)}
    return head if codec is None else {**head, "codec": codec}


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain_clone(like: torch.Tensor) -> torch.Tensor:
    return like.clone()


class ParameterSlice:
    """`place` copies a segment's values to where they are kept: workers of this host may read them there."""

    def __init__(self, place: Callable[[torch.Tensor], torch.Tensor] = _plain_clone) -> None:
        self._place = place
        self._state: SliceState | None = None
        self._segments: tuple[Segment, ...] = ()
        self._dtypes: tuple[str, ...] = ()
        self._recipe = Recipe((), ())
        self._groups: tuple[int, ...] = ()
        self._clocks: dict[str, tuple[int, int]] = {}  # worker -> incarnation and clock, of those that are counted
        self._optimizer_bytes = 0  # that the first step takes

    @property
    def to_come_bytes(self) -> int:
        """Of memory that the optimizers take with their first step."""
        return self._optimizer_bytes if self._state is not None and not self._state.updates else 0

    @property
    def version(self) -> int:
        return self._state.updates if self._state is not None else 0

    # ---- updates

    def check(self, author: Author, payload: Payload) -> None:
        kind = payload.head.get("kind")
        if kind == INITIAL:
            _Initial(payload).try_out()
        elif kind == "join":
            _whole(payload.head, "clock", CLOCK_MAX)
        elif kind == "update":
            gradients, _, _ = self._update(payload)
            wrong = first_not_finite(gradients)
            if wrong is not None:
                raise DivergedError(
                    f"the update {author.sequence} of {author.worker}.{author.incarnation} has a gradient of parameter "
                    f"{self._segments[wrong].parameter} that is not finite, and is not taken"
                )
        elif kind != "skip":
            raise ProtocolError(f"an update of the kind {str(kind)[:20]!r}")

    def apply(self, author: Author, payload: Payload) -> None:
        kind = payload.head["kind"]
        if kind == INITIAL:
            if self._state is None:
                self._begin(_Initial(payload))
        elif kind == "join":
            self._clocks[author.worker] = (author.incarnation, payload.head["clock"])
        elif kind == "update":
            assert self._state is not None, "the primary has checked it"
            gradients, settings, clock = self._update(payload)
            self._state.apply(gradients, settings)
            if self._clocks.get(author.worker, (0, 0))[0] == author.incarnation:
                self._clocks[author.worker] = (author.incarnation, clock)

    def forget(self, worker: str, incarnation: int) -> None:
        if self._clocks.get(worker, (0, 0))[0] == incarnation:
            del self._clocks[worker]

    def _update(self, payload: Payload) -> tuple[list[torch.Tensor | None], list[Settings], int]:
        if self._state is None:
            raise ProtocolError("an update of a slice that is not created yet")
        head = payload.head
        clock = _whole(head, "clock", CLOCK_MAX)
        settings, absent = head.get("settings"), head.get("absent")
        if not isinstance(settings, list) or not all(isinstance(one, dict) for one in settings):
            raise ProtocolError("an update without the settings of its groups")
        if len(settings) != len(self._recipe.groups):
            raise ProtocolError(f"an update with {len(settings)} groups, and the run has {len(self._recipe.groups)}")
        for one, group in zip(settings, self._recipe.groups, strict=True):
            if settled(one).keys() != group.settings.keys():
                raise ProtocolError("an update with the settings of another optimizer")
            for name, value in one.items():
                if _kind(value) != _kind(group.settings[name]):
                    raise ProtocolError(f"an update whose setting {name} is of another kind than the run's")
        if not isinstance(absent, list) or not all(type(one) is int for one in absent):
            raise ProtocolError("an update that does not say which gradients it lacks")
        return _gradients(payload.body, self._state.values, set(absent), _codec(head.get("codec"))), settings, clock

    def _begin(self, initial: _Initial) -> None:
        values = [self._place(value) for value in initial.values]
        state = SliceState(values, initial.groups, initial.recipe.groups)
        state.give_optimizer_states(initial.states)
        state.updates = initial.updates
        self._optimizer_bytes = initial.to_come_bytes
        self._state, self._segments, self._groups = state, initial.segments, initial.groups
        self._dtypes, self._recipe, self._clocks = initial.dtypes, initial.recipe, dict(initial.clocks)

    # ---- reading

    def read(self, query: Head) -> Answer | None:
        kind = query.get("kind")
        if kind == "clocks":
            clocks = {worker: clock for worker, (_, clock) in self._clocks.items()}
            return Answer({"version": self.version, "clocks": clocks, "created": self._state is not None})
        if kind != "pull":
            raise ProtocolError(f"a query of the kind {str(kind)[:20]!r}")
        at_least = _whole(query, "at_least", CLOCK_MAX)
        floor = _whole(query, "clock_floor", CLOCK_MAX)
        slowest = min((clock for _, clock in self._clocks.values()), default=floor)
        if self._state is None or self.version < at_least or slowest < floor:
            return None
        return Answer({"version": self.version}, [view_of(value) for value in self._state.values])

    def waits_for(self, query: Head) -> str:
        """Why `read` has no answer yet."""
        floor = query.get("clock_floor", 0)
        slow = sorted(f"{worker} at {clock}" for worker, (_, clock) in self._clocks.items() if clock < floor)
        if self._state is None:
            return "the slice is not created yet"
        return f"{', '.join(slow)}, below {floor}" if slow else f"version {self.version} is too old"

    # ---- as a whole

    def capture(self) -> Answer:
        if self._state is None:
            return Answer({"kind": "nothing", "clocks": self._listed_clocks()})
        pieces = [
            Piece(value, state) for value, state in zip(self._state.values, self._state.optimizer_states(), strict=True)
        ]
        answer = initial_payload(self._segments, self._dtypes, self._recipe, pieces, updates=self.version)
        return Answer({**answer.head, "clocks": self._listed_clocks()}, answer.views)

    def _listed_clocks(self) -> dict[str, list[int]]:
        return {worker: list(clock) for worker, clock in sorted(self._clocks.items())}

    def restore(self, payload: Payload) -> None:
        self._state = None
        if payload.head.get("kind") == "nothing":
            self._clocks = _clocks(payload.head.get("clocks"))
            return
        self._begin(_Initial(payload))

    def digest(self) -> str:
        captured = self.capture()
        hasher = xxhash.xxh3_128(encode_json(captured.head))
        for view in captured.views:
            hasher.update(view)
        return hasher.hexdigest()


class _Initial:
    """An initial state as it came. ProtocolError for what no worker would send."""

    def __init__(self, payload: Payload) -> None:
        head = payload.head
        segments, recipes, optimizer = head.get("segments"), head.get("recipes"), head.get("optimizer")
        if not all(isinstance(one, list) for one in (segments, recipes, optimizer)):
            raise ProtocolError("an initial state that lacks a part")
        assert isinstance(segments, list) and isinstance(recipes, list) and isinstance(optimizer, list)
        if len(segments) > SEGMENTS_MAX or len(optimizer) != len(segments):
            raise ProtocolError(f"an initial state with {len(segments)} segments and {len(optimizer)} states")
        self.updates = _whole(head, "updates", CLOCK_MAX)
        self.clocks = _clocks(head.get("clocks"))
        parsed = [_segment(one, len(recipes)) for one in segments]
        self.segments = tuple(segment for segment, _, _ in parsed)
        self.dtypes = tuple(dtype for _, dtype, _ in parsed)
        self.groups = tuple(group for _, _, group in parsed)
        of_parameter = {segment.parameter: group for segment, _, group in parsed}
        length = max(of_parameter, default=-1) + 1
        groups = tuple(_recipe(one) for one in recipes)
        self.recipe = Recipe(groups, tuple(of_parameter.get(number, 0) for number in range(length)))
        kinds = [(DTYPES[dtype], segment.elements) for segment, dtype, _ in parsed]
        named = [_state_kinds(one, segment.elements) for one, (segment, _, _) in zip(optimizer, parsed, strict=True)]
        flat = [(dtype, count or 1) for state in named for _, dtype, count in state]
        tensors = _tensors(payload.body, kinds + flat)
        self.values = [next(tensors) for _ in kinds]
        self.states = [
            {name: next(tensors).reshape((-1,) if count is not None else ()) for name, _, count in state}
            for state in named
        ]
        next(tensors, None)
        self.to_come_bytes = max(0, state_bytes(head) - payload.body.nbytes)

    def try_out(self) -> None:
        """Step the optimizers on an element of each segment: what they cannot do must not enter the log."""
        tried = set()
        for segment, value, state, group in zip(self.segments, self.values, self.states, self.groups, strict=True):
            kinds = (group, value.dtype, *((name, one.dtype, one.dim()) for name, one in state.items()))
            if kinds in tried:
                continue
            tried.add(kinds)
            try:
                one = SliceState([value[:1].clone()], [0], [self.recipe.groups[group]])
                one.give_optimizer_states([{name: item[:1] if item.dim() else item for name, item in state.items()}])
                one.apply([torch.zeros(1, dtype=value.dtype)], [self.recipe.groups[group].settings])
            except Exception as error:  # whatever torch says to it
                raise ProtocolError(
                    f"parameter {segment.parameter} cannot be trained so: {str(error).splitlines()[0][:200]}"
                ) from error


def _codec(name: object) -> Codec | None:
    try:
        return codec_of(name) if name is not None else None
    except ConfigError as error:
        raise ProtocolError(f"an update in a form that nobody knows: {error.message}") from error


def _gradients(
    body: memoryview, values: Sequence[torch.Tensor], absent: set[int], codec: Codec | None
) -> list[torch.Tensor | None]:
    """Of each of the values, None of those that are absent; where they lie in the body, or decoded from it."""
    present = [value for number, value in enumerate(values) if number not in absent]
    kinds = [
        codec.kinds(value.numel())
        if codec is not None and value.is_floating_point()
        else [(value.dtype, value.numel())]
        for value in present
    ]
    tensors = _tensors(body, [kind for some in kinds for kind in some])
    found: list[torch.Tensor] = []
    for value, some in zip(present, kinds, strict=True):
        pieces = [next(tensors) for _ in some]
        coded = codec is not None and value.is_floating_point()
        found.append(codec.decode(pieces, value.numel()).to(value.dtype) if codec is not None and coded else pieces[0])
    next(tensors, None)
    given = iter(found)
    return [None if number in absent else next(given) for number in range(len(values))]


def _kind(value: Any) -> tuple[Any, ...]:
    """What of a setting must stay as it was in the beginning, so that what was tried out then can be applied."""
    if isinstance(value, list):
        return tuple(_kind(item) for item in value)
    if type(value) in (int, float):
        return ("number", math.isfinite(value) and abs(value) < NUMBER_MAX)
    return (type(value).__name__,)


def captured_pieces(payload: Payload) -> Iterator[tuple[Segment, Piece]]:
    """What is in a captured slice."""
    initial = _Initial(payload)
    for segment, values, state in zip(initial.segments, initial.values, initial.states, strict=True):
        yield segment, Piece(values, state)


def captured_clocks(head: Head) -> dict[str, int]:
    return {worker: clock for worker, (_, clock) in _clocks(head.get("clocks")).items()}


def _tensors(body: memoryview, kinds: Sequence[tuple[torch.dtype, int]]) -> Iterator[torch.Tensor]:
    """The pieces of a body, where they lie; together they must be all of it."""
    needed = sum(padded_bytes(dtype.itemsize * count) for dtype, count in kinds)
    if body.nbytes != needed:
        raise ProtocolError(f"a body of {body.nbytes} bytes, and it should have {needed}")
    whole = torch.frombuffer(body, dtype=torch.uint8) if needed else torch.empty(0, dtype=torch.uint8)
    position = 0
    for dtype, count in kinds:
        nbytes = dtype.itemsize * count
        yield whole[position : position + nbytes].view(dtype) if nbytes else torch.empty(0, dtype=dtype)
        position += padded_bytes(nbytes)


def _is_dtype(name: Any) -> bool:
    return isinstance(name, str) and name in DTYPES


def _segment(value: Any, groups: int) -> tuple[Segment, str, int]:
    if not isinstance(value, list) or len(value) != 5 or not _is_dtype(value[3]):
        raise ProtocolError("an initial state with what is no segment")
    parameter, start, stop, dtype, group = value
    if not all(type(one) is int for one in (parameter, start, stop, group)):
        raise ProtocolError("an initial state with what is no segment")
    if not 0 <= parameter < SEGMENTS_MAX or not 0 <= start < stop <= CLOCK_MAX or not 0 <= group < groups:
        raise ProtocolError("an initial state with a segment that cannot be")
    return Segment(parameter, start, stop), dtype, group


def _recipe(value: Any) -> GroupRecipe:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ProtocolError("an initial state with what is no optimizer")
    settings = value.get("settings")
    if not isinstance(settings, dict):
        raise ProtocolError("an initial state with an optimizer without settings")
    recipe = GroupRecipe(value["kind"], settings)
    recipe.build([])
    return recipe


def _state_kinds(value: Any, elements: int) -> list[tuple[str, torch.dtype, int | None]]:
    if not isinstance(value, dict) or len(value) > 64:
        raise ProtocolError("an initial state with what is no optimizer's state")
    found: list[tuple[str, torch.dtype, int | None]] = []
    for name in sorted(value):
        kind = value[name]
        if not isinstance(kind, list) or len(kind) != 2 or not _is_dtype(kind[0]) or kind[1] not in (0, 1):
            raise ProtocolError("an initial state with what is no optimizer's state")
        found.append((name, DTYPES[kind[0]], elements if kind[1] else None))
    return found


def _clocks(value: Any) -> dict[str, tuple[int, int]]:
    if not isinstance(value, Mapping):
        raise ProtocolError("a state without clocks")
    found = {}
    for worker, clock in value.items():
        if not isinstance(clock, list) or len(clock) != 2 or not all(type(one) is int for one in clock):
            raise ProtocolError("a state with what is no clock")
        found[worker] = (clock[0], clock[1])
    return found


def _whole(fields: Head, name: str, limit: int) -> int:
    value = fields.get(name, 0)
    if type(value) is not int or not 0 <= value <= limit:
        raise ProtocolError(f"the {name} {str(value)[:20]!r}")
    return value
