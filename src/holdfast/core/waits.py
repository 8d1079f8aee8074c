"""What a worker waits for, in words that an agent and a person can judge."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class WaitKind(IntEnum):
    """Who could end the wait. What is neither for peers nor for nothing moves by itself, or is told elsewhere."""

    PEERS = 1  # members of the view, by what they say or send
    VIEW = 2  # the next view, which is being agreed on
    LEDGER = 3
    STORAGE = 4
    STATE = 5  # the training's state, which is on its way from peers
    NOTHING = 6  # nobody that it knows of


@dataclass(frozen=True)
class Wait:
    """`why` goes on after "waiting": "for w1.1 to load the state". `since` is the host's monotonic clock."""

    kind: WaitKind
    why: str
    whom: tuple[str, ...] = ()
    since: float = 0.0
    place: int = 0  # how far it has come: of two members, the one with the higher place is further in the training

    @property
    def could_last(self) -> bool:
        """For ever, if those that it is for wait as well."""
        return self.kind in (WaitKind.PEERS, WaitKind.NOTHING)

    @property
    def words(self) -> str:
        return f"waiting {self.why}"
