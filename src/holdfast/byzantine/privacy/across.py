"""The robust rule across buckets, and what f means there.

f hostile clients are in at most f buckets, and one of them makes of its bucket's sum what it wants: so the rule must
bear f hostile *buckets*, and needs as many buckets as it otherwise needs updates. A client that has shown itself and
is in no sum was one of the f: where too few buckets are left for f, each of them leaves the rule one fewer to bear.
One that is in a sum spoils it, whatever it said later, and leaves as many as before. So does a bucket that was lost in
silence, since honest clients fall silent, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from holdfast.byzantine.privacy.fixed_point import Encoding
from holdfast.byzantine.privacy.masked_round import RoundSums
from holdfast.byzantine.privacy.terms import Terms
from holdfast.byzantine.rules.port import Rule
from holdfast.core.errors import ConfigError, TooFewUpdates


@dataclass(frozen=True)
class AcrossBuckets:
    """`trusted`: by client. One is trusted if its bucket was, and it is in its sum."""

    value: torch.Tensor
    trusted: dict[str, bool]


def check(rule: Rule, clients: int, f: int, terms: Terms) -> None:
    """ConfigError if so many clients in so many buckets cannot bear f hostile ones by this rule."""
    terms.checked(clients)
    least = rule.least(f)
    if terms.buckets < least:
        raise ConfigError(
            f"{f} hostile clients spoil up to {f} buckets, and {rule} with f={f} needs {least} buckets: "
            f"there are {terms.buckets}",
            hint=f"--buckets {least} needs {least * terms.smallest} clients"
            if least * terms.smallest > clients
            else f"at least {least} and at most {clients // terms.smallest} buckets",
        )
    rule.checked(terms.buckets, f)


def means(found: RoundSums, encoding: Encoding) -> torch.Tensor:
    """(buckets, numbers): of each bucket, the mean of those who are in its sum."""
    rows = [encoding.decode(one.total) / len(one.clients) for one in found.sums]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def combine(found: RoundSums, encoding: Encoding, rule: Rule, f: int) -> AcrossBuckets:
    """TooFewUpdates if too many buckets are lost for the rule."""
    left = rule.bearing(len(found.sums), f, found.hostile)
    if len(found.sums) < max(rule.least(left), 1):
        reasons = "; ".join(one.reason for one in found.lost)
        raise TooFewUpdates(
            f"{rule} with f={left} needs {rule.least(left)} buckets, and {len(found.sums)} are left: {reasons}",
            hint="leave the round out; larger buckets bear clients that fall silent",
        )
    aggregate = rule.aggregate(means(found, encoding), left)
    assert isinstance(aggregate.value, torch.Tensor)
    trusted = {
        client: is_trusted
        for one, is_trusted in zip(found.sums, aggregate.trusted, strict=True)
        for client in one.clients
    }
    return AcrossBuckets(aggregate.value, trusted)
