"""The entry point of a pod: `holdfast kubernetes start`, with the words of `holdfast run`.

What a pod has to say stands in its variables (HOLDFAST_RUN, HOLDFAST_LEDGER, HOLDFAST_KEYS, HOLDFAST_HOST). The keys of
a mounted secret can be read by the pod's group, so they are copied to a directory that nobody else can read. Then it
waits until the ledger answers, and the agent takes the place of this process: it has process id 1, and gets SIGTERM.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from holdfast.core.errors import ConfigError, LedgerError
from holdfast.core.words import KEY_DONE, KEY_WORKERS
from holdfast.integrations.kubernetes.manifest import secret_command
from holdfast.placement.naming import host_name
from holdfast.trust.keys import FILES

AGAIN_S = 0.5
TOLD_EVERY_S = 30.0


def words_of(arguments: Sequence[str], variables: Mapping[str, str], keys: str) -> list[str]:
    """What `holdfast` is given in its place. Pure."""
    missing = [name for name in ("HOLDFAST_RUN", "HOLDFAST_LEDGER", "HOLDFAST_KEYS") if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"{missing[0]} is not set in this pod",
            hint="`holdfast kubernetes manifest` makes one that has all",
        )
    index = variables.get("JOB_COMPLETION_INDEX", "")
    host = variables.get("HOLDFAST_HOST") or (f"pod-{index}" if index else host_name())
    named = ["--run", variables["HOLDFAST_RUN"], "--ledger", variables["HOLDFAST_LEDGER"], "--host", host]
    return ["run", *named, "--keys", keys, *arguments]


def start(arguments: Sequence[str]) -> NoReturn:
    words_of(arguments, os.environ, "")  # what is missing is said first
    keys = _private_copy(Path(os.environ["HOLDFAST_KEYS"]))
    _wait_for_ledger(os.environ["HOLDFAST_LEDGER"], os.environ["HOLDFAST_RUN"])
    words = words_of(arguments, os.environ, keys)
    os.execv(sys.executable, [sys.executable, "-m", "holdfast", *words])


def _private_copy(mounted: Path) -> str:
    private = Path(tempfile.mkdtemp(prefix="holdfast-keys-"))
    for name in FILES:
        try:
            content = (mounted / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read {mounted / name}: {error.strerror}",
                hint=f"make the keys with `holdfast keys create keys`, and the secret: {secret_command('RUN-keys')}",
            ) from error
        with os.fdopen(os.open(private / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    return str(private)


def _wait_for_ledger(url: str, run: str) -> None:
    """Pods start in any order; and one that comes when the others are just ending the run has nothing to do until they
    have. A SIGTERM ends the wait, and so does Kubernetes, by the startup probe."""
    from holdfast.ledger.etcd import check_url, open_etcd  # loads grpc

    check_url(url)
    ledger, told = open_etcd(url, run), 0.0
    try:
        while True:
            try:
                entries = ledger.read("").entries
                is_ending = any(entry.key == KEY_DONE for entry in entries)
                if not is_ending or not any(entry.key.startswith(KEY_WORKERS) for entry in entries):
                    return
            except LedgerError as error:
                if time.monotonic() >= told:
                    told = time.monotonic() + TOLD_EVERY_S
                    print(f"holdfast | waiting for the ledger: {error.message}", flush=True)
            time.sleep(AGAIN_S)
    finally:
        with suppress(LedgerError):
            ledger.close()
