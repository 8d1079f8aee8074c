"""What collectives and elastic training raise, under the names that Horovod's scripts catch.

RuntimeError
├── HorovodInternalError      a collective could not be done: a worker is lost, has left, or said something else
│   ├── CollectiveMismatch    the ranks asked for different things under one name: trying again would not help
│   └── CollectiveStall       every rank waits for what another has not asked for
└── HostsUpdatedInterrupt     workers come or go: the members meet again, with the state that they have

HorovodInternalError inside `elastic.run` has the function tried again. The two below it do not: they are the script's.
"""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed. In `elastic.run` the last committed state is restored, and the function is called again."""


class CollectiveMismatch(HorovodInternalError):
    """Ranks named one collective and meant different ones. Raised on every rank that takes part in it."""


class CollectiveStall(HorovodInternalError):
    """Ranks wait for each other, each for a collective that another has not submitted. Raised on all of them."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of workers changes. In `elastic.run` the function is called again, without going back.

    `skip_sync`: nobody came, so the members have one state and need not exchange it.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("workers come or go")
        self.skip_sync = skip_sync
