"""Between a worker's parameters and the slices' payloads: which bytes of which tensor belong to which slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.core.words import encode_json
from holdfast.servers.compressing import Compressor
from holdfast.servers.parameter_slice import initial_payload, padded, update_head, view_of
from holdfast.servers.port import Initial, Layout
from holdfast.servers.recipe import Settings
from holdfast.servers.replicated import Answer
from holdfast.servers.slicing import Slice, cut

# A slice moves, is copied and is applied as a whole. What is small stays in a processor's cache from its arrival until
# it is applied and passed on; but each slice has a log with messages of its own.
SLICE_BYTES_MIN, SLICE_BYTES_MAX = 8 << 20, 32 << 20  # about
SLICES_MAX = 12  # of each server, as long as none is larger than SLICE_BYTES_MAX


def slices_of(layout: Layout, servers: int) -> int:
    """How many slices a run has: as many for each server."""
    share = -(-sum(size.nbytes for size in layout.sizes) // servers)
    few = max(1, -(-share // SLICE_BYTES_MAX))
    many = max(1, share // SLICE_BYTES_MIN)
    return servers * max(few, min(SLICES_MAX, many))


def fingerprint(layout: Layout) -> str:
    """Of what all workers of a run must have the same: elements, dtypes and optimizers; not the settings."""
    facts = {
        "names": list(layout.names),
        "sizes": [[size.elements, size.itemsize] for size in layout.sizes],
        "dtypes": list(layout.dtypes),
        "of_parameter": list(layout.recipe.of_parameter),
        "groups": [[group.kind, sorted(group.settings)] for group in layout.recipe.groups],
    }
    return xxhash.xxh3_128_hexdigest(encode_json(facts))


class Cutting:
    """A run's parameters in so many slices."""

    def __init__(self, layout: Layout, slices: int) -> None:
        self.layout = layout
        self.slices: tuple[Slice, ...] = cut(layout.sizes, slices)

    def initial(self, one: Slice, initial: Initial) -> Answer:
        pieces = [initial(segment) for segment in one.segments]
        dtypes = [self.layout.dtypes[segment.parameter] for segment in one.segments]
        return initial_payload(one.segments, dtypes, self.layout.recipe, pieces)

    def update(
        self,
        one: Slice,
        gradients: Sequence[torch.Tensor | None],
        settings: Sequence[Settings],
        clock: int,
        compressor: Compressor | None = None,
    ) -> Answer:
        """`gradients` are flat. The views are of the gradients themselves, where nothing compresses them."""
        absent: list[int] = []
        views: list[memoryview] = []
        for number, segment in enumerate(one.segments):
            gradient = gradients[segment.parameter]
            if gradient is None:
                absent.append(number)
            elif compressor is None or not gradient.is_floating_point():
                views.append(view_of(gradient[segment.start : segment.stop]))
            else:
                pieces = compressor.encode(segment.parameter, gradient, segment.start, segment.stop)
                views += [view_of(piece) for piece in pieces]
        codec = compressor.codec.name if compressor is not None else None
        return Answer(update_head(clock, settings, absent, codec), padded(views))

    def destinations(self, one: Slice, into: Sequence[torch.Tensor]) -> list[memoryview]:
        """Where a slice's values go. `into` are flat, and are written through the views."""
        return [view_of(into[segment.parameter][segment.start : segment.stop]) for segment in one.segments]
