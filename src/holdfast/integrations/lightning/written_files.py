"""Where a trainer writes, the same on all workers: who begins to lead in the middle of a run writes on there.

Owns nothing. A logger that keeps its record elsewhere, or appends to it by itself, needs nothing of this.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger


def chosen_places(trainer: Trainer) -> dict[str, list[Any]]:
    """Where this worker would write. Some look at the directory for that, in which another writes meanwhile."""
    versions = [getattr(logger, "version", None) for logger in trainer.loggers]
    return {
        "versions": [one if isinstance(one, (int, str)) else None for one in versions],
        "folders": [None if one.dirpath is None else str(one.dirpath) for one in _checkpoints(trainer)],
    }


def use_places(trainer: Trainer, places: Mapping[str, Sequence[Any]]) -> None:
    for logger, version in zip(trainer.loggers, places["versions"], strict=False):
        if version is not None and getattr(logger, "_version", version) != version:
            logger._version = version
            if hasattr(logger, "_experiment"):
                logger._experiment = None  # which has opened the files of another version
    for callback, folder in zip(_checkpoints(trainer), places["folders"], strict=False):
        callback.dirpath = folder


def _checkpoints(trainer: Trainer) -> list[Any]:
    return [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]


def write_on(trainer: Trainer) -> None:
    """Lightning's CSV logger begins with an empty file: what is in it is put back."""
    for logger in trainer.loggers:
        if not isinstance(logger, CSVLogger) or logger._experiment is not None:
            continue
        path = Path(logger.log_dir) / "metrics.csv"
        if not path.is_file():
            continue
        text = path.read_text()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file will be deleted
            writer: Any = logger.experiment
        path.write_text(text)
        writer.metrics_keys = next(csv.reader(text.splitlines()), [])
