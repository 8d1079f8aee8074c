"""Where two runs meet that share a data service: the ledger of the one whose workers make the batches.

What is written there is small and rare: a dispatcher's address, a line for each worker that serves it, and the word
that it is over. The file that tells where the ledger is has the run's secret in it, and nobody else may read it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, LedgerUnavailable, WatchGap
from holdfast.core.words import KEY_DATA_SERVICE, decode_json, encode_json
from holdfast.horovod.world.runtime import runtime
from holdfast.ledger.port import Ledger
from holdfast.placement.ledger import open_ledger

OVER = "over"
LOOK_S = 1.0  # a watch is asked so often, in case the ledger is gone
GONE_S = 30.0  # without the ledger, its run is over


@dataclass(frozen=True)
class MeetingPlace:
    """How to reach a run's ledger from another run on the same host, or on any where it is on etcd."""

    ledger: str
    run: str
    socket: str
    secret: str  # hexadecimal

    @classmethod
    def of_this_run(cls) -> MeetingPlace:
        lines = runtime().lines
        if lines is None:
            raise ConfigError(
                "a data service needs workers that an agent has started",
                hint="holdfast run --horovod --workers 2 -m horovod.tensorflow.data.compute_worker FILE",
            )
        environment = lines.environment
        socket = "" if environment.ledger else str(environment.ledger_socket)
        return cls(environment.ledger, environment.run, socket, lines.keys.secret.hex())

    @classmethod
    def from_dict(cls, given: Any) -> MeetingPlace:
        try:
            found = cls(**{name: str(given[name]) for name in cls.__dataclass_fields__})
            bytes.fromhex(found.secret)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is no configuration of a data service: {error}",
                hint="give the file that horovod.tensorflow.data.compute_worker has written",
            ) from error
        return found

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @contextmanager
    def opened(self) -> Iterator[Ledger]:
        socket = Path(self.socket)
        with closing(open_ledger(self.ledger, self.run, socket, bytes.fromhex(self.secret))) as ledger:
            try:
                yield ledger
            except LedgerUnavailable as error:
                raise ConfigError(
                    f"the data service of the run {self.run} does not answer: {error.message}",
                    hint="start horovod.tensorflow.data.compute_worker before the training, and with the same file",
                ) from error


class ComputeClient:
    """Who serves, and whether it is over. Horovod's name."""

    def __init__(self, place: MeetingPlace) -> None:
        self._place = place

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        self._put(f"dispatcher/{dispatcher_id}/address", {"address": dispatcher_address})

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        found = self._wait(f"dispatcher/{dispatcher_id}/", 1, timeout, f"dispatcher {dispatcher_id}")
        return str(found[0]["address"])

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        self._put(f"worker/{dispatcher_id}/{worker_id}", {})

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float, count: int = 1) -> None:
        self._wait(f"worker/{dispatcher_id}/", count, timeout, f"the {count} workers of dispatcher {dispatcher_id}")

    def shutdown(self) -> None:
        """The service is no longer needed: its workers come to their end."""
        self._put(OVER, {})

    def wait_for_shutdown(self) -> None:
        self._wait(OVER, 1, None, "the end of the data service")

    def _put(self, name: str, value: dict[str, Any]) -> None:
        with self._place.opened() as ledger:
            ledger.put(KEY_DATA_SERVICE + name, encode_json(value))

    def _wait(self, name: str, count: int, timeout_s: float | None, what: str) -> list[Any]:
        """The values under this name, once there are so many. Without a time, for as long as the ledger's run lives."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with _waiting(), self._place.opened() as ledger:
            while True:
                reading = ledger.read(KEY_DATA_SERVICE + name)
                if len(reading.entries) >= count:
                    return [decode_json(entry.value) for entry in reading.entries]
                if until is not None and time.monotonic() >= until:
                    raise ConfigError(
                        f"{what} did not register within {timeout_s:g} s",
                        hint="look at the output of compute_worker, or give it a longer --timeout",
                    )
                _await_change(ledger, KEY_DATA_SERVICE + name, reading.revision, until)


def _await_change(ledger: Ledger, prefix: str, revision: int, until: float | None) -> None:
    """Until something under the prefix has changed, or it is time."""
    gone_at = time.monotonic() + GONE_S
    with closing(ledger.watch(prefix, revision=revision)) as watch:
        while until is None or time.monotonic() < until:
            left_s = LOOK_S if until is None else min(LOOK_S, max(0.0, until - time.monotonic()))
            try:
                if watch.next(left_s):
                    return
                gone_at = time.monotonic() + GONE_S
            except WatchGap:
                return
            except LedgerUnavailable:
                if time.monotonic() > gone_at:
                    raise


@contextmanager
def _waiting() -> Iterator[None]:
    """Not to be taken for a hang."""
    lines, step = runtime().lines, runtime().commits
    if lines is not None:
        lines.enters(True, step)
    try:
        yield
    finally:
        if lines is not None:
            lines.enters(False, step)
