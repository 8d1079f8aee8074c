"""A worker without training: it registers, steps, writes events and leaves as a real one does."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

from holdfast.core.errors import LeaseGone, LedgerError
from holdfast.core.words import KEY_DONE, KEY_STOP, KEY_WORKERS, Registration, encode_json
from holdfast.events import EventLog
from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.proc import process_started

STEP_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, help="finish when this file exists")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--evict-at", type=int, help="in the first incarnation")
    parser.add_argument("--ignore-stop", action="store_true")
    parser.add_argument("--after", type=float, default=0.0, help="seconds of work after the last step")
    parser.add_argument("--register-after", type=Path, help="wait for this file first")
    options = parser.parse_args()
    while options.register_after is not None and not options.register_after.exists():
        time.sleep(STEP_S)
    here = WorkerEnvironment.from_variables()
    assert here is not None
    events = EventLog(here.run_dir / "events" / f"{here.worker}.jsonl", here.worker)
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set() if not options.ignore_stop else None)
    ledger = EmbeddedLedger(here.ledger_socket, here.secret())
    lease = ledger.grant(here.lease_s)
    started = process_started(os.getpid())
    assert started is not None
    me = Registration(
        id=here.worker, host="here", pid=os.getpid(), pid_started=started, address="unix:/none", fingerprint=""
    )
    ledger.put(KEY_WORKERS + here.worker, me.encode(), lease=lease)
    events.write("registered", address=me.address)
    print(f"hello from {here.worker}")
    threading.Thread(target=keep_alive, args=(ledger, lease, here.lease_s), daemon=True).start()
    events.write("view", view=1, members=[here.worker], reason="begin", step=0)
    for step in range(1, options.steps + 1):
        time.sleep(STEP_S)
        events.write("progress", view=1, step=step, steps=options.steps, metrics={"loss": 1 / step}, workers=1)
        if step == options.fail_at:
            raise ValueError(f"cannot do step {step}")
        if step == options.evict_at and here.worker.endswith(".1"):
            events.write("evicted", view=1, reason="a test")
            sys.exit(75)
        if not options.ignore_stop and (leaving.is_set() or has(ledger, KEY_STOP)):
            events.write("left", step=step, reason="asked")
            attempt(lambda: ledger.revoke(lease))
            return
        if options.until is not None and options.until.exists():
            break
    events.write("finished", step=step, digest="abc123", view=1)
    attempt(lambda: ledger.put(KEY_DONE, encode_json({"step": step, "digest": "abc123"})))
    attempt(lambda: ledger.revoke(lease))
    time.sleep(options.after)


def keep_alive(ledger: EmbeddedLedger, lease: int, lease_s: float) -> None:
    while True:
        time.sleep(lease_s / 4)
        try:
            ledger.keep_alive(lease)
        except LeaseGone:
            return  # the agent finds us hung
        except LedgerError:
            pass


def has(ledger: EmbeddedLedger, key: str) -> bool:
    try:
        return ledger.get(key) is not None
    except LedgerError:
        return False


def attempt(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except LedgerError:
        pass


if __name__ == "__main__":
    main()
