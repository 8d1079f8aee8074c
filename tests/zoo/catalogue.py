"""All shapes, by name; in the order of the page of what is supported."""

from __future__ import annotations

from of_models import AUTOGRAD, BUFFERS, LAYERS
from of_optimizers import OPTIMIZERS, SCHEDULES
from of_scripts import DATA, EXTRAS, LOOPS
from shape import Shape

PARTS: dict[str, list[Shape]] = {
    "Optimizers": OPTIMIZERS,
    "Schedules, averages and precision": SCHEDULES,
    "Layers": LAYERS,
    "Autograd, compilers and hooks": AUTOGRAD,
    "Buffers": BUFFERS,
    "Data": DATA,
    "Extras": EXTRAS,
    "Loops": LOOPS,
}
SHAPES = {shape.name: shape for shapes in PARTS.values() for shape in shapes}
assert len(SHAPES) == sum(map(len, PARTS.values())), "two shapes have one name"

# In every `make test`: two optimizers, buffers, loaders' memory, extras with an order, a group that is added, a refusal
# in mid-run, a run that is not exact and says so, and workers that are made to differ.
SAMPLE = (
    *("muon", "batch-norm", "odd-offsets-loaders", "extra-ordered-dict", "group-added-midway", "extra-late-set"),
    *("own-generator", "average-outside-extras"),
)
