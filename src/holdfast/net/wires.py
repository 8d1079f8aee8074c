"""A worker's way to the others: a port, and the one over sockets.

Meetings, knocks and whoever fetches something dial through this. It waits, so it belongs in a thread with a deadline.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.words import Registration
from holdfast.net.dialling import dial, dial_service
from holdfast.net.greeting import Hello, SharedMemory
from holdfast.net.groups import Connection
from holdfast.net.kernel import SYSTEM, Kernel
from holdfast.trust.keys import Keys


class Wires(Protocol):
    """Both calls raise PeerError if the other is not there, or is not of this run."""

    @property
    def host(self) -> str:
        """The one that this worker is on."""

    @property
    def kernel(self) -> Kernel: ...

    def dial(self, registration: Registration, hello: Hello, *, memory: SharedMemory | None = None) -> Connection:
        """For a purpose that is handed over (listener.py)."""

    def ask(self, registration: Registration, hello: Hello) -> socket.socket:
        """For a purpose that is served: what comes next is the purpose's."""


@dataclass(frozen=True)
class SocketWires:
    host: str
    keys: Keys
    kernel: Kernel = SYSTEM

    def dial(self, registration: Registration, hello: Hello, *, memory: SharedMemory | None = None) -> Connection:
        return dial(registration, self.host, self.keys, hello, memory=memory)

    def ask(self, registration: Registration, hello: Hello) -> socket.socket:
        return dial_service(registration, self.host, self.keys, hello)
