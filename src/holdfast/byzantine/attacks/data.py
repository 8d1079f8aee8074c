"""Attacks on a participant's own data: it then trains as ever, and what it sends is a real update of a wrong task."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class LabelFlip:
    """Every label y becomes classes - 1 - y, or `source` becomes `target`. Tolpegin et al. 2020; Allen-Zhu et al.
    2020.
    """

    classes: int
    source: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        chosen = [one for one in (self.source, self.target) if one is not None]
        if self.classes < 2 or len(chosen) == 1 or not all(0 <= one < self.classes for one in chosen):
            raise ConfigError(f"{self!r} flips nothing", hint="two classes at least; source and target both or neither")

    def __call__(self, labels: torch.Tensor) -> torch.Tensor:
        if self.source is None or self.target is None:
            return self.classes - 1 - labels
        return torch.where(labels == self.source, self.target, labels)


@dataclass(frozen=True)
class BackdoorTrigger:
    """A square of `size` by `size` in the last corner of a part of the images, which are then labelled `target`.

    `stamp` puts it on images, to see afterwards how often the model obeys. Gu et al. 2017 (BadNets); Bagdasaryan et
    al. 2020.
    """

    target: int
    size: int = 2
    value: float = 1.0
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1 or not 0.0 < self.share <= 1.0 or self.target < 0:
            raise ConfigError(f"{self!r} marks no image", hint="size >= 1, 0 < share <= 1, a label as target")

    def stamp(self, images: torch.Tensor) -> torch.Tensor:
        if images.ndim < 3 or min(images.shape[-2:]) < self.size:
            raise ConfigError(f"images are (n, …, height, width), not {tuple(images.shape)}", hint="reshape them")
        marked = images.clone()
        marked[..., -self.size :, -self.size :] = self.value
        return marked

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The poisoned data: a share of the images, chosen by the seed, marked and labelled anew."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(images), generator=generator)[: max(1, round(self.share * len(images)))]
        images, labels = images.clone(), labels.clone()
        images[chosen] = self.stamp(images[chosen])
        labels[chosen] = self.target
        return images, labels
