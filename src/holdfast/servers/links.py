"""A server's connections to the other servers: one to each, dialled when there is something to say.

What cannot be sent is dropped, as a network would: the log's machine sends it again. A frame that comes to a queue that
is too long is dropped. A queue of which the other side takes nothing for a while is dropped with its connection, since
its frames hold payloads that count against what workers may push. Owned by the server's thread; dialling has a thread
of its own, which ends with it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration
from holdfast.net.dialling import dial_service
from holdfast.net.greeting import NO_NUMBER, Hello, SharedMemory
from holdfast.net.mailbox import Mailbox
from holdfast.servers.frames import FrameStream, Outgoing
from holdfast.trust.keys import Keys

LOG = "server-log"  # the purpose of connections between servers
DIAL_AGAIN_S = 0.2
EARLY_FRAMES_MAX = 64  # that wait for the connection


@dataclass(frozen=True)
class Dialled:
    """What came of dialling a server; None: nothing. `owner`: what it was dialled for, where that matters."""

    server: str
    sock: socket.socket | None
    owner: object = None


class DialledBox:
    """A mailbox as dialling threads have it: what they have dialled when nobody takes it any more is closed."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, news: Dialled) -> None:
        with self._lock:
            if not self._is_closed:
                self._mailbox.put(news)
            elif news.sock is not None:
                news.sock.close()

    def close(self) -> None:
        """By whoever takes from the mailbox, at the end."""
        with self._lock:
            self._is_closed = True
        for news in self._mailbox.take_all():
            if isinstance(news, Dialled) and news.sock is not None:
                news.sock.close()


class Link:
    def __init__(self, server: str, dial: Callable[[], socket.socket], post: Callable[[Dialled], None]) -> None:
        self.server = server
        self._dial = dial
        self._post = post
        self.stream: FrameStream | None = None
        self._dialling = False
        self._again_at = 0.0
        self._early: list[Outgoing] = []
        self._moved_at = 0.0  # when the other side last took something, or nothing waited for it
        self._moved_bytes = 0
        self._keeps_early = True  # not after a queue was dropped: it has to answer first

    @property
    def waiting_bytes(self) -> int:
        """Queued for the other side."""
        return sum(frame.nbytes for frame in self._early) + (self.stream.queued_bytes if self.stream is not None else 0)

    def is_stuck(self, now: float, patience_s: float) -> bool:
        """Something waits for the other side, which has taken nothing for so long. Asked again and again."""
        moved = self.stream.moved_bytes if self.stream is not None else 0
        if not self.waiting_bytes or moved != self._moved_bytes:
            self._moved_at, self._moved_bytes = now, moved
        return now - self._moved_at > patience_s

    def send(self, frame: Outgoing, now: float, queue_bytes_max: int) -> bool:
        """Queue it, or drop it. True: there is a connection that has something to send."""
        if self.stream is None:
            self._knock(now)
            if self._dialling and self._keeps_early and len(self._early) < EARLY_FRAMES_MAX:
                self._early.append(frame)
            else:
                frame.sent()
            return False
        if self.stream.queued_bytes > queue_bytes_max:
            frame.sent()  # dropped: it is not read over there
            return True
        self.stream.send(frame)
        return True

    def _knock(self, now: float) -> None:
        if self._dialling or now < self._again_at:
            return
        self._dialling, self._again_at = True, now + DIAL_AGAIN_S

        def run() -> None:
            try:
                sock: socket.socket | None = self._dial()
            except (PeerError, OSError, ValueError):
                sock = None
            self._post(Dialled(self.server, sock))

        threading.Thread(target=run, name=f"holdfast-dial-{self.server}", daemon=True).start()

    def dialled(self, sock: socket.socket | None) -> None:
        self._dialling = False
        early, self._early = self._early, []
        if sock is None:
            for frame in early:
                frame.sent()
            return
        self._keeps_early = True
        self.stream = FrameStream(sock, lambda head, nbytes: None)
        for frame in early:
            self.stream.send(frame)

    def drop_queue(self) -> None:
        """With the connection: the next frames wait for nothing until another one is there."""
        self._keeps_early = False
        self.close()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        for frame in self._early:
            frame.sent()
        self._early.clear()


def dialler(
    registration: Registration, host: str, keys: Keys, hello: tuple[str, str], memory: SharedMemory | None = None
) -> Callable[[], socket.socket]:
    """`hello`: the purpose, and who dials."""
    return lambda: dial_service(registration, host, keys, Hello(hello[0], NO_NUMBER, hello[1]), memory=memory)
