"""Every rule once more, plainly, in NumPy and float64: what the shipped ones are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def squared(x: Array) -> Array:
    return np.array([[np.sum((a - b) ** 2) for b in x] for a in x])


def krum_scores(x: Array, f: int, left_out: int = 2) -> Array:
    return np.array([sum(sorted(row)[1 : 1 + max(len(x) - f - left_out, 1)]) for row in squared(x)])


def mean(x: Array, f: int) -> Array:
    return x.mean(axis=0)


def median(x: Array, f: int) -> Array:
    return np.median(x, axis=0)


def trimmed_mean(x: Array, f: int) -> Array:
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


def around_median(x: Array, kept: int) -> Array:
    middle, out = np.median(x, axis=0), []
    for column, center in zip(x.T, middle, strict=True):
        out.append(np.mean(sorted(column, key=lambda value: (abs(value - center), value))[:kept]))
    return np.array(out)


def meamed(x: Array, f: int) -> Array:
    return around_median(x, len(x) - f)


def krum(x: Array, f: int) -> Array:
    return x[int(np.argmin(krum_scores(x, f)))]


def multi_krum(x: Array, f: int) -> Array:
    return x[np.argsort(krum_scores(x, f), kind="stable")[: len(x) - f]].mean(axis=0)


def bulyan(x: Array, f: int) -> Array:
    left, chosen = list(range(len(x))), []
    for _ in range(len(x) - 2 * f):
        chosen.append(left.pop(int(np.argmin(krum_scores(x[left], f)))))
    return around_median(x[chosen], len(x) - 4 * f)


def mda(x: Array, f: int) -> Array:
    distances = squared(x)

    def diameter(subset: tuple[int, ...]) -> float:
        return max((distances[i, j] for i in subset for j in subset), default=0.0)

    subsets = itertools.combinations(range(len(x)), len(x) - f)
    return x[list(min(subsets, key=diameter))].mean(axis=0)


def geometric_median(x: Array, f: int) -> Array:
    at = np.median(x, axis=0)
    for _ in range(3000):
        pulls = 1.0 / np.maximum(np.linalg.norm(x - at, axis=1), 1e-12)
        at = pulls @ x / pulls.sum()
    return at


def sum_of_distances(x: Array, at: Array) -> float:
    return float(np.linalg.norm(x - at, axis=1).sum())


def centered_clipping(
    x: Array, f: int, radius: float | None = None, rounds: int = 3, start: Array | None = None
) -> Array:
    at = np.median(x, axis=0) if start is None else start
    for _ in range(rounds):
        lengths = np.linalg.norm(x - at, axis=1)
        limit = radius if radius is not None else sorted(lengths)[(len(x) - 1) // 2]
        scale = np.array([1.0 if length == 0.0 else min(1.0, limit / length) for length in lengths])
        at = at + (scale[:, None] * (x - at)).mean(axis=0)
    return at


def caf(x: Array, f: int) -> Array:
    left, best, value = np.ones(len(x)), math.inf, x.mean(axis=0)
    for _ in range(len(x) + 1):
        shares = left / left.sum()
        middle = shares @ x
        values, vectors = np.linalg.eigh((x - middle).T @ ((x - middle) * shares[:, None]))
        if values[-1] < best:
            best, value = values[-1], middle
        out = ((x - middle) @ vectors[:, -1]) ** 2
        peak = max(out[left > 0.0])
        if peak <= 0.0:
            break
        left = left * np.maximum(1.0 - out / peak, 0.0)
        if left.sum() <= len(x) - 2 * f:
            break
    return value


def mixed(x: Array, f: int) -> Array:
    distances = squared(x)
    np.fill_diagonal(distances, -1.0)
    return np.array([x[np.argsort(row, kind="stable")[: len(x) - f]].mean(axis=0) for row in distances])


def clipped(x: Array, norm: float) -> Array:
    return np.array([row * min(1.0, norm / max(float(np.linalg.norm(row)), 1e-300)) for row in x])


def adaptively_clipped(x: Array, f: int) -> Array:
    lengths = sorted(np.linalg.norm(x, axis=1))
    return clipped(x, lengths[len(x) - int(2 * f * (len(x) - f) / len(x)) - 1])


def distinct_mean(x: Array, f: int) -> Array:
    unit, n = x / np.linalg.norm(x, axis=1)[:, None], len(x)
    apart = [[1.0 - float(unit[i] @ unit[j]) for j in range(n)] for i in range(n)]
    pairs = sorted((apart[i][j] for i in range(n) for j in range(i)), reverse=True)
    usual = pairs[(len(pairs) - 1) // 2] if pairs else 1.0
    alike = [sum(1.0 if i == j else max(0.0, 1.0 - apart[i][j] / (0.1 * usual)) for j in range(n)) for i in range(n)]
    weights = 1.0 / np.array(alike)
    return weights @ x / weights.sum()


RULES: dict[str, Callable[[Array, int], Array]] = {
    "mean": mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "meamed": meamed,
    "krum": krum,
    "multi-krum": multi_krum,
    "bulyan": bulyan,
    "mda": mda,
    "centered-clipping": centered_clipping,
    "caf": caf,
    "distinct+mean": distinct_mean,
    "nnm+trimmed-mean": lambda x, f: trimmed_mean(mixed(x, f), f),
    "nnm+median": lambda x, f: median(mixed(x, f), f),
    "nnm+krum": lambda x, f: krum(mixed(x, f), f),
    "arc+trimmed-mean": lambda x, f: trimmed_mean(adaptively_clipped(x, f), f),
    "arc+nnm+trimmed-mean": lambda x, f: trimmed_mean(mixed(adaptively_clipped(x, f), f), f),
    "clip:3+median": lambda x, f: median(clipped(x, 3.0), f),
}
