"""Runs of one in this process: `join` changes the process, and the `joined` fixture puts everything back."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import holdfast
from holdfast.placement import exit_status

torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo: once, not in every fork


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., holdfast.Run]]:
    """holdfast.join, whose runs end with the test rather than with the process."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(exit_status, "is_obeyed", True)  # the process goes on, whatever became of the run

    def join(*arguments: Any, **options: Any) -> holdfast.Run:
        return holdfast.join(*arguments, **options)

    try:
        yield join
    finally:
        for end in ends:
            end()
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
