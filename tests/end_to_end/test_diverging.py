"""Samples that ruin a step: it is left out, or the run goes back and passes it, and the weights are those of a run
whose script left it out itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import poisoned
import pytest
from forked import agreed, forked
from harness import DEADLINE_S, training

from holdfast.checkpoint.reading import list_checkpoints
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
SCRIPT = poisoned.__file__


def without(*steps: int, arguments: tuple[str, ...] = ()) -> str:
    """The digest of a run on clean samples whose script leaves out these steps."""
    given = ["--without", *map(str, steps), *arguments]
    return agreed(forked(lambda: poisoned.main(given), workers=1))


@pytest.mark.parametrize(("workers", "path"), [(1, "auto"), (2, "auto"), (4, "network")])
@pytest.mark.parametrize("width", [32, 8192], ids=["one round", "two rounds"])
def test_a_skipped_step_leaves_no_trace(workers: int, path: str, width: int) -> None:
    arguments = ("--width", str(width))
    given = ["--non-finite", "skip", "--poisoned", "3", "20", *arguments]
    expected = without(3, 20, arguments=arguments)
    assert agreed(forked(lambda: poisoned.main(given), workers=workers, path=path)) == expected


def test_rewind(tmp_path: Path) -> None:
    options = ["--workers", "3", "--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "8"]
    with training(tmp_path, *options, script=[SCRIPT, "--non-finite", "rewind"]) as run:
        assert run.finish(DEADLINE_S) == without(20)
        for event in read_events(run.directory.events):
            if event["kind"] in ("rewound", "resumed", "skipped", "evicted", "checkpoint"): print(event)
        print(run.log())
