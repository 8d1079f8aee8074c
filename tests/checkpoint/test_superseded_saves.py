"""A save that gives way to a newer one must not say of the newer that its state was copied."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format.parts import Part, lay_out
from holdfast.checkpoint.saving import saver as saving
from holdfast.checkpoint.saving.saved import SaverNews
from holdfast.checkpoint.saving.saver import Doing, Saver
from holdfast.checkpoint.saving.share import Share
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.core.errors import StorageUnavailable
from holdfast.state.codec import flatten, pack_tree
from holdfast.state.snapshot import Snapshot

WAIT_S = 20.0
COPY_S = 0.3


class Down(LocalStorage):
    def write(self, name: str, data: memoryview) -> None:
        raise StorageUnavailable("it is down")


def snapshot(step: int) -> Snapshot:
    tree, tensors = flatten({"weight": torch.full((1000,), float(step))}, sort=True)
    return Snapshot(step, pack_tree(tree), tuple(tensors))


@pytest.mark.parametrize(
    ("storage_class", "count", "waits_in"), [(LocalStorage, 2, Doing.LOOKING), (Down, 1, Doing.STUCK)]
)
def test_the_loop_waits_for_the_newer_copy(
    storage_class: type[LocalStorage], count: int, waits_in: Doing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, copied = threading.Event(), threading.Event()

    def slow(names: Sequence[str], specs: Sequence[Any], step: int) -> list[Part]:
        if step == 2:
            begun.set()
            assert copied.wait(WAIT_S)
        return lay_out(names, specs, step)

    monkeypatch.setattr(saving, "lay_out", slow)
    storage = storage_class(tmp_path)
    told = SaverNews(lambda saved, manifest: None, lambda text: None, lambda down_s: None)
    saver = Saver(lambda: storage, told, run="r", config={})
    # Rank 1 of two, and there is only one part: it waits for that of the other, which never comes.
    assert saver.begin(Share(snapshot(1), count - 1, count, {}))
    with saver._changed:
        assert saver._changed.wait_for(lambda: saver.doing is waits_in, WAIT_S)
    assert saver.begin(Share(snapshot(2), count - 1, count, {}))
    assert begun.wait(WAIT_S)  # the older save is over, and the newer not copied

    copying = threading.Timer(COPY_S, copied.set)
    copying.start()
    saver.wait_copied()
    assert copied.is_set(), "the loop went on while its state was still to be copied"
    copying.join()
    saver.close()
