"""A thread that has the word while the training thread is in the user's code, and gives it back at once when asked.

Owns nothing but the word itself: who has it may touch the worker's machine, group and gradients, and nobody else does.
The training thread is the rule. It lets go for the time of a shard, in `away`; then `act` is called here, again and
again, until the training thread is back or `act` says that nothing is left to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLOSE_S = 5.0


class StandIn:
    """`act`: one round of what is to be done; False: nothing, this time. `wake`: end the wait of a round early."""

    def __init__(self, act: Callable[[], bool], wake: Callable[[], None]) -> None:
        self._act = act
        self._wake = wake
        self._word = threading.Condition()
        self._away = False  # the training thread has let go
        self._absence = 0  # how often it has
        self._acting = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-stand-in", daemon=True)
        self._thread.start()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The training thread does something else meanwhile. What went wrong in here is raised in there."""
        with self._word:
            self._away = True
            self._absence += 1
            self._word.notify_all()
        try:
            yield
        finally:
            self._away = False
            self._wake()
            with self._word:
                while self._acting:
                    self._word.wait()
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        with self._word:
            self._closed = True
            self._away = False
            self._word.notify_all()
        self._wake()
        self._thread.join(CLOSE_S)  # it may be stuck with a peer; the process ends

    def _run(self) -> None:
        done = 0  # the absence in which nothing is left to do
        while True:
            with self._word:
                while (not self._away or self._absence == done) and not self._closed:
                    self._word.wait()
                if self._closed:
                    return
                self._acting = True
                done = self._absence
            try:
                while self._away and self._act():
                    pass
            except BaseException as error:
                self._failure = error
            with self._word:
                self._acting = False
                self._word.notify_all()
