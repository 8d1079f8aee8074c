"""Fetching a slice's state from another replica: a thread that asks, waits, and puts what came into the mailbox."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.log.messages import Snapshot
from holdfast.net.streams import Deadline
from holdfast.servers.frames import ask
from holdfast.servers.log_codec import decode_snapshot
from holdfast.servers.replicated import Payload

STALL_S, TOTAL_S = 5.0, 600.0


@dataclass(frozen=True)
class Fetched:
    name: str
    asked: Snapshot
    snapshot: Snapshot
    payload: Payload


@dataclass(frozen=True)
class FetchFailed:
    name: str
    asked: Snapshot
    reason: str


def fetch_snapshot(
    name: str, asked: Snapshot, dial: Callable[[], socket.socket], post: Callable[[Fetched | FetchFailed], None]
) -> None:
    """In a thread of its own, `holdfast-fetch-NAME`."""

    def run() -> None:
        try:
            with closing(dial()) as sock:
                head, body = ask(sock, {"op": "snapshot", "slice": name, "id": 0}, Deadline(STALL_S, TOTAL_S))
            if "refused" in head:
                raise PeerError(str(head["refused"])[:200])
            state = head.get("state")
            if not isinstance(state, dict):
                raise ProtocolError("a snapshot without a state")
            post(Fetched(name, asked, decode_snapshot(head.get("snapshot")), Payload(state, body)))
        except (PeerError, OSError, ValueError) as error:
            post(FetchFailed(name, asked, str(error)[:200]))

    threading.Thread(target=run, name=f"holdfast-fetch-{name}", daemon=True).start()
