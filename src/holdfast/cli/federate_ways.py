"""How `holdfast federate` combines updates: by servers that may lie, or in masked buckets; their options, checked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.byzantine.federation.by_buckets import BucketChoice
    from holdfast.byzantine.federation.by_servers import ServerChoice


def add_arguments(federate: argparse.ArgumentParser) -> None:
    servers = federate.add_argument_group("a server that nobody trusts")
    servers.add_argument(
        "--servers", type=int, metavar="N", help="so many real processes agree on every model; a third may lie"
    )
    servers.add_argument(
        "--byzantine-servers", type=int, metavar="F", help="so many of them lie, for a drill (default: 0)"
    )
    servers.add_argument("--lie", metavar="KIND", help="how they lie (default: lying)")
    servers.add_argument("--chains", metavar="DIR", help="keep their keys and chains there, to be verified")
    private = federate.add_argument_group("a server that sees no update")
    private.add_argument(
        "--buckets",
        type=int,
        metavar="B",
        help="it sees the masked sums of B random buckets, and the rule combines them",
    )
    private.add_argument(
        "--colluding", type=int, metavar="K", help="so many members of a bucket may act with the server (default: 0)"
    )
    private.add_argument("--clip", type=float, metavar="C", help="scale what a client sends down to this length")
    private.add_argument("--noise", type=float, metavar="S", help="add noise of S times the clip to every bucket's sum")
    private.add_argument("--delta", type=float, metavar="D", help="of (epsilon, delta) privacy (default: 1e-05)")


def servers_of(options: argparse.Namespace) -> ServerChoice | None:
    """ConfigError if what is said of servers cannot be. None: this process combines the updates."""
    if options.servers is None:
        for flag, value in (
            ("--byzantine-servers", options.byzantine_servers),
            ("--lie", options.lie),
            ("--chains", options.chains),
        ):
            if value is not None:
                raise ConfigError(f"{flag} {value} is about servers, and there are none", hint="add --servers 4")
        return None
    from holdfast.byzantine.federation.by_servers import LYING, ServerChoice

    if options.lie is not None and not options.byzantine_servers:
        raise ConfigError(f"--lie {options.lie} says how servers lie, and none does", hint="add --byzantine-servers 1")
    choice = ServerChoice(
        servers=options.servers,
        byzantine=options.byzantine_servers or 0,
        lie=options.lie or LYING,
        directory=Path(options.chains) if options.chains else None,
    )
    choice.validate()
    return choice


def buckets_of(options: argparse.Namespace) -> BucketChoice | None:
    """ConfigError if what is said of buckets and noise cannot be. None: nothing is masked."""
    if options.buckets is None:
        for flag, value in (
            ("--colluding", options.colluding),
            ("--clip", options.clip),
            ("--noise", options.noise),
            ("--delta", options.delta),
        ):
            if value is not None:
                raise ConfigError(f"{flag} {value:g} is about buckets, and there are none", hint="add --buckets 10")
        return None
    if options.servers is not None:
        raise ConfigError("--buckets needs one server that adds up, and --servers has several", hint="leave one out")
    if options.noise is not None and options.clip is None:
        raise ConfigError("--noise is in units of the longest update, and none is said", hint="add --clip 1")
    if options.delta is not None and not options.noise:
        raise ConfigError("--delta says how private noise is, and there is none", hint="add --noise 1 --clip 1")
    from holdfast.byzantine.federation.by_buckets import DELTA, BucketChoice
    from holdfast.byzantine.privacy.noise import Noise

    noise = None if options.clip is None else Noise(multiplier=options.noise or 0.0, clip=options.clip)
    delta = DELTA if options.delta is None else options.delta
    return BucketChoice(buckets=options.buckets, noise=noise, delta=delta, colluding=options.colluding or 0)
