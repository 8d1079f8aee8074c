"""Takes this worker's share of a snapshot to storage, behind the training.

The replicas of a run are the same, bit for bit, so each worker writes its share of the parts and no word passes between
them: a part's name vouches for its bytes, and has the mark that all have agreed on for this save; without one, every
worker can tell all names from its own state. Whoever finds all parts in storage commits. Each part is held in memory by
two workers, the one that writes it and one that does when the first is lost; with all in storage but the manifest, any
of them writes that.

Threads: `begin`, `wait_copied` and the questions belong to the thread of the training loop, everything else to one
thread of the saver's own (and those that it lends to storage). The state that a save refers to may be read until
`wait_copied` returns, and not after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.parts import PART_BYTES, lay_out, tensor_names
from holdfast.checkpoint.host_memory.snapshot_files import HostMemory
from holdfast.checkpoint.saving.health import StorageHealth
from holdfast.checkpoint.saving.save_buffer import NeighbourBuffer, SaveBuffer, note_path
from holdfast.checkpoint.saving.saved import Saved, SaverNews
from holdfast.checkpoint.saving.share import COPIES, Share, name_of
from holdfast.checkpoint.saving.share_writer import ShareWriter
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import HoldfastError, StorageError
from holdfast.state.layout import TensorSpec, spec_of

GRACE_S = 5.0  # until a worker looks whether the others' parts have come
GRACE_S_MAX = 60.0
RETRY_S, RETRY_S_MAX = 0.5, 30.0


class Doing(Enum):
    NOTHING = "nothing"
    COPYING = "copying"
    WRITING = "writing"
    STUCK = "waiting for storage"  # the last try failed; a newer snapshot may take this one's place
    LOOKING = "waiting for the others' parts"


class Saver:
    """See the module's docstring. `open_storage` is called in the saver's thread, again and again until it works.

    With `run_dir`, the workers of one host hold each part only once between them: each can get at the memory of the one
    before it, by what that has left there. With `memory`, every snapshot is kept there first; without `open_storage`,
    only there.
    """

    def __init__(
        self,
        open_storage: Callable[[], Storage] | None,
        told: SaverNews,
        *,
        run: str,
        config: Mapping[str, Any],
        me: str = "",
        run_dir: Path | None = None,
        memory: HostMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_storage = open_storage
        self._memory = memory
        self._storage: Storage | None = None
        self._told = told
        self._clock = clock
        self._changed = threading.Condition()
        self._doing = Doing.NOTHING
        self._given: Share | None = None  # not yet taken up
        self._next: Share | None = None  # for after the one under way; the state in it is a copy
        self._save: Share | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._nudged = False  # a worker was lost
        self._hurried = False  # the loop waits for the commit
        self._closed = False
        self._run_dir = run_dir
        self._buffer = SaveBuffer(note_path(run_dir, me) if run_dir is not None else None)
        self._slow: set[str] = set()  # neighbours that were, once, to copy their own parts
        self._wanted_bytes = 0  # of the buffer, to be made and touched before the first save
        self._laid_out: tuple[bytes, tuple[TensorSpec, ...], tuple[str, ...]] | None = None
        self._health = StorageHealth(told, clock)
        self._writer = ShareWriter(told, self._health, run, dict(config), self._superseded, self._is_saved)
        self.newest: int | None = None  # the newest step known to be committed
        self.begun: int | None = None  # the newest step that a save was begun of
        self.distrusted: frozenset[int] = frozenset()  # steps whose checkpoints were found damaged
        self._thread = threading.Thread(target=self._live, name="holdfast-checkpoint", daemon=True)
        self._thread.start()

    # ---- the loop's side

    @property
    def doing(self) -> Doing:
        return self._doing

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is on its way that no newer one should replace."""
        return self._doing in (Doing.COPYING, Doing.WRITING) or self._waiting is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nothing waits."""
        return self._waiting is None and self._doing is Doing.NOTHING

    @property
    def trouble(self) -> StorageError | None:
        """Why storage does not take what is on its way, by the last try."""
        return self._health.trouble

    @property
    def written(self) -> int:
        """How many parts of the save under way have arrived."""
        save = self._save
        return len(save.written) if save is not None else 0

    @property
    def _waiting(self) -> Share | None:
        return self._given or self._next

    def prepare(self, snapshot_bytes: int, count: int, *, leans: bool = False, kept: float = 0.0) -> None:
        """Make room for a share of such a state: pages that were never touched cost more than the bytes in them.

        `leans`: the worker before this one is on this host. `kept` is the part of it that this worker keeps for its
        host beside that.
        """
        copies = 1 if leans and self._memory is None else COPIES
        with self._changed:
            parts = -(-snapshot_bytes // PART_BYTES)
            share = -(-parts * min(copies, count) // count) * PART_BYTES + int(kept * snapshot_bytes)
            share = min(snapshot_bytes, share)
            self._wanted_bytes = max(self._wanted_bytes, share + share // 16 + (1 << 20))
            self._changed.notify_all()

    def begin(self, save: Share) -> bool:
        """Start to save. False: an earlier snapshot is still on its way, and this one is passed over."""
        with self._changed:
            if self.is_busy or self._closed:
                return False
            self._copied.clear()
            if self._memory is not None:
                save.mark = 0  # a host's memory keeps a manifest at once, which has all names
            self._given = self._accept(save)
        return True

    def enqueue(self, save: Share) -> None:
        """Save a copy of the state after what is on its way, or in its place where storage is in trouble.

        Of several that wait, the newest counts.
        """
        with self._changed:
            save.last = True
            self._next = self._accept(save)

    def finish(self, save: Share, *, timeout_s: float) -> bool:
        """Save a state that does not change any more, in place of what is on its way; wait until it is committed."""
        with self._changed:
            save.last = True
            self._given, self._next = self._accept(save), None
        return self.settle(timeout_s)

    def _accept(self, save: Share) -> Share:
        save.began_at, self.begun = self._clock(), save.step
        self._changed.notify_all()
        return save

    def found(self, step: int) -> None:
        """Training goes on from this checkpoint: it need not be saved again."""
        self.newest = self.begun = step

    def wait_copied(self) -> float:
        """Until the state may change again. Returns how long that took."""
        if self._copied.is_set():
            return 0.0
        started = self._clock()
        self._copied.wait()
        waited_s = self._clock() - started
        with self._changed:
            save = self._given or self._save
            if save is not None:
                save.held_s += waited_s
        return waited_s

    def nudge(self) -> None:
        """A worker was lost: its parts may never come."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def wait_written(self, timeout_s: float, *, or_stuck: bool = False) -> None:
        """Until this worker's own parts are in storage, or `or_stuck`. Whether the others' are does not matter."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy and (or_stuck or self._doing is not Doing.STUCK), timeout_s)

    def hurry(self) -> None:
        """The script ends: try now what would be tried later."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Wait until what was begun is committed; False: it is not."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while not self.is_idle:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                if self._doing is Doing.LOOKING:
                    self._hurried = True
                    self._changed.notify_all()
                self._changed.wait(min(left_s, 0.1))
        return self.newest is not None and self.begun is not None and self.newest >= self.begun

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        self._buffer.close()

    # ---- the saver's thread

    def _live(self) -> None:
        while True:
            with self._changed:
                while not self._has_work():
                    self._changed.wait()
                if self._closed:
                    return
                self._save = self._waiting
                if self._given is not None:
                    self._given = None
                else:
                    self._next = None
                if self._save is not None:
                    self._doing = Doing.COPYING
                    self._nudged = False  # who was lost before has no part in this one
            if self._save is None:
                self._make_ready()
                continue
            try:
                self._carry(self._save)
            except HoldfastError as error:  # a state that cannot be stored; storage's own troubles are dealt with
                self._told.warned(error.message)
            except Exception as error:  # no memory, or a bug: training goes on, and is told
                self._told.warned(f"the snapshot of step {self._save.step} cannot be saved: {error!r}")
            finally:
                self._save.let_go()
                with self._changed:
                    self._save = None
                    self._doing = Doing.NOTHING
                    if self._given is None:  # or a newer one has come, whose state is yet to be copied
                        self._copied.set()
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._closed or self._waiting is not None or self._wanted_bytes > self._buffer.size

    def _make_ready(self) -> None:
        """For a first save that takes no longer than a later one. What fails here fails in that one, which says why."""
        wanted = self._wanted_bytes
        with suppress(Exception):
            self._buffer.make(wanted, in_a_hurry=self._superseded)
            if self._storage is None and self._open_storage is not None:
                self._storage = self._open_storage()
        with self._changed:
            if self._wanted_bytes == wanted:
                self._wanted_bytes = 0  # made, or not to be had

    def _carry(self, save: Share) -> None:
        self._lay_out(save)
        if save.last and self._open_storage is not None:
            self._go(Doing.WRITING)
            save.snapshot = save.snapshot.on_host()
            save.files.update({part.number: name_of(part, save.snapshot.tensors) for part in save.layout})
            self._until_done(lambda storage: self._write_together(storage, save))
            return
        self._copy(save)
        self._go(Doing.WRITING)
        self._keep(save)
        if self._open_storage is None:
            return
        if not self._until_done(lambda storage: self._writer.write(storage, save, save.mine)):
            return
        grace_s, since, warned = GRACE_S, self._clock(), False
        while not self._until_done(lambda storage: self._writer.commit_if_complete(storage, save)):
            self._go(Doing.LOOKING)
            # After trouble it may be that all is there by now, and that only this worker has not heard.
            left_s = max(0.0, since + grace_s - self._clock())
            if not self._wait_for_others(left_s if self._health.down_at is None else RETRY_S):
                return
            self._go(Doing.WRITING)
            if not self._nudged and self._clock() - since < grace_s and self._health.down_at is None:
                continue  # somebody is in a hurry to know, which is no reason to do the others' work
            self._nudged = False
            self._until_done(lambda storage: self._writer.write_missing(storage, save))
            if not warned and self._clock() - since > 4 * GRACE_S and self._health.down_at is None:
                warned = True  # where storage takes nothing, that is why, and is told
                self._told.warned(
                    f"the checkpoint of step {save.step} is not complete: parts of other workers have not come; "
                    "is it the same place for all of them?"
                )
            grace_s = self._clock() - since + min(grace_s, GRACE_S_MAX)
            if self._superseded() or self._next is not None:
                return

    def _go(self, doing: Doing) -> None:
        with self._changed:
            self._doing = doing
            self._changed.notify_all()

    def _superseded(self) -> bool:
        return self._given is not None or self._closed

    def _wait_for_others(self, grace_s: float) -> bool:
        """False: a newer snapshot has come meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._nudged or self._hurried or self._superseded(), grace_s)
            self._hurried = False
            return not self._superseded()

    # ---- copying

    def _lay_out(self, save: Share) -> None:
        snapshot = save.snapshot
        specs = tuple(spec_of(tensor) for tensor in snapshot.tensors)
        if self._laid_out is None or self._laid_out[:2] != (snapshot.tree, specs):
            self._laid_out = (snapshot.tree, specs, tuple(tensor_names(snapshot.tree, len(specs))))
        save.specs, save.names = specs, self._laid_out[2]
        save.layout = lay_out(save.names, specs, save.step)
        if self._memory is not None and save.place is not None:
            save.kept = self._memory.parts(save.place, len(save.layout))

    def _copy(self, save: Share) -> None:
        if save.mark and save.before and self._run_dir is not None and save.before not in self._slow:
            save.neighbour = NeighbourBuffer.find(note_path(self._run_dir, save.before))
        leans = save.neighbour is not None
        save.copy_to(self._buffer, in_a_hurry=self._superseded)
        self._copied.set()
        if leans and save.neighbour is None:
            self._slow.add(save.before)

    def _keep(self, save: Share) -> None:
        """In this host's memory. What does not fit there is said by it, and takes nothing away from storage."""
        if self._memory is None or save.place is None:
            return
        manifest = self._writer.manifest_of(save)
        if self._memory.keep(save.place, manifest, save.images) and self._open_storage is None:
            self._is_saved(save, manifest, save.rank == 0)

    # ---- storage

    def _until_done(self, act: Callable[[Storage], bool]) -> bool:
        """Try until storage does it; False: `act` says so, or a newer snapshot has come meanwhile."""
        retry_s = RETRY_S
        while True:
            try:
                if self._storage is None:
                    assert self._open_storage is not None
                    self._storage = self._open_storage()
                return act(self._storage)
            except StorageError as error:
                self._health.ill(error)
            with self._changed:
                self._doing = Doing.STUCK
                self._changed.wait_for(lambda: self._superseded() or self._next or self._hurried, retry_s)
                if self._superseded() or self._next is not None:
                    return False
                retry_s, self._hurried = 0.0 if self._hurried else retry_s, False
                self._doing = Doing.WRITING
            retry_s = min(max(2 * retry_s, RETRY_S), RETRY_S_MAX)

    def _write_together(self, storage: Storage, save: Share) -> bool:
        return self._writer.write_together(storage, save, distrusted=save.step in self.distrusted)

    def _is_saved(self, save: Share, manifest: Manifest, mine: bool) -> None:
        self.newest = max(save.step, self.newest or 0)
        self._told.saved(
            Saved(
                step=save.step,
                bytes=manifest.nbytes,
                duration_s=self._clock() - save.began_at,
                held_s=save.held_s,
                mine=mine,
            ),
            manifest,
        )
