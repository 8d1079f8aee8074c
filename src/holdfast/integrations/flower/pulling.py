"""Fetching replies from Flower's SuperLink, without letting one that is not all there hold up the others.

Flower waits for the parts of a reply for up to two hours once its sender has announced it. A client that is killed
while it uploads, or that never means to, would hold the server for as long. So every pull has a thread of its own,
which is waited for shortly, looked at again later, and left alone for good when the question is over: it ends by
itself, and what it then brings is nobody's. Owned by the thread that asks; a pulling thread touches only its own pull.
"""

from __future__ import annotations

import threading

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from holdfast.integrations.flower.replies import Refusal
from holdfast.integrations.flower.reputation import Conduct

USUAL_S = 2.0  # what takes longer goes on beside the others


class _Pull:
    """One try to fetch the reply to one message."""

    def __init__(self, grid: Grid, message_id: str) -> None:
        self._grid, self._message_id = grid, message_id
        self._replies: list[Message] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-flower-pull", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._replies = list(self._grid.pull_messages([self._message_id]))
        except Exception as error:
            self._error = error

    def is_over(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> Message | Refusal | None:
        """None: there is none yet. What cannot be decoded is its sender's fault; a SuperLink that is away is not."""
        if isinstance(self._error, httpx.HTTPError):
            raise self._error
        if self._error is not None:
            return Refusal(Conduct.MALFORMED, f"its message cannot be decoded: {self._error!s:.120}")
        mine = [reply for reply in self._replies if reply.metadata.reply_to_message_id == self._message_id]
        return mine[0] if mine else None


class ReplyPuller:
    """Of one question."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._under_way: dict[str, _Pull] = {}

    def reply_to(self, message_id: str, timeout_s: float) -> Message | Refusal | None:
        """The reply, if it is there; waits for `timeout_s` at most, and then only shortly."""
        pull = self._under_way.pop(message_id, None)
        if pull is None:
            pull = _Pull(self._grid, message_id)
            over = pull.is_over(min(timeout_s, USUAL_S))
        else:
            over = pull.is_over(0.0)
        if not over:
            self._under_way[message_id] = pull
            return None
        return pull.result()
