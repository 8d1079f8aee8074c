"""The run goes back: how a worker asks for it, how it hears that another has, and which states then still count.

    leaving.rewind(back_to=40, passed=(57,), reason="the gradient of 'head.weight' is not finite at step 57")
    leaving.rewind(back_to=40, passed=(), reason="two digests differ", kind="audit", evict=("w2.1",), rewinds_max=20)

`Worker.rewind` lets a save that is old enough arrive, and calls `Rewinding.ask`, which does not return. It puts a
record into the ledger (core/rewinds.py) and ends this worker, as one that the others went on without: its agent starts
another in its place, which costs no restart. All other workers find the record in the ledger and end the same way when
they next have the word, so nobody is left who has the training's state. The new ones look for a checkpoint, as after
any loss of all workers, and go on from the newest that has at most `back_to` steps applied; from the start if there is
none and the run began there. A step in `passed` is numbered and committed as every step, with nothing to compute and
nothing to apply.

It may be asked at any step, by one member or by all; what several ask at the same time becomes one rewind, that of the
first. Whoever asks must do so in the thread of the user's loop, before the script has ended on any worker: a run that
is finished is finished. Bounds are counted by `kind`, so an audit that asks takes nothing from the bound on divergence.

Why no old state slips in: a worker reads the record when it joins, before it registers. A view that has such a worker
is therefore in the ledger after the record, and a member with an older state that learns of the view learns of the
record with it, and ends before it enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.host_memory.gathering import GatheredStorage
from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest
from holdfast.checkpoint.saving.retention import delete_checkpoint
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import (
    ConfigError,
    DivergedError,
    Evicted,
    IntegrityError,
    LedgerUnavailable,
    NotStored,
    ProtocolError,
    StorageError,
)
from holdfast.core.rewinds import DIVERGED, PASSED_MAX, RECORDS_MAX, Clue, Rewind, Rewinds
from holdfast.core.words import KEY_ORIGIN, KEY_REWINDS, decode_whole, encode_json
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.events import EventLog
from holdfast.net.kernel import SYSTEM, Kernel

REWINDS_MAX = 3  # of one kind
ASK_AGAIN_S = 0.5
ASK_FOR_S = 600.0  # without the ledger nobody can go back; whoever could start us again is probably gone, too
WAITING_S = 2.0  # until it is said that the ledger keeps us waiting
LOOK_S = 0.01
TOO_OFTEN = "lower the learning rate, clip gradients or look at the data"
WRONG_TOO_OFTEN = "test the memory and processors of the hosts whose workers were wrong"
KNOWN = "rewinds"  # in a manifest's config: how many rewinds its worker knew of


class Rewinding:
    """`known` is the record as it was when this worker joined. `alone`: nobody would start this process again."""

    def __init__(
        self,
        known: Rewinds,
        feed: LedgerFeed,
        events: EventLog,
        *,
        alone: bool,
        kernel: Kernel = SYSTEM,
    ) -> None:
        self.known = known
        self.passed = known.passed
        self._feed = feed
        self._events = events
        self._alone = alone
        self._told = False
        self._kernel = kernel

    # ---- asking

    def ask(
        self,
        *,
        back_to: int,
        passed: tuple[int, ...],
        reason: str,
        kind: str = DIVERGED,
        evict: tuple[str, ...] = (),
        rewinds_max: int = REWINDS_MAX,
        clue: Clue | None = None,
    ) -> NoReturn:
        """Put the run back and end this worker: see the module. DivergedError if it cannot be, or not once more."""
        if self._alone:
            raise DivergedError(
                f"{reason}, and a script that was started by hand cannot go back: nobody would start it again",
                hint="start it with `holdfast run`, or join(non_finite='skip') to leave out such steps",
            )
        if self.known.count(kind) >= rewinds_max or self.known.number >= RECORDS_MAX:
            raise DivergedError(
                f"{reason}, and the run has gone back {self.known.count(kind)} times already",
                hint=f"its events say when and why; {TOO_OFTEN if kind == DIVERGED else WRONG_TOO_OFTEN}",
            )
        record = Rewind(
            back_to=max(0, back_to, self._origin() or 0),
            passed=tuple(sorted(passed)[:PASSED_MAX]),
            reason=reason,
            kind=kind,
            evict=evict,
            clue=clue,
        )
        raise Evicted(self.overtaken(self._record(record)))

    def _record(self, record: Rewind) -> Rewinds:
        """Until the ledger has it, or another's in its place."""
        value = self.known.with_(record).encode()
        began = ask_at = self._kernel.now()
        say_at = began + WAITING_S
        while True:
            entry = self._feed.entry(KEY_REWINDS)
            held = Rewinds.decode(entry.value) if entry is not None else Rewinds()
            if held.number > self.known.number:
                return held
            now = self._kernel.now()
            if now >= say_at:
                say_at = began + 2 * ASK_FOR_S
                self._events.write("waiting", step=record.back_to, reason="the ledger must know that the run goes back")
            if now >= began + ASK_FOR_S:
                raise LedgerUnavailable(f"the ledger does not say that the run goes back: {record.reason}")
            if now >= ask_at:
                ask_at = now + ASK_AGAIN_S
                self._feed.compare_and_set(KEY_REWINDS, value, entry.revision if entry is not None else 0)
            self._kernel.sleep(LOOK_S)

    # ---- hearing of it

    def overtaken(self, held: Rewinds) -> str:
        """Why this worker must end, given the record as the ledger has it now; empty: it need not."""
        if held.number <= self.known.number:
            return ""
        record = held.records[self.known.number]
        if not self._told:
            self._told = True
            fields = {"step": record.back_to, "passed": list(record.passed), "reason": record.reason}
            self._events.write("rewound", number=self.known.number + 1, **fields)
        return f"the run goes back to step {record.back_to} or before: {record.reason}"

    # ---- where the run began

    def began(self, step: int) -> None:
        """A search for a checkpoint has found this one, or none: 0. Only the first of the run counts."""
        if self._feed.entry(KEY_ORIGIN) is None:
            self._feed.compare_and_set(KEY_ORIGIN, encode_json({"step": step}), 0)

    def _origin(self) -> int | None:
        entry = self._feed.entry(KEY_ORIGIN)
        return decode_whole(entry.value, "step") if entry is not None else None

    def check_start(self) -> None:
        """ConfigError if the run has to go back, there is no checkpoint to go back to, and its start is not here."""
        if self.known.number and self._origin() != 0:
            back_to = min(record.back_to for record in self.known.records)
            raise ConfigError(
                f"the run has to go back to step {back_to} or before, and there is no such checkpoint",
                hint="keep more of them (--keep, --keep-every); to go on, copy an older one to where they are kept",
            )

    # ---- which states count

    def mark(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What manifests say of the run's settings, and of what this worker knew."""
        return {**config, KNOWN: self.known.number} if self.known.number else dict(config)

    def believes(self, manifest: Manifest) -> bool:
        known = manifest.config.get(KNOWN, 0)
        return self.known.believes(manifest.step, known if isinstance(known, int) else 0)

    def forget(self, storage: Storage | GatheredStorage, warn: Callable[[str], None]) -> frozenset[int]:
        """Delete what the run has gone back from, so that nobody believes it later; the steps that could not be."""
        stayed = set()
        for step in self._disbelieved(storage):
            if isinstance(storage, GatheredStorage):
                storage.pass_over(step)
                continue
            try:
                delete_checkpoint(storage, step)
            except StorageError as error:
                stayed.add(step)
                warn(f"the checkpoint of step {step}, from which the run has gone back, stays: {error.message}")
        return frozenset(stayed)

    def forget_memory(self, root: Path) -> None:
        """The same for what this host keeps in memory, by every worker that comes: others only read it."""
        if self.known.number and root.is_dir():
            self.forget(LocalStorage(root), lambda text: self._events.write("warning", text=text))

    def _disbelieved(self, storage: Storage) -> Iterator[int]:
        least = min((record.back_to for record in self.known.records), default=None)
        if least is None:
            return
        for listed in list_checkpoints(storage):
            if listed.committed and listed.step > least:
                with suppress(ProtocolError, IntegrityError, NotStored):  # a damaged one is nobody's way back
                    if not self.believes(read_manifest(storage, listed.step)):
                        yield listed.step
