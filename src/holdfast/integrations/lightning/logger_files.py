"""Loggers of a worker that begins to lead in the middle of a run: they write on where another worker has written.

Owns nothing. A logger that keeps its record elsewhere, or appends to it by itself, needs nothing of this.
"""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger


def chosen_versions(trainer: Trainer) -> list[Any]:
    """As the loggers have chosen them. Some look at the directory for that, which is written meanwhile."""
    found = [getattr(logger, "version", None) for logger in trainer.loggers]
    return [one if isinstance(one, (int, str)) else None for one in found]


def use_versions(trainer: Trainer, versions: list[Any]) -> None:
    for logger, version in zip(trainer.loggers, versions, strict=False):
        if version is not None and getattr(logger, "_version", version) != version:
            logger._version = version
            if hasattr(logger, "_experiment"):
                logger._experiment = None  # which has opened the files of another version


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
