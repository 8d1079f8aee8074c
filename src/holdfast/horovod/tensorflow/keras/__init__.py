"""The same as holdfast.horovod.keras, under the other name that Horovod has for it."""

from __future__ import annotations

from holdfast.horovod.keras import *  # noqa: F403
from holdfast.horovod.keras import __all__ as __all__
from holdfast.horovod.tensorflow.keras import callbacks as callbacks  # type: ignore[no-redef]
from holdfast.horovod.tensorflow.keras import elastic as elastic  # type: ignore[no-redef]
