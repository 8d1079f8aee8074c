"""Several threads that write parts of one checkpoint at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.checkpoint.format.parts import Part


def for_each_part(write: Callable[[Part], None], parts: Sequence[Part], writers: int) -> None:
    """By this thread and some more. No ThreadPoolExecutor: it refuses work once the script's last line is done."""
    todo = deque(parts)
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            try:
                part = todo.popleft()
            except IndexError:
                return
            try:
                write(part)
            except BaseException as error:  # raised below, by the thread that waits for all of them
                failures.append(error)

    helpers = [
        threading.Thread(target=work, name="holdfast-write", daemon=True) for _ in range(min(writers, len(parts)) - 1)
    ]
    for number, helper in enumerate(helpers):
        try:
            helper.start()
        except RuntimeError:  # the interpreter ends: it starts no more threads, and this one can do it alone
            del helpers[number:]
            break
    work()
    for helper in helpers:
        helper.join()
    for error in failures:
        raise error
