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

# In every `make test`: one shape for each way in which runs once ended with other bits and no word, or did not end.
# Memory of batches, random numbers before the shards, flags of modules, extras with an order, buffers, parameters that
# a forward changes, strides of hooks, casts that are kept, a backward after the shards, the order of sets, groups and
# caches that come midway, a set that comes late; then an optimizer of whole matrices, a run that says that it is not
# exact, and workers that are made to differ.
SAMPLE = (
    *("odd-offsets-loaders", "drawn-before-shards", "eval-midway", "extra-ordered-dict", "batch-norm"),
    *("buffers-of-all-kinds", "embedding-max-norm", "hook-restrides", "autocast-outside", "backward-after-shards"),
    *("string-order", "group-added-midway", "cache-between-loops", "extra-late-set"),
    *("muon", "own-generator", "average-outside-extras"),
)
