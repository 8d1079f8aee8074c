"""A client of a ledger on etcd that says what it sees, line by line, with the time.  python etcd_watching.py URL RUN

TIME serving ADDRESS     the watch has its stream from this member
TIME change VALUE        the watch showed a put of this value
TIME away                the watch says that the ledger cannot be reached
TIME answers | silent    another client of the same process gets answers, or none any more
"""

from __future__ import annotations

import sys
import threading
import time

from holdfast.core.errors import LedgerUnavailable
from holdfast.ledger.etcd import open_etcd

_writing = threading.Lock()


def say(*words: object) -> None:
    with _writing:
        print(time.monotonic(), *words, flush=True)


def ask(url: str, run: str) -> None:
    ledger = open_etcd(url, run, deadline_s=1.0)
    last = ""
    while True:
        try:
            ledger.get("a")
            now = "answers"
        except LedgerUnavailable:
            now = "silent"
        if now != last:
            say(now)
            last = now
        time.sleep(0.05)


def main(url: str, run: str) -> None:
    ledger = open_etcd(url, run)
    watch = ledger.watch("", revision=ledger.put("a", b"first"))
    threading.Thread(target=ask, args=(url, run), daemon=True).start()
    last = None
    away = False
    while True:
        try:
            for change in watch.next(0.2):
                say("change", change.value.decode())
            away = False
        except LedgerUnavailable:
            if not away:
                say("away")
            away = True
        endpoint = watch._endpoint
        if endpoint is not None and endpoint is not last:
            say("serving", endpoint.address)
            last = endpoint


if __name__ == "__main__":
    main(*sys.argv[1:])
