"""A host's place in a run on several: its agent stands in the ledger under a lease, and no two hosts share a name.

The entry says nothing that training needs. It lets people see which hosts take part, and keeps a second agent from
taking a name that is in use. A thread of its own keeps the lease alive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, LeaseGone, LedgerError, ProtocolError
from holdfast.core.words import KEY_HOSTS, KEY_KEYS, KEY_STOP, decode_json, encode_json
from holdfast.ledger.port import Ledger
from holdfast.placement.proc import process_started

LEASE_S = 5.0
TAKE_OVER_S = LEASE_S + 3.0  # until the lease of an agent that was killed has run out
LOOK_S = 0.2
CLOSE_S = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class HostPresence:
    """Owns `ledger`. `take` claims the name; `close` gives it back."""

    def __init__(self, ledger: Ledger, host: str, **about: Any) -> None:
        self._ledger = ledger
        self._key = KEY_HOSTS + host
        self._host = host
        self._value = encode_json(
            {**about, "pid": os.getpid(), "pid_started": process_started(os.getpid()), "boot": _boot()}
        )
        self._lease = 0
        self._answers = True  # by the last call
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Claim the name. ConfigError if another agent that lives has it."""
        deadline = time.monotonic() + TAKE_OVER_S
        while not self._claim():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another agent of this run is already called {self._host}",
                    hint="give each host a name of its own with --host NAME",
                )
            self._closing.wait(LOOK_S)
        self._thread = threading.Thread(target=self._keep, name="holdfast-presence", daemon=True)
        self._thread.start()

    def _claim(self) -> bool:
        entry = self._ledger.get(self._key)
        if entry is not None and not self._is_dead(entry.value):
            return False
        lease = self._ledger.grant(LEASE_S)
        expected = entry.revision if entry is not None else 0
        if self._ledger.compare_and_set(self._key, self._value, expected=expected, lease=lease) is None:
            self._ledger.revoke(lease)
            return False
        self._lease = lease
        return True

    def _is_dead(self, value: bytes) -> bool:
        """An agent of this very machine whose process is gone. Of another machine's only the lease can tell."""
        try:
            other = decode_json(value)
            pid = int(other.get("pid") or 0)
        except (ProtocolError, TypeError, ValueError, OverflowError):
            return False
        if value == self._value:
            return True  # our own, written by a call whose answer was lost
        return other.get("boot") == _boot() and process_started(pid) != other.get("pid_started")

    def _keep(self) -> None:
        while not self._closing.wait(LEASE_S / 4):
            try:
                if not self._lease:
                    self._claim()
                else:
                    self._ledger.keep_alive(self._lease)
                self._answers = True
            except LeaseGone:  # the ledger was away for longer than the lease
                self._lease = 0
            except LedgerError:
                self._answers = False  # next time

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)
        if self._lease and self._answers:
            try:
                self._ledger.revoke(self._lease)
            except LedgerError:
                pass  # it runs out


def check_keys(ledger: Ledger, fingerprint: str, run: str) -> None:
    """Every host of a run needs the same keys: say so here, before its workers are refused one by one."""
    mine = encode_json({"fingerprint": fingerprint})
    entry = ledger.get(KEY_KEYS)
    if entry is None:
        ledger.compare_and_set(KEY_KEYS, mine, expected=0)
        entry = ledger.get(KEY_KEYS)
    if entry is not None and entry.value != mine:
        raise ConfigError(
            f"these are not the keys of run {run}",
            hint="copy the --keys directory from a host that takes part, or choose another --run name",
        )


def clear_stop(ledger: Ledger, host: str) -> None:
    """A run that was stopped and is started again goes on; one that other hosts are just stopping does not."""
    values = {entry.key: entry.value for entry in ledger.read(KEY_HOSTS).entries}
    if not other_hosts(values, host):
        ledger.delete(KEY_STOP)


def other_hosts(values: Mapping[str, bytes], host: str) -> list[str]:
    """Hosts of the run whose agents live, other than this one, by the ledger's entries."""
    names = (key[len(KEY_HOSTS) :] for key in values if key.startswith(KEY_HOSTS))
    return sorted(name for name in names if name != host)


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
