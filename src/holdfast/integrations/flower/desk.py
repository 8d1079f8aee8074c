"""Asking the clients of a round through Flower's grid: messages out, replies in, until enough is enough.

Replies are pulled one client at a time (`pulling.py`) and read at once, so that as a rule no more than one is in memory
beside what is kept of them, and one that Flower itself cannot decode is that client's fault and nobody else's. Owned by
the server app's main thread. Who replied is known from the message that was answered, not from what the reply says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from holdfast.integrations.flower.combining import Answers
from holdfast.integrations.flower.model_record import Unfit
from holdfast.integrations.flower.pulling import ReplyPuller
from holdfast.integrations.flower.replies import Refusal, content_of, failed_words
from holdfast.integrations.flower.reputation import Conduct
from holdfast.integrations.flower.rounds import Patience, Rounds

POLL_S, POLL_MAX_S = 0.25, 2.0  # less and less often while nothing comes
NOT_HEARD_OF = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class GridDesk:
    """One round's. `clock` and `sleep` are given by tests."""

    def __init__(
        self,
        grid: Grid,
        number: int,
        rounds: Rounds,
        *,
        within_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.number = number
        self._grid, self._rounds = grid, rounds
        self._clock, self._sleep = clock, sleep
        self._ends_s = clock() + min(rounds.deadline_s, within_s)

    def left_s(self) -> float:
        """Until the round's deadline."""
        return max(0.0, self._ends_s - self._clock())

    def available(self, needed: int, hoped: int = 0, hope_s: float = 0.0) -> list[int]:
        """The nodes that are there, once `needed` are, or at the deadline; for `hope_s` it waits for `hoped`."""
        said, began_s = -1, self._clock()
        while True:
            there = sorted(set(self._grid.get_node_ids()))
            wanted = max(needed, hoped if self._clock() - began_s < hope_s else 0)
            if len(there) >= wanted or self.left_s() <= 0.0:
                return there
            if len(there) != said:
                log(WARNING, "%d clients are there, and %d are waited for", len(there), wanted)
                said = len(there)
            self._sleep(min(POLL_MAX_S, self.left_s()))

    def ask(
        self,
        contents: Mapping[int, RecordDict],
        read: Callable[[RecordDict], Any],
        *,
        kind: str = MessageType.TRAIN,
        late: int = 0,
        needed: int = 1,
        part: float = 1.0,
    ) -> Answers:
        began_s, deadline_s = self._clock(), self.left_s() * part
        patience = Patience(deadline_s, self._rounds.late_s, late, needed)
        waiting = self._sent(contents, kind, deadline_s)
        good: dict[int, Any] = {}
        refused = {client: Refusal(Conduct.SILENT, "it cannot be sent anything") for client in contents}
        refused = {client: one for client, one in refused.items() if client not in waiting.values()}
        enough_since_s: float | None = None
        pulling, poll_s = ReplyPuller(self._grid), POLL_S
        while waiting:
            poll_s = min(poll_s * 1.5, POLL_MAX_S)
            for message_id, client in list(waiting.items()):
                reply = pulling.reply_to(message_id, deadline_s - (self._clock() - began_s))
                if reply is None:
                    continue
                del waiting[message_id]
                poll_s = POLL_S
                found = reply if isinstance(reply, Refusal) else read_reply(reply, read)
                if isinstance(found, Refusal):
                    refused[client] = found
                else:
                    good[client] = found.value
            now_s = self._clock() - began_s
            if enough_since_s is None and patience.is_enough(len(good), len(waiting)):
                enough_since_s = now_s
            left_s = patience.ends_s(enough_since_s) - now_s
            if left_s <= 0.0:
                break
            if waiting:
                self._sleep(min(poll_s, left_s))
        for client in waiting.values():
            refused[client] = Refusal(Conduct.SILENT, f"no answer within {self._clock() - began_s:.0f} s")
        return Answers({client: good[client] for client in sorted(good)}, refused)

    def _sent(self, contents: Mapping[int, RecordDict], kind: str, ttl_s: float) -> dict[str, int]:
        """The clients by the messages that were sent to them. After its deadline Flower delivers a message no more."""
        messages = [
            Message(content, client, kind, ttl=max(ttl_s, 1.0), group_id=str(self.number))
            for client, content in contents.items()
        ]
        ids = list(self._grid.push_messages(messages))
        if len(ids) != len(messages):  # they were too large to go together
            ids = [next(iter(self._grid.push_messages([message])), "") for message in messages]
        pushed: Iterable[tuple[str | None, int]] = zip(ids, contents, strict=True)
        return {message_id: client for message_id, client in pushed if message_id}


@dataclass(frozen=True)
class GoodReply:
    value: Any


def read_reply(reply: Message, read: Callable[[RecordDict], Any]) -> GoodReply | Refusal:
    """What `read` makes of it, or why it is of no use."""
    if reply.has_error():
        conduct = Conduct.SILENT if reply.error.code in NOT_HEARD_OF else Conduct.FAILED
        return Refusal(conduct, failed_words(reply))
    try:
        return GoodReply(read(content_of(reply)))
    except Unfit as unfit:
        return Refusal(Conduct.MALFORMED, unfit.reason)
