"""No loop waits for storage that is away; only the end of the script does, and what it has then is saved or told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import dataset, mlp, sgd
from torch.nn import functional as F

import holdfast
from holdfast.checkpoint.restoring.reading import newest_valid
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.core.errors import StorageUnavailable, Unsaved
from holdfast.engine.transfer import checkpointing, last_save

Join = Callable[..., holdfast.Run]
EPOCHS = 6


class Hanging(LocalStorage):
    """Its writes of checkpoints do not come back until it is let go."""

    go = threading.Event()
    answer = ""

    def write(self, name: str, data: memoryview) -> None:
        if name.startswith("checkpoint-"):
            assert self.go.wait(60.0)
            if self.answer:
                raise StorageUnavailable(self.answer)
        super().write(name, data)


def through_epochs(join: Join, place: Path) -> holdfast.Run:
    torch.manual_seed(0)
    training = sgd(mlp())
    run = join(training.model, training.optimizer, dataset(), batch_size=8, shards=4, checkpoint=str(place))
    for epoch in range(EPOCHS):
        for step in run.epochs(epoch + 1):
            for x, y in step:
                F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
    return run


@pytest.fixture(autouse=True)
def hanging(monkeypatch: pytest.MonkeyPatch) -> type[Hanging]:
    monkeypatch.setattr(Hanging, "go", threading.Event())
    monkeypatch.setattr(Hanging, "answer", "")
    monkeypatch.setattr(checkpointing, "open_storage", lambda uri: Hanging(Path(uri)))
    return Hanging


def test_loops_go_on_and_the_last_state_arrives(joined: Join, tmp_path: Path) -> None:
    began = time.monotonic()
    run = through_epochs(joined, tmp_path)
    assert time.monotonic() - began < 30.0  # each of the loops would have stood for a minute
    assert newest_valid(LocalStorage(tmp_path), warn=pytest.fail) is None
    threading.Timer(0.2, Hanging.go.set).start()
    run.close()
    found = newest_valid(LocalStorage(tmp_path), warn=pytest.fail)
    assert found is not None and found[0].step == run.step


def test_what_storage_does_not_take_at_the_end_is_told_with_its_cause(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(last_save, "AWAY_S", 1.5)
    Hanging.answer = "no route to storage"
    Hanging.go.set()
    run = through_epochs(joined, tmp_path)
    with pytest.raises(Unsaved) as unsaved:
        run.close()
    assert unsaved.value.code == 74
    err = capfd.readouterr().err
    assert "it waits for storage to take the last checkpoint" in err
    assert f"(step {run.step}) is not saved: no route to storage; there is no checkpoint in {tmp_path}" in err
