"""What this rank writes to the others, in order, also while the carrier has no room. Guarded by the exchange."""

from __future__ import annotations

from collections import deque

from holdfast.horovod.exchange.carrier import Carrier
from holdfast.horovod.exchange.records import KNOWN_MAX, TEXT_BYTES_MAX, Record
from holdfast.horovod.exchange.words import Request


class Outgoing:
    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._waiting: deque[tuple[Record, bool]] = deque()
        self._texts: dict[Request, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def publish(self, record: Record, *, urgent: bool = True) -> None:
        self._waiting.append((record, urgent))
        self.flush()

    def flush(self) -> None:
        """What finds room. The driver comes back to the rest."""
        while self._waiting and self._carrier.publish(self._waiting[0][0], urgent=self._waiting[0][1]):
            self._waiting.popleft()

    def text_of(self, request: Request) -> bytes:
        """Its words; a training says the same ones again and again. ValueError if they are too many for one record."""
        text = self._texts.get(request)
        if text is None:
            text = request.encode()
            if len(text) > TEXT_BYTES_MAX:
                raise ValueError(
                    f"{request.words[:200]} takes {len(text)} bytes to announce, of {len(request.shapes)} tensors, and "
                    f"{TEXT_BYTES_MAX} are possible: make several groups of it, or give it a shorter name"
                )
            if len(self._texts) >= KNOWN_MAX:
                self._texts.clear()
            self._texts[request] = text
        return text
