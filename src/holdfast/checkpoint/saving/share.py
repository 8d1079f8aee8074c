"""One worker's share of a save: which parts it holds, their images, and the names of all the others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint.format.manifest import Manifest, directory_of
from holdfast.checkpoint.format.parts import (
    PAGE_BYTES,
    Part,
    digest_of,
    file_name,
    fill,
    flat_bytes,
    header_bytes,
    mark_of,
    number_of,
    seal,
    view_of,
)
from holdfast.checkpoint.host_memory.fragments import PlaceAmongHosts
from holdfast.checkpoint.saving.save_buffer import NeighbourBuffer, SaveBuffer
from holdfast.checkpoint.saving.side_by_side import image_buffer
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import ConfigError
from holdfast.state.layout import TensorSpec, spec_of
from holdfast.state.snapshot import Snapshot

COPIES = 2  # workers that hold each part, or can get at it in the first one's memory
LEAN_S = 0.5  # so long a neighbour may take longer to copy its own parts


@dataclass
class Share:
    """One snapshot on its way."""

    snapshot: Snapshot
    rank: int
    count: int
    metrics: Mapping[str, float]
    began_at: float = 0.0
    mark: int = 0  # in the names of this save's parts and of no other save's, the same for all workers; 0: none
    before: str = ""  # the worker of the rank before, if it is on this host
    last: bool = False  # the state will not change any more: nothing is copied, and all workers write what they can
    held_s: float = 0.0  # so much it has cost training
    layout: Sequence[Part] = ()
    names: tuple[str, ...] = ()
    specs: tuple[TensorSpec, ...] = ()
    files: dict[int, str] = field(default_factory=dict)  # part -> file name, by this worker's own state
    others: dict[int, str] = field(default_factory=dict)  # part -> file name, as found in storage
    images: dict[int, torch.Tensor] = field(default_factory=dict)  # of the parts that this worker holds
    written: set[int] = field(default_factory=set)
    place: PlaceAmongHosts | None = None  # among the hosts, where they keep copies in memory
    kept: frozenset[int] = frozenset()  # the parts that this worker keeps for its host
    neighbour: NeighbourBuffer | None = None  # the worker before this one, whose parts need not be copied here too
    manifest: Manifest | None = None  # as this worker would commit it: by its bytes it knows its own again

    @property
    def step(self) -> int:
        return self.snapshot.step

    def holders(self, number: int) -> tuple[int, ...]:
        """The ranks that hold a part; the first of them writes it."""
        return tuple((number + copy) % self.count for copy in range(min(COPIES, self.count)))

    def name(self, part: Part) -> str:
        """Of its file. A part that this worker holds is hashed for it when it is first asked for."""
        if part.number not in self.files:
            self.seal(part, self.images[part.number])
        return self.files[part.number]

    def seal(self, part: Part, image: torch.Tensor) -> str:
        name = self.files[part.number] = seal(part, image, self.mark)
        return name

    def image(self, part: Part) -> torch.Tensor | None:
        """Of a part that this worker holds or can get at. None: it cannot any more."""
        if self.neighbour is None or not self.leans_for(part):
            return self.images.get(part.number)
        writer = self.holders(part.number)[0]
        theirs = (one for one in self.layout[: part.number] if self.holders(one.number)[0] == writer)
        image = image_buffer(part.size)
        return image if self.neighbour.read(self.mark, sum(_pages(one.size) for one in theirs), image) else None

    def stored(self) -> tuple[Stored, ...]:
        """All parts. Those that others have written are called what they called them."""
        return tuple(Stored(self.others.get(part.number) or self.name(part), part.size) for part in self.layout)

    def missing(self, listed: Sequence[Stored]) -> list[Part]:
        """Which parts are not in a listing of this step's directory."""
        prefix = f"{directory_of(self.step)}/"
        there = {entry.name.removeprefix(prefix): entry.size for entry in listed}
        if not self.mark:
            return [part for part in self.layout if there.get(self.name(part)) != part.size]
        marked: dict[int | None, list[str]] = {}
        for name in there:
            if mark_of(name) == self.mark:
                marked.setdefault(number_of(name), []).append(name)
        missing = []
        for part in self.layout:
            names = marked.get(part.number, [])
            if part.number in self.files:
                names = [name for name in names if name == self.files[part.number]]
            if len(names) == 1 and there[names[0]] == part.size:  # of two, one is wrong, and nobody knows which
                self.others[part.number] = names[0]
            else:
                self.others.pop(part.number, None)
                missing.append(part)
        return missing

    @property
    def held(self) -> list[Part]:
        """In this worker's own memory. What it writes is in front, where others look for it."""
        others = [part for part in self.layout if self.holders(part.number)[0] != self.rank]
        seconds = [part for part in others if self.rank in self.holders(part.number) or part.number in self.kept]
        return self.mine + [part for part in seconds if not self.leans_for(part)]

    def leans_for(self, part: Part) -> bool:
        """It is in the memory of the worker before this one, which writes it unless it is lost."""
        return self.neighbour is not None and self.rank in self.holders(part.number)[1:]

    @property
    def mine(self) -> list[Part]:
        """What this worker writes first."""
        return [part for part in self.layout if self.holders(part.number)[0] == self.rank]

    def buffer_bytes(self) -> int:
        return sum(_pages(part.size) for part in self.held)

    def describe(self, run: str, config: Mapping[str, Any]) -> Manifest:
        return Manifest(
            step=self.step,
            run=run,
            tree=self.snapshot.tree,
            names=self.names,
            specs=self.specs,
            parts=self.stored(),
            config=config,
            metrics=self.metrics,
            created_s=time.time(),
        )

    def copy_to(self, held: SaveBuffer, *, in_a_hurry: Callable[[], bool]) -> None:
        """What this worker holds of the state is copied. Without a mark the rest is hashed: so all names are known."""
        versions = [tensor._version for tensor in self.snapshot.tensors]
        buffer, offset = held.make(self.buffer_bytes(), in_a_hurry=in_a_hurry), 0
        held.begin()
        for part in self.held:
            self._fill(part, buffer[offset : offset + part.size])
            offset += _pages(part.size)
        held.done(self.mark)
        if self.neighbour is not None and not self.neighbour.wait(self.mark, LEAN_S):
            self.let_go()
            for part in self.held:
                if part.number not in self.images:
                    self._fill(part, image_buffer(part.size))
        for part in self.layout:
            if part.number not in self.images and not self.mark:
                self.files[part.number] = name_of(part, self._tensors_of(part))
        if versions != [tensor._version for tensor in self.snapshot.tensors]:
            raise ConfigError(
                f"the state of step {self.step} was changed while it was copied",
                hint="change parameters and optimizer state after the loop over a step's shards, not before or in it",
            )
        self.snapshot = Snapshot(self.step, self.snapshot.tree, ())

    def _fill(self, part: Part, image: torch.Tensor) -> None:
        fill(part, image, self._tensors_of(part))
        self.images[part.number] = image

    def _tensors_of(self, part: Part) -> Sequence[torch.Tensor]:
        """All tensors, of which at least the part's are in this process's memory."""
        return self.snapshot.some_on_host({piece.tensor for piece in part.pieces})

    def let_go(self) -> None:
        """Of the neighbour's memory."""
        if self.neighbour is not None:
            self.neighbour.close()
            self.neighbour = None


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def name_of(part: Part, tensors: Sequence[torch.Tensor]) -> str:
    """Of a part, from the state itself."""
    digests = []
    for piece in part.pieces:
        memory = view_of(flat_bytes(tensors[piece.tensor], spec_of(tensors[piece.tensor])))
        digests.append(digest_of(memory, piece.start, piece.stop - piece.start))
    return file_name(part.number, header_bytes(part, digests))
