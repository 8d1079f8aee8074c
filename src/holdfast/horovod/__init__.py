"""Horovod's API on Holdfast: `import holdfast.horovod.torch as hvd`, or `install()` and then `import horovod.torch`.

    exchange/     named, asynchronous collectives between ranks, for any framework
    world/        which workers are ranks, and how a world forms anew
    torch/        the face for PyTorch
    tensorflow/   the face for TensorFlow, which takes its tensors to that of PyTorch
    keras/        the face for Keras 3 on TensorFlow

`holdfast run --horovod script.py` installs the names before the script begins. See docs/how-to/from-horovod.md.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.placement.horovod_names import install as install

__all__ = ["install", "run"]


def run(*args: Any, **kwargs: Any) -> None:
    """ConfigError: a script is started from outside, and does not start itself."""
    raise ConfigError(
        "horovod.run, which starts workers from within a script, is not there",
        hint="start the script: holdfast horovodrun -np 2 python train.py; or a function with holdfast.launch",
    )
