"""What a drilled run has left in storage: whether its newest checkpoint is whole, and which one is the best."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.converting.exporting import weights_of
from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest, read_selected, verify
from holdfast.checkpoint.saving.retention import Keep, best_of
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.core.errors import HoldfastError
from holdfast.state.digest import digest_tensors


def damaged(storage: Path) -> str | None:
    """What is wrong with the newest checkpoint; None if there is none."""
    try:
        place = open_storage(str(storage))
        newest = next((one.step for one in list_checkpoints(place) if one.committed), None)
        return None if newest is None else "; ".join(verify(place, newest))
    except HoldfastError as error:
        return str(error).partition("\n")[0]


def best(storage: Path, criterion: str) -> str:
    """The step and the digest of the best checkpoint's weights, in words; or why there is none."""
    if not criterion:
        return ""
    try:
        place = open_storage(str(storage))
        manifests = {one.step: read_manifest(place, one.step) for one in list_checkpoints(place) if one.committed}
        step = best_of([(step, manifest.metrics) for step, manifest in manifests.items()], Keep(best=criterion))
        if step is None:
            return f"no step, since no checkpoint has the metric of {criterion}"
        weights = weights_of(manifests[step])
        tensors = read_selected(place, manifests[step], weights.values())
        digest = digest_tensors((name, tensors[number]) for name, number in sorted(weights.items()))
        name = criterion.rpartition(":")[0]
        return f"step {step}, {name} {manifests[step].metrics[name]!r}, weights {digest}"
    except HoldfastError as error:
        return f"nobody knows which step: {str(error).partition(chr(10))[0]}"
