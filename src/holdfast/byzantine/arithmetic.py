"""Small float64 arithmetic with one order of operations, so that replicated servers agree to the bit.

NumPy's own sums and matrix products may be ordered by what the processor can do. Here every addition is one of single
numbers, one after the other.
"""

from __future__ import annotations

import numpy as np

from holdfast.byzantine.kernels.port import Matrix

SQUARINGS = 24
CONVERGED = 1e-14


def total(numbers: Matrix) -> Matrix:
    """The sum along the last axis, from first to last."""
    if not numbers.shape[-1]:
        return np.zeros(numbers.shape[:-1])
    result: Matrix = np.add.accumulate(numbers, axis=-1)[..., -1].copy()
    return result


def product(left: Matrix, right: Matrix) -> Matrix:
    """The matrix product (or matrix times vector), added up from the first inner index to the last."""
    result: Matrix = np.zeros((left.shape[0], *right.shape[1:]))
    for inner in range(left.shape[1]):
        result = result + np.multiply.outer(left[:, inner], right[inner])
    return result


def squared_distances(gram: Matrix) -> Matrix:
    """Between all updates, from their inner products around any one point; never negative, zero to oneself."""
    own = np.diagonal(gram)
    found: Matrix = np.maximum(own[:, None] + own[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(found, 0.0)
    return found


def squared_distances_to(gram: Matrix, factors: Matrix) -> Matrix:
    """From every update to the combination with these factors, which must add up to one."""
    towards = product(gram, factors)
    found: Matrix = np.maximum(np.diagonal(gram) - 2.0 * towards + total(factors * towards), 0.0)
    return found


def leading_eigenvector(matrix: Matrix) -> tuple[float, Matrix]:
    """Of a symmetric matrix without negative eigenvalues: its largest one and a unit vector of it, by repeated
    squaring.
    """
    scale = float(np.max(np.abs(matrix)))
    if scale == 0.0:
        return 0.0, np.zeros(len(matrix))
    power = matrix / scale
    for _ in range(SQUARINGS):
        squared = product(power, power)
        squared = squared / float(np.max(np.abs(squared)))
        if float(np.max(np.abs(squared - power))) <= CONVERGED:
            break
        power = squared
    vector = power[:, int(np.argmax(np.diagonal(power)))]
    vector = vector / np.sqrt(total(vector * vector))
    return float(total(vector * product(matrix, vector))), vector
