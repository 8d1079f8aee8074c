"""A worker's checkpoints: when one is due, the saver, what is told about it, and the way back from storage.

Belongs to the thread of the user's loop, apart from what the saver's thread calls (`_saved`, `_trouble`, `_recovered`),
which writes to the event log and to the ledger's feed, both made for several threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.host_memory.fragments import PlaceAmongHosts
from holdfast.checkpoint.host_memory.gathering import GatheredStorage, newest_gathered
from holdfast.checkpoint.host_memory.place import MEMORY_ONLY, remove_memory
from holdfast.checkpoint.host_memory.snapshot_files import HostMemory
from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid
from holdfast.checkpoint.saving.retention import Keep
from holdfast.checkpoint.saving.saved import Saved, SaverNews
from holdfast.checkpoint.saving.saver import Doing, Saver
from holdfast.checkpoint.saving.schedule import Every, Schedule
from holdfast.checkpoint.saving.share import Share
from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError, IntegrityError, StorageError, StorageRefused, StorageUnavailable
from holdfast.core.setting_words import setting_words
from holdfast.core.words import KEY_CHECKPOINT, KEY_SAVE, KEY_STOP, decode_whole, encode_json, host_of
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.transfer.claiming import Claim, ClaimOutcome
from holdfast.engine.transfer.clearing import Clearing
from holdfast.engine.transfer.last_save import AWAY_S, LOOK_S, wait_for_last
from holdfast.engine.transfer.recalling import Recaller
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.state.snapshot import Snapshot, States

Found: TypeAlias = tuple[Manifest, Snapshot]
SEARCH_AGAIN_S = 2.0
REWIND_SETTLE_S = 10.0
WANTED_S = 60.0  # for what the script has asked to be saved
# settings that may change between two starts: most of them change no bits
_NO_BITS = ("path", "outage_s", "checkpoint", "non_finite", "spike", "audit", "audit_every", "rebalance", "ranks")


class NoCheckpoints:
    """What a worker asks and tells, in a run that keeps none."""

    keeps = saving = False

    def is_due(self, step: int, *, first: bool) -> bool:
        return False

    def save(
        self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, mark: int = 0, wanted: bool = False
    ) -> None: ...

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the script has come to know of a step whose checkpoint was begun before."""

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None: ...

    def prepare(self, members: tuple[str, ...]) -> None: ...

    def wait_copied(self) -> float:
        """Before anything may change the state. Seconds that it took; exactly 0 if there was nothing to wait for."""
        return 0.0

    def member_lost(self) -> None: ...

    def arrived(self, step: int) -> None: ...

    def settle_up_to(self, step: int) -> None: ...

    def settle(self, step: int) -> str:
        """The script ends, and its last state is that of `step`. Why it is not saved; empty: it need not be, or is."""
        return ""

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        """This worker goes. `save`: the others may go too, and the state with them. Why it is not saved."""
        return ""

    def newest(self) -> tuple[int | None, str]:
        """The step of the newest checkpoint that this worker knows of, and where checkpoints are kept."""
        return None, ""

    def close(self) -> None: ...

    def search_at(self, when: float | None) -> None: ...

    def is_search_due(self, now: float) -> bool:
        return False

    def search(self) -> m.Restored | None:
        raise AssertionError("there is nothing to search")


@dataclass(frozen=True, kw_only=True)
class SavingWorker:
    """Whose part in checkpoints this is, and what it has of the hosts' memory for them."""

    id: str
    run: str
    run_dir: Path | None = None
    memory: HostMemory | None = None
    recaller: Recaller | None = None


