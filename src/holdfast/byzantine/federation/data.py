"""Real images for simulations, and how they are dealt to clients: alike, or each with labels of its own.

`digits` are scikit-learn's and need nothing else. Others are the four files of MNIST's format, gzipped or not, in a
directory: `fashion` where Debian's dataset-fashion-mnist puts them, or any directory by its path.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.core.errors import ConfigError

KNOWN_PLACES = {
    "fashion": ("/usr/share/dataset/fashion-mnist", "/usr/share/dataset-fashion-mnist", "/usr/share/fashion-mnist"),
    "mnist": ("/usr/share/dataset/mnist", "/usr/share/mnist"),
}
IDX_MAX = 1 << 28  # bytes
SAMPLES_MIN = 4  # of every client
DRAWS_MAX = 1000


@dataclass(frozen=True)
class Images:
    """Rows of pixels from 0 to 1; every image is `side` by `side`."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    side: int
    classes: int = 10


def load(name: str) -> Images:
    if name == "digits":
        return _digits()
    places = [Path(place) for place in KNOWN_PLACES.get(name, (name,))]
    for place in places:
        if place.is_dir():
            return _idx(place)
    raise ConfigError(
        f"there are no images {name!r}",
        hint="digits comes with scikit-learn; else give the directory with the four files of MNIST's format",
    )


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError("digits needs scikit-learn", hint="pip install 'holdfast[federate]'") from None
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16.0, torch.tensor(labels)
    test = torch.arange(len(x)) % 5 == 0
    return Images(x[~test], y[~test], x[test], y[test], side=8)


def _idx(place: Path) -> Images:
    parts = []
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        found = [path for path in sorted(place.iterdir()) if path.name.replace(".", "-").startswith(f"{stem}-ubyte")]
        if not found:
            raise ConfigError(f"{place} has no {stem}-ubyte", hint="the four files of MNIST's format belong there")
        parts.append(_numbers(found[0]))
    images, labels, test_images, test_labels = parts
    if images.ndim != 3 or len(images) != len(labels) or len(test_images) != len(test_labels):
        raise ConfigError(f"the files in {place} do not belong together", hint="take all four from one data set")
    return Images(
        torch.from_numpy(images.reshape(len(images), -1)).float() / 255.0,
        torch.from_numpy(labels.astype(np.int64)),
        torch.from_numpy(test_images.reshape(len(test_images), -1)).float() / 255.0,
        torch.from_numpy(test_labels.astype(np.int64)),
        side=images.shape[1],
        classes=int(labels.max()) + 1,
    )


def _numbers(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(IDX_MAX)
        dimensions = data[3]
        shape = tuple(int.from_bytes(data[4 + 4 * one : 8 + 4 * one], "big") for one in range(dimensions))
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} is not in MNIST's format: {error}", hint="fetch it again") from error


def dealt(labels: torch.Tensor, clients: int, *, dirichlet: float | None, seed: int) -> list[torch.Tensor]:
    """Which samples each client has. `dirichlet`: how evenly each label is spread over clients; None: at random."""
    generator = np.random.default_rng([seed, 1])
    if clients * SAMPLES_MIN > len(labels):
        raise ConfigError(f"{len(labels)} samples are too few for {clients} clients", hint="ask for fewer clients")
    if dirichlet is None:
        return [torch.from_numpy(part) for part in np.array_split(generator.permutation(len(labels)), clients)]
    for _ in range(DRAWS_MAX):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label in range(int(labels.max()) + 1):
            mine = generator.permutation(np.flatnonzero(labels.numpy() == label))
            shares = generator.dirichlet(np.full(clients, dirichlet))
            cuts = (np.cumsum(shares) * len(mine)).astype(int)[:-1]
            for part, some in zip(parts, np.split(mine, cuts), strict=True):
                part.extend(some.tolist())
        if min(map(len, parts)) >= SAMPLES_MIN:
            return [torch.tensor(sorted(part)) for part in parts]
        dirichlet_left = _topped_up(parts)
        if dirichlet_left is not None:
            return dirichlet_left
    raise ConfigError(f"--dirichlet {dirichlet:g} leaves clients without samples", hint="ask for fewer clients")


def _topped_up(parts: list[list[int]]) -> list[torch.Tensor] | None:
    """Who was dealt nearly nothing gets a few samples of who has most."""
    for part in parts:
        while len(part) < SAMPLES_MIN:
            richest = max(parts, key=len)
            if len(richest) <= SAMPLES_MIN:
                return None
            part.append(richest.pop())
    return [torch.tensor(sorted(part)) for part in parts]
