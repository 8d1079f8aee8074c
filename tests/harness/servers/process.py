"""The program of servers' processes: it loads torch once, and forks a server for each line that it reads.

A line is a server's words as JSON; the answer is the id of its process. Servers are ended by `fleet.py`, and what is
left of them when this process's input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.placement import late_dynamo
from holdfast.servers.server import ServerSettings
from holdfast.servers.serving import ServerPlace, serve, warm_up
from holdfast.tables.serving import KINDS
from holdfast.trust.keys import Keys
from tests.harness.servers.gating import Gate, GatedLedger
from tests.harness.servers.planting import end_at, plant


def run_server(words: dict[str, Any]) -> None:
    secret = bytes.fromhex(words["secret"])
    log = Path(words["log"]).open("a", buffering=1)  # noqa: SIM115 - it is written to until the process is killed
    os.dup2(log.fileno(), 2)
    gate = Gate(Path(words["gate"]))
    gate.stand_before()
    plant(words["plant"])
    if words["ends_at"]:
        end_at(Path(words["ends_at"]))
    serve(
        ServerPlace(id=words["id"], host=words["host"], socket=Path(words["socket"]), start=words["start"]),
        Keys.from_secret(secret),
        lambda: GatedLedger(EmbeddedLedger(Path(words["ledger"]), secret), gate),
        ServerSettings(directory=Path(words["directory"]) if words["directory"] else None, **words["settings"]),
        kinds=KINDS,
        tell=lambda name, decision, reason: print(name, decision, "because", reason, file=log),
    )


def main() -> None:
    late_dynamo.install()
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                run_server(json.loads(line))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
        print(child, flush=True)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
