"""Holdfast on Ray: Ray places the processes, Holdfast keeps the training.

    holdfast.integrations.ray.launch(train, workers=4)      workers are actors, and are replaced when they are lost
    holdfast.integrations.ray.take_part()                   in a function of Ray Train's TorchTrainer, before join

Ray is imported when one of them is called. docs/how-to/ray.md.
"""

from __future__ import annotations

from holdfast.integrations.ray.launching import launch
from holdfast.integrations.ray.ray_train import take_part

__all__ = ["launch", "take_part"]
