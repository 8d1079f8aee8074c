"""A masked round whose clients are all in this process: what the server says is carried to them, and their answers
back.

For simulations and tests. A client that raises ProtocolError takes no further part, as one that lives elsewhere would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from holdfast.byzantine.privacy.masked_round import MaskedRound, RoundSums
from holdfast.byzantine.privacy.messages import Phase
from holdfast.core.errors import ProtocolError


class Answering(Protocol):
    def hear(self, content: bytes) -> bytes | None:
        """None: it does not answer."""
        ...


def carried(
    server: MaskedRound,
    clients: Mapping[str, Answering],
    seen: Callable[[str, bytes], None] = lambda client, content: None,
) -> RoundSums:
    """Until the round is over. `seen` is told of everything that reaches the server."""
    waiting = deque(server.begin())
    for _ in Phase:
        while waiting:
            send = waiting.popleft()
            try:
                answer = clients[send.client].hear(send.content)
            except ProtocolError:
                continue
            if answer is not None:
                seen(send.client, answer)
                waiting.extend(server.hear(send.client, answer))
        if server.outcome is not None:
            break
        waiting.extend(server.close())
    assert server.outcome is not None
    return server.outcome
