"""Times and limits of the replication. The defaults suit servers on one network; the simulator uses its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`clock_drift_max`: no clock runs faster or slower than time does by more than this fraction."""

    lease_s: float = 0.5  # for so long a replica helps nobody to depose the primary that it has heard
    clock_drift_max: float = 0.02
    beat_s: float = 0.1  # a primary is heard at least this often
    stagger_s: float = 0.15  # replicas suspect a silent primary one after the other
    offer_again_s: float = 0.3  # a snapshot is offered again after this time
    propose_again_s: float = 0.5
    change_timeout_s: float = 60.0  # a change of the configuration is given up after this
    entries_per_append_max: int = 64
    uncommitted_max: int = 256  # more updates than this do not wait for a majority: the others are refused
    sequence_window: int = 64  # a worker has at most so many updates under way
    snapshot_every: int = 1024  # entries
    kept_behind: int = 256  # entries that stay behind a snapshot, for replicas that are a little late
    snapshot_bytes: int = 1 << 40  # a snapshot is due too when the payloads since the last one are so large
    kept_behind_bytes: int = 1 << 40
    under_way_bytes_max: int = 1 << 40  # to one replica, without its confirmation; or one entry, if that is larger
    tell_bytes: int = 1 << 40  # of committed payloads that a replica hears of at once, and else with the next ones
    durable: bool = False  # an update counts when it is on disk; otherwise when it is in memory

    @property
    def lease_held_s(self) -> float:
        """For so long, by its own clock, the primary relies on what a replica has confirmed.

        The replica counts `lease_s` by a clock that may be fast, the primary by one that may be slow.
        """
        return self.lease_s * (1 - self.clock_drift_max) / (1 + self.clock_drift_max)

    @property
    def abandon_s(self) -> float:
        """A primary that no majority has confirmed for so long looks for the next epoch as the others do."""
        return 2 * self.lease_s

    def suspect_after_s(self, rank: int) -> float:
        return self.lease_s + rank * self.stagger_s