class RunCheckpoints(NoCheckpoints):
    keeps = True

    def __init__(
        self,
        settings: CheckpointSettings,
        config: RunConfig,
        holder: States,
        worker: SavingWorker,
        *,
        feed: LedgerFeed,
        events: EventLog,
        rewinding: Rewinding,
        claim: Claim,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._memory = worker.memory
        self._recaller = worker.recaller
        self._claim = claim
        self._over = False  # the script has ended well
        self._parent = os.getppid()
        self._config = config
        self._holder = holder
        self._me = worker.id
        self._run = worker.run
        self._feed = feed
        self._events = events
        self._rewinding = rewinding
        self._clock = clock
        self._every = Every.parse(settings.every)
        keep = Keep(last=settings.keep, every=settings.keep_every, best=settings.keep_best)
        self._clearing = Clearing(settings.uri, keep, self._warn)
        self._schedule = Schedule(self._every, clock())
        self._prepared_for: tuple[str, ...] = ()
        self._state_bytes = 0
        self._search_at: float | None = None
        self._said = ""
        self._wanted: tuple[int, float] = (-1, 0.0)  # the last step that the script wanted to be saved, and when
        self._asked: int | None = None  # the last request that was made before we came, or that a save has met
        self._saver = Saver(
            (lambda: open_storage(settings.uri)) if settings.uri else None,
            SaverNews(self._saved, self._trouble, self._recovered, self._warn, claim.check),
            run=worker.run,
            config=rewinding.mark(asdict(config)),
            me=worker.id,
            run_dir=worker.run_dir,
            memory=worker.memory,
            clock=clock,
        )

    # ---- while the training goes on

    @property
    def saving(self) -> bool:  # type: ignore[override]
        return self._saver.is_busy or self._is_wanted()

    def _is_wanted(self) -> bool:
        """Whether the one under way is one that the script wants: for a while, none that is only due overtakes it."""
        step, since = self._wanted
        if step != self._saver.begun or self._saver.doing is Doing.NOTHING:
            return False
        return self._clock() - since < WANTED_S

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._settings.uri:
            self._clearing.noted(step, metrics)

    def is_due(self, step: int, *, first: bool) -> bool:
        return self._schedule.is_due(step, self._clock(), first=first) or self._is_asked_for(first=first)

    def _is_asked_for(self, *, first: bool) -> bool:
        """Whether somebody wants one now. Only the first member looks, so that it is one save."""
        request = self._request()
        if self._asked is None:
            self._asked = request
        return first and request > self._asked

    def _request(self) -> int:
        entry = self._feed.entry(KEY_SAVE)
        return entry.revision if entry is not None else 0

    def save(
        self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, mark: int = 0, wanted: bool = False
    ) -> None:
        """Begin to save the state as it is now, after `step` steps. `wanted`: once an earlier one is written."""
        started = self._clock()
        if wanted:
            self._saver.wait_written(WANTED_S, or_stuck=True)
            self._wanted = step, started
        snapshot = self._holder.capture(step)
        self._schedule.begun(step, started)
        self._asked = self._request()
        held_s = self._clock() - started
        save = self._share(snapshot, members, metrics)
        save.mark, save.before, save.held_s = mark, self._before(members), held_s
        if not self._saver.begin(save):
            self._events.write("warning", text=f"step {step} is not saved: an earlier checkpoint is still on its way")

    def _before(self, members: tuple[str, ...]) -> str:
        """Who comes before this worker, if that one is on this host."""
        before = members[members.index(self._me) - 1]
        return before if before != self._me and host_of(before) == host_of(self._me) else ""

    def _share(self, snapshot: Snapshot, members: tuple[str, ...], metrics: Mapping[str, float]) -> Share:
        """This worker's share of a save of it."""
        inside = self._me in members
        place = PlaceAmongHosts.of(self._me, members) if self._memory is not None and inside else None
        rank = members.index(self._me) if inside else 0
        return Share(snapshot, rank, len(members), dict(metrics), place=place)

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None:
        """At the end of a loop over steps: unless it has just been saved, and after what is on its way."""
        if self._saver.begun == step:
            return
        if self._saver.is_busy:  # perhaps with a storage that does not answer: no loop waits for that
            copy = self._holder.capture(step).copied()
            self._schedule.begun(step, self._clock())
            self._saver.enqueue(self._share(copy, members, metrics))
            return
        self.save(step, members, metrics)
        self.wait_copied()

    def prepare(self, members: tuple[str, ...]) -> None:
        """After the first step, when the optimizer has its state: make room for it, in the background."""
        if members == self._prepared_for:
            return
        self._prepared_for = members
        self._state_bytes = self._state_bytes or self._holder.state_bytes()
        kept = 0.0
        if self._memory is not None:
            workers = [host_of(worker) for worker in self._feed.who()[0]]
            kept = self._memory.share(len(set(workers)), workers.count(host_of(self._me)))
        self._saver.prepare(self._state_bytes, len(members), leans=bool(self._before(members)), kept=kept)

    def wait_copied(self) -> float:
        return self._saver.wait_copied()

    def arrived(self, step: int) -> None:
        """With the others' state, who have seen to it that it was saved when it was due."""
        self._schedule.begun(step, self._clock())

    def settle_up_to(self, step: int) -> None:
        """The run goes back to `step` or before: what is on its way and old enough should arrive first."""
        if self._saver.begun is not None and self._saver.begun <= step:
            self._saver.settle(REWIND_SETTLE_S)

    def member_lost(self) -> None:
        self._schedule.lost()
        self._saver.nudge()

    # ---- the ways out

    def settle(self, step: int) -> str:
        why = ""
        if self._saver.begun is not None and self._saver.begun >= step:
            why = self._wait_for_last(step, is_hurried=lambda: self._feed.entry(KEY_STOP) is not None)
        elif self._settings.uri:  # this one had just come, and the others save what it was given
            deadline = self._clock() + AWAY_S
            while (self.newest()[0] or -1) < step and not why:
                time.sleep(LOOK_S)
                why = "no other worker has saved it" if self._clock() >= deadline else ""
        why = why if self._settings.uri else ""  # what is in memory goes with the end of the run
        self._over = not why
        return why

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        notice_s = self._settings.notice_s
        if not save:
            self._saver.wait_written(min(notice_s, 5.0))
            return ""
        if self._saver.newest == step:
            return ""
        self._saver.finish(self._share(self._holder.capture(step), members, metrics), timeout_s=0.0)
        return self._wait_for_last(step, limit_s=notice_s)

    def _wait_for_last(self, step: int, **limits: Any) -> str:
        return wait_for_last(self._saver, lambda text: self._events.write("waiting", step=step, reason=text), **limits)

    def _newest_of_all(self) -> int | None:
        entry = self._feed.entry(KEY_CHECKPOINT)
        return decode_whole(entry.value, "step") if entry is not None else None

    def newest(self) -> tuple[int | None, str]:
        step, mine = self._newest_of_all(), self._saver.newest
        return (max(step or 0, mine) if mine is not None else step), self._settings.uri or MEMORY_ONLY

    def close(self) -> None:
        self._saver.close()
        self._clearing.close()
        if self._over and self._memory is not None and os.getppid() != self._parent:
            # No agent is left to do it when all workers have ended. The event log says that the run is finished.
            remove_memory(self._memory.root)

    # ---- the way back

    def search_at(self, when: float | None) -> None:
        self._search_at = when

    def is_search_due(self, now: float) -> bool:
        return self._search_at is not None and now >= self._search_at

    def search(self) -> m.Restored | None:
        """Look into storage once. None: it is down, and is to be asked again; to start over would be wrong."""
        self._search_at = None
        try:
            return m.Restored(self._restore())
        except StorageUnavailable as error:
            if error.message != self._said:
                self._said = error.message
                self._events.write("waiting", step=0, reason=f"looking for a checkpoint: {error.message}")
            self._search_at = self._clock() + SEARCH_AGAIN_S
            return None
        except StorageError as error:
            hint = error.hint or "`holdfast checkpoint ls URI` shows what is there"
            raise ConfigError(error.message, hint=hint) from error

    def _restore(self) -> int | None:
        """Put the newest checkpoint that verifies in place, and return its step; None: there is none."""
        started = self._clock()
        gathered = self._recaller.gather() if self._recaller is not None else None
        storage = open_storage(self._settings.uri) if self._settings.uri else None
        try:
            left_out: frozenset[int] = frozenset()
            standing = self._look(storage)
            for opened in (gathered, storage):
                left_out |= self._rewinding.forget(opened, self._warn) if opened is not None else frozenset()
            found, place = self._find(storage, gathered, left_out)
            if found is not None:
                self._check(found[0], owned=standing.owned)
                self._holder.restore(found[1], adopt=True)
            if storage is not None:
                self._take(storage, standing.trouble, found, in_memory=found is not None and place != storage.uri)
        finally:
            for opened in (storage, gathered):
                if opened is not None:
                    opened.close()
        if found is None:
            self._rewinding.check_start()
            self._rewinding.began(0)
            return None
        manifest, snapshot = found
        self._rewinding.began(manifest.step)
        self._schedule.resumed(manifest.step, self._clock())
        if storage is not None and place == storage.uri:
            self._saver.found(manifest.step)
        if storage is not None and place == storage.uri and self._newest_of_all() != manifest.step:
            # The one that the ledger speaks of may be one that the run has gone back from; or the ledger is new.
            self._feed.put(KEY_CHECKPOINT, encode_json({"step": manifest.step, "uri": self._settings.uri}))
        duration_s = round(self._clock() - started, 4)
        self._events.write("resumed", step=manifest.step, uri=place, bytes=snapshot.nbytes, duration_s=duration_s)
        return manifest.step

    def _look(self, storage: Storage | None) -> ClaimOutcome:
        try:
            return self._claim.look(storage) if storage is not None else ClaimOutcome(False, None)
        except StorageError as error:  # what is in memory may do without storage
            return ClaimOutcome(False, error)

    def _take(self, storage: Storage, trouble: StorageError | None, found: Found | None, *, in_memory: bool) -> None:
        """The place is this run's. Where it cannot be written to: the start of a run needs it, going on need not."""
        if trouble is None:
            self._claim.take(storage)
        elif isinstance(trouble, StorageRefused) and not in_memory:
            raise trouble
        elif found is None:
            self._claim.begin_without_writing(trouble)
        else:
            self._warn(f"checkpoints cannot be saved now, and training goes on: {trouble.message}")

    def _find(
        self, storage: Storage | None, gathered: GatheredStorage | None, left_out: frozenset[int]
    ) -> tuple[Found | None, str]:
        """The newest checkpoint that verifies, and where it was: in memory, unless storage has a newer one."""
        newest, down = -1, None
        try:
            if storage is not None:
                committed = (entry.step for entry in list_checkpoints(storage) if entry.committed)
                newest = max((step for step in committed if step not in left_out), default=-1)
        except StorageError as error:
            down = error
        if gathered is not None and self._recaller is not None:
            missing = self._recaller.missing(gathered, at_least=newest)
            if missing:
                raise StorageUnavailable(f"waiting for what {', '.join(missing)} may have in memory")
            found = newest_gathered(gathered, at_least=newest, warn=self._warn)
            if found is not None:
                if down is not None:
                    self._warn(f"going on from memory, since storage cannot be looked into: {down.message}")
                return found, gathered.place_of(found[0].step)
        if down is not None:
            raise down
        return self._find_older(storage, gathered, left_out) if storage is not None else (None, "")

    def _find_older(
        self, storage: Storage, gathered: GatheredStorage | None, left_out: frozenset[int]
    ) -> tuple[Found | None, str]:
        """Storage has something newer than memory. Where that is damaged, memory may be better than what is older."""
        found, place, failure = None, storage.uri, None
        try:
            found = newest_valid(storage, warn=self._warn, leave_out=left_out)
        except IntegrityError as error:
            failure = error
        if gathered is not None:
            least = found[0].step + 1 if found is not None else 0
            better = newest_gathered(gathered, at_least=least, warn=self._warn)
            if better is not None:
                found, place = better, gathered.place_of(better[0].step)
        if found is None and failure is not None:
            raise failure
        if found is not None:
            newer = (entry.step for entry in list_checkpoints(storage) if entry.step > found[0].step)
            self._saver.distrusted = frozenset(newer)
        return found, place

    def _check(self, manifest: Manifest, *, owned: bool) -> None:
        uri = self._settings.uri or "memory"
        if manifest.run and self._run and manifest.run != self._run and not owned:
            raise ConfigError(
                f"{uri} has checkpoints of the run {manifest.run}, and this is {self._run}",
                hint=f"give this run a place of its own, or go on with that one: --run {manifest.run}; "
                f"`holdfast checkpoint release {uri}` gives it free",
            )
        for name, mine in asdict(self._config).items():
            if name not in _NO_BITS and name in manifest.config and manifest.config[name] != mine:
                raise ConfigError(
                    f"the checkpoint in {uri} was made with {setting_words(name, manifest.config[name])}, "
                    f"and this run has {setting_words(name, mine)}",
                    hint="go on with the same settings, or start another run with another --checkpoint",
                )

    # ---- what the saver tells, from its thread

    def _saved(self, saved: Saved, manifest: Manifest) -> None:
        self._schedule.cost(saved.held_s, saved.duration_s)
        if self._settings.uri:
            self._clearing.stored(saved.step)
        if not saved.mine:
            return
        uri = self._settings.uri or MEMORY_ONLY
        self._feed.put(KEY_CHECKPOINT, encode_json({"step": saved.step, "uri": uri}))
        self._events.write(
            "checkpoint",
            step=saved.step,
            uri=uri,
            bytes=saved.bytes,
            duration_s=round(saved.duration_s, 4),
            held_s=round(saved.held_s, 4),
        )
        if self._settings.uri:  # old ones in memory are written over
            self._clearing.committed(saved.step)

    def _warn(self, text: str) -> None:
        self._events.write("warning", text=text)

    def _trouble(self, reason: str) -> None:
        self._events.write("storage_down", uri=self._settings.uri, reason=reason)

    def _recovered(self, down_s: float) -> None:
        self._events.write("storage_up", uri=self._settings.uri, down_s=round(down_s, 3))
