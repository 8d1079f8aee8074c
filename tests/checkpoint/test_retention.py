"""What is kept, and that the newest always is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.manifest import manifest_name
from holdfast.checkpoint.library import prune
from holdfast.checkpoint.restoring.reading import Listed, list_checkpoints
from holdfast.checkpoint.saving.retention import Keep, abandoned, delete_checkpoint, superseded
from holdfast.checkpoint.saving.writing import write_state
from holdfast.core.errors import ConfigError, StorageUnavailable
from tests.harness.memory_storage import MemoryStorage

from .conftest import snapshot_of

metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats())
histories = st.dictionaries(st.integers(0, 200), metrics).map(lambda found: list(found.items()))
keeps = st.builds(
    Keep,
    last=st.integers(1, 5),
    every=st.integers(0, 20),
    best=st.sampled_from(["", "loss:min", "loss:max", "accuracy:max"]),
)


@given(histories, keeps)
def test_what_is_kept(history: list[tuple[int, dict[str, float]]], keep: Keep) -> None:
    gone = superseded(history, keep)
    steps = sorted(step for step, _ in history)
    kept = [step for step in steps if step not in gone]
    assert gone == sorted(set(gone)) and set(gone) <= set(steps)
    assert kept[-keep.last :] == steps[-keep.last :], "never the newest"
    if keep.every:
        assert not [step for step in gone if step % keep.every == 0]
    if keep.best:
        name, _, which = keep.best.partition(":")
        values = {step: m[name] for step, m in history if name in m and not math.isnan(m[name])}
        if values:
            best = {"min": min, "max": max}[which](values.values())
            assert min(step for step, value in values.items() if value == best) in kept
    others = [step for step in kept if step not in steps[-keep.last :] and not (keep.every and step % keep.every == 0)]
    assert len(others) <= bool(keep.best)
    assert superseded([entry for entry in history if entry[0] in kept], keep) == [], "once is enough"


@pytest.mark.parametrize(
    "keep",
    [
        Keep(last=0),
        Keep(last=-1),
        Keep(last=True),
        Keep(every=-1),
        Keep(best="loss"),
        Keep(best=":min"),
        Keep(best="a:b"),
    ],
)
def test_what_cannot_be_kept(keep: Keep) -> None:
    with pytest.raises(ConfigError):
        keep.validate()


def test_what_was_never_committed() -> None:
    listed = [
        Listed(step, committed, 1, 1) for step, committed in ((9, False), (7, True), (5, False), (3, True), (1, False))
    ]
    assert abandoned(listed) == [1, 5], "what is newer than the newest may still become one"
    assert abandoned([Listed(1, False, 1, 1)]) == []


def stored(*steps: int) -> MemoryStorage:
    storage = MemoryStorage()
    for step in steps:
        write_state(storage, snapshot_of({"step": step}, step), created_s=0, metrics={"loss": abs(step - 3)})
    return storage


def steps_of(storage: MemoryStorage) -> list[int]:
    return [entry.step for entry in list_checkpoints(storage)]


def test_deleting_takes_the_manifest_first() -> None:
    storage = stored(1, 2)
    deleted: list[str] = []
    delete = storage.delete

    def watched(name: str) -> None:
        deleted.append(name)
        delete(name)

    storage.delete = watched  # type: ignore[method-assign]
    delete_checkpoint(storage, 1)
    assert deleted[0] == manifest_name(1) and len(deleted) == 2 and steps_of(storage) == [2]
    delete_checkpoint(storage, 1)


def test_pruning() -> None:
    storage = stored(1, 2, 3, 4, 5, 6)
    storage.delete(manifest_name(4))
    storage.write("checkpoint-000000000009/part-0000", memoryview(b"under way"))
    keep = Keep(last=1, every=2, best="loss:min")
    assert prune(storage, keep, dry_run=True) == [1, 4, 5]
    assert steps_of(storage) == [9, 6, 5, 4, 3, 2, 1]
    assert prune(storage, keep) == [1, 4, 5]
    assert steps_of(storage) == [9, 6, 3, 2]


def test_what_is_not_whole_does_not_count_as_kept() -> None:
    storage = stored(1, 2, 3, 4)
    storage.write(manifest_name(4), memoryview(b"damaged"))
    storage.delete(next(entry.name for entry in storage.list("checkpoint-000000000003/part-")))
    assert prune(storage, Keep(last=1)) == [1]
    assert steps_of(storage) == [4, 3, 2], "2 is the newest that can be loaded"


def test_pruning_that_is_interrupted_leaves_whole_ones() -> None:
    storage = stored(1, 2)
    storage.fail_with(StorageUnavailable("no answer"), calls={"delete"})
    with pytest.raises(StorageUnavailable):
        prune(storage, Keep(last=1))
    storage.fail_with(None)
    assert [entry.committed for entry in list_checkpoints(storage)] == [True, True]
