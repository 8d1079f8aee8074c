"""What the policy has the agent do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    slot: int
    reason: str


@dataclass(frozen=True)
class AskToLeave:
    """SIGTERM: finish the step and leave in order."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Kill:
    worker: str
    reason: str


@dataclass(frozen=True)
class AnnounceStop:
    reason: str


@dataclass(frozen=True)
class RunEnd:
    """The run is over for this agent. `outcome` is finished, stopped, failed, left, unsaved or cut short."""

    outcome: str
    exit_code: int
    reason: str
    worker: str = ""  # whose log explains it


Action = Start | AskToLeave | Kill | AnnounceStop | RunEnd
