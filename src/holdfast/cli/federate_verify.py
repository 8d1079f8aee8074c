"""`holdfast federate verify FILE|DIR`: whether a chain of rounds holds, from the signatures in it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.tables import aligned

if TYPE_CHECKING:
    from holdfast.byzantine.agreement.verifying import ChainVerdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Verify the chain of rounds of a federation: every set of updates, every vote, every model's signatures."
    )
    parser.add_argument("places", nargs="+", metavar="FILE|DIR", help="a rounds.chain, or a directory with some")
    parser.add_argument(
        "--federation", metavar="FILE", help="the federation.json whose servers and clients these must be"
    )
    parser.set_defaults(command=verify)


def verify(options: argparse.Namespace) -> int:
    from holdfast.byzantine.agreement.federation import FILE, Federation
    from holdfast.byzantine.agreement.verifying import chains_in, compare, verify_chain

    expected = None
    if options.federation:
        named = Path(options.federation)
        expected = Federation.load(named / FILE if named.is_dir() else named)
    paths = [path for place in options.places for path in chains_in(Path(place))]
    verdicts = [verify_chain(path, expected) for path in paths]
    compare(verdicts)
    for realm in dict.fromkeys(one.federation.realm for one in verdicts):
        _print([one for one in verdicts if one.federation.realm == realm])
    if expected is None:
        print("compare the fingerprint with one that you trust, or give --federation FILE")
    return 0


def _print(verdicts: list[ChainVerdict]) -> None:
    """Of one federation."""
    from holdfast.byzantine.agreement.verifying import fingerprint

    longest = max(verdicts, key=lambda one: len(one.rounds))
    rows = [
        [
            str(one.header.round),
            str(len(one.updates)),
            ", ".join(one.dropped) or "-",
            str(one.view),
            ", ".join(one.signers),
            one.header.model.hex()[:16],
        ]
        for one in longest.rounds
    ]
    print("\n".join(aligned([["round", "updates", "signed two", "view", "signed by", "model"], *rows], right=2)))
    for verdict in verdicts:
        print(f"{verdict.path}: {len(verdict.rounds)} rounds hold")
    known = longest.federation
    print(f"federation {known.name}, {len(known.servers)} servers, f={known.f}: fingerprint {fingerprint(known)}")
