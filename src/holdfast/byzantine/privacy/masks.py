"""The arithmetic of masks: what a member adds to its numbers, and what a server takes off their sum.

A member adds its self mask, and a mask for every peer, which the one with the smaller name adds and the other
subtracts. Masks of pairs that both arrive cancel. Nothing else of the protocol is in here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from holdfast.byzantine.privacy.ciphers import Expand
from holdfast.byzantine.privacy.fixed_point import DTYPES, Residues
from holdfast.byzantine.privacy.terms import Terms


def mask_from(key: bytes, terms: Terms, expand: Expand) -> Residues:
    return terms.encoding.from_bytes(expand(key, terms.content_bytes))


def masked(values: Residues, self_mask: Residues, name: str, pair_masks: Iterable[tuple[str, Residues]]) -> Residues:
    """What `name` sends."""
    total = values + self_mask
    for peer, mask in pair_masks:
        total = _with(total, mask, adds=name < peer)
    return total


def unmasked(
    sent: Iterable[Residues],
    self_masks: Iterable[Residues],
    left_over: Iterable[tuple[str, str, Residues]],
    terms: Terms,
) -> Residues:
    """The sum of the survivors' numbers. `left_over`: (survivor, lost member, their mask), which nothing cancels."""
    total: Residues = np.zeros(terms.numbers, dtype=DTYPES[terms.encoding.bits])
    for one in sent:
        total = total + one
    for mask in self_masks:
        total = total - mask
    for survivor, lost, mask in left_over:
        total = _with(total, mask, adds=not survivor < lost)
    return total


def _with(total: Residues, mask: Residues, *, adds: bool) -> Residues:
    return total + mask if adds else total - mask
