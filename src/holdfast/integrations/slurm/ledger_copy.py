"""What a job's ledger says for good, copied to the file system that its nodes share: HOME/slurm/RUN.ledger.json.

The ledger of a job that was put back into the queue begins empty, on other nodes. Whose its checkpoints are, which
steps it passes, how many workers a slot has had: that is not the job's but the run's, and is written into the new
ledger before anybody asks. Who takes part is not copied. The file is replaced as a whole when something has changed:
before the first worker starts, every two seconds, and when the last agent is done; the first node alone writes it.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from holdfast.core.errors import LedgerError
from holdfast.core.words import (
    KEY_CHECKPOINT,
    KEY_CONFIG,
    KEY_DONE,
    KEY_INCARNATIONS,
    KEY_LIARS,
    KEY_NUMERICS,
    KEY_ORIGIN,
    KEY_REWINDS,
    KEY_RUN,
    encode_json,
)
from holdfast.ledger.port import Ledger
from holdfast.placement.directory import replace_file

EVERY_S = 2.0
_ALONE = (KEY_CHECKPOINT, KEY_CONFIG, KEY_DONE, KEY_NUMERICS, KEY_ORIGIN, KEY_REWINDS, KEY_RUN)
_UNDER = (KEY_INCARNATIONS, KEY_LIARS)


class LedgerCopy:
    """One thread at a time."""

    def __init__(self, path: Path, ledger: Ledger) -> None:
        self._path = path
        self._ledger = ledger
        self._written: dict[str, str] = {}
        self._next = 0.0

    def restore(self) -> None:
        """Into a ledger that is empty. Raises OSError and LedgerError."""
        try:
            saved = json.loads(self._path.read_text())
        except FileNotFoundError:
            return
        for key, value in saved.items():
            self._ledger.compare_and_set(key, str(value).encode(), expected=0)

    def name_run(self) -> None:
        """Give a run that begins its id, and keep it, before anything is owned by that id: a job may be lost at any
        moment, and its checkpoints are those of this run. Raises OSError and LedgerError."""
        self._ledger.compare_and_set(KEY_RUN, encode_json({"id": secrets.token_hex(16)}), expected=0)
        self._copy()

    def keep(self, *, at_once: bool = False) -> bool:
        """If it is time, and something has changed. A ledger that is away is asked the next time; False: it is."""
        now = time.monotonic()
        if now < self._next and not at_once:
            return True
        self._next = now + EVERY_S
        try:
            self._copy()
        except (LedgerError, OSError):
            return False
        return True

    def _copy(self) -> None:
        found = {
            entry.key: entry.value.decode()
            for entry in self._ledger.read("").entries
            if entry.key in _ALONE or entry.key.startswith(_UNDER)
        }
        if found and found != self._written:
            replace_file(self._path, json.dumps(found, indent=1))
            self._written = found

    def close(self) -> None:
        self._ledger.close()
