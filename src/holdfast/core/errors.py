"""Every error that Holdfast raises, split by who must act.

HoldfastError
├── ConfigError           the caller: a wrong argument, file or script. Always carries a hint.
│   └── ArgumentError     an argument that there is not (any more); a TypeError too
├── PeerError             another worker: gone, or it broke the protocol
│   └── ProtocolError     it sent what no correct peer sends
├── LedgerError           the ledger
│   ├── LedgerUnavailable no answer in time; the outcome of a write is unknown
│   ├── LedgerRefused     it answered no: too large, wrong secret, disk full
│   ├── LeaseGone         the lease ran out or was revoked
│   └── WatchGap          changes since that revision are no longer kept; read again
├── StorageError          a disk or an object store
│   ├── StorageUnavailable it did not do it now: no answer, overloaded, full. Trying again may help
│   ├── StorageRefused    it said no: credentials, no such bucket, read-only. Somebody must act
│   ├── NotStored         there is nothing under that name
│   └── IntegrityError    bytes are not those that were written
│       └── StatesDiffer  members offer different states of one step
├── NumericsError         arithmetic that would not give the same bits here
├── DivergedError         the training itself: a gradient or a metric is not finite any more, or a loss is a spike
├── CorruptionError       hardware that gives wrong bits, and nobody can say whose
├── TooFewUpdates         participants: so many updates of a round are of no use that no rule can combine the rest
├── RoundOver             a participant: the servers were done with the round before they had its update from it
└── LaunchFailed          the function given to holdfast.launch: it failed in the workers, with the traceback of one

WorkerEnded               nobody's error: this worker's part in the run is over. Who asks for more is told again
├── Evicted               the others went on without it
├── Stopped               it left in order, or the run was asked to stop
├── CutShort              its script ended in the middle of the training
└── Unsaved               its script came to its end, and the last state is not in storage

In a process that the agent started, and in a script that runs alone, WorkerEnded becomes the exit code `code`.
"""

from __future__ import annotations

EXIT_BAD_INPUT = 2
EXIT_INEXACT = 65  # EX_DATAERR: the training is finished, and is known not to be exact
EXIT_UNWRITTEN = 69  # EX_UNAVAILABLE: the training is finished, and the ledger could not be told so
EXIT_EVICTED = 75  # EX_TEMPFAIL: the agent starts a replacement and does not count it as a failure
EXIT_UNSAVED = 74  # EX_IOERR: the script came to its end, and its last state could not be saved
EXIT_CUT_SHORT = 1  # the script ended in the middle of the training, and did not say that it failed
EXIT_STOPPED = 0


class HoldfastError(Exception):
    """An error with one sentence for the person who reads it and, where there is one, what to do about it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(HoldfastError, ValueError):
    """The caller asked for something that cannot be done."""


class ArgumentError(ConfigError, TypeError):
    """There is no such argument."""


class PeerError(HoldfastError):
    """Another worker is gone or cannot be reached."""


class ProtocolError(PeerError):
    """A peer sent something that no correct peer sends."""


class LedgerError(HoldfastError):
    """The ledger did not do what was asked."""


class LedgerUnavailable(LedgerError):
    """No answer in time. A write may or may not have happened."""


class LedgerRefused(LedgerError):
    """The ledger answered, and the answer was no."""


class LeaseGone(LedgerError):
    """The lease ran out or was revoked, and its keys are deleted."""


class WatchGap(LedgerError):
    """The changes asked for are no longer kept: read the prefix again and watch from there."""


class StorageError(HoldfastError):
    """A disk or an object store failed."""


class StorageUnavailable(StorageError):
    """No answer, overloaded, or full: trying again later may help."""


class StorageRefused(StorageError):
    """It answered, and the answer was no: credentials, a bucket that is not there, a read-only directory."""


class NotStored(StorageError):
    """There is nothing under that name."""


class IntegrityError(StorageError):
    """Bytes that were read are not those that were written."""


class StatesDiffer(IntegrityError):
    """Members of a run offer different states of one step. Nothing of them was taken."""


class NumericsError(HoldfastError):
    """This machine's arithmetic does not give the bits that the run's does."""


class DivergedError(HoldfastError):
    """A gradient or a metric is NaN or infinite, or a loss is a spike. Every worker sees it at the same step."""


class CorruptionError(HoldfastError):
    """Workers disagree on what has one answer, and no majority says who is wrong. All of them stop."""


class TooFewUpdates(HoldfastError):
    """Participants sent so much that is not finite that the rule's condition does not hold for the rest."""


class RoundOver(HoldfastError):
    """A participant was late for a round. It takes the round's model, and part in the next one."""


class LaunchFailed(HoldfastError):
    """A run that was launched from here has failed. `traceback` is what the worker said last."""

    def __init__(self, message: str, *, hint: str, worker: str, traceback: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.worker = worker
        self.traceback = traceback
        self.exit_code = exit_code

    def __str__(self) -> str:
        said = f"\n{self.worker} said:\n{self.traceback}" if self.traceback else ""
        return f"{self.message}{said}\n  hint: {self.hint}"


class WorkerEnded(Exception):
    """A worker's part in the run is over. `code` is the exit code of a process that ends with it."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Evicted(WorkerEnded):
    """The others went on without this worker. Its slot comes back as a joiner."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, EXIT_EVICTED)


class Stopped(WorkerEnded):
    """This worker left in order, or the whole run was asked to stop."""

    def __init__(self, reason: str, code: int = EXIT_STOPPED) -> None:
        super().__init__(reason, code)


class CutShort(WorkerEnded):
    """The script ended in the middle of the training: its state is saved, and the training is not finished."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, EXIT_CUT_SHORT)


class Unsaved(WorkerEnded):
    """The script came to its end, and its last state is not in storage."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, EXIT_UNSAVED)
