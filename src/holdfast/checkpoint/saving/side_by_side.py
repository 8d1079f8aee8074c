"""Several threads at the parts of one checkpoint, and the memory that each of them needs for the part it has."""

from __future__ import annotations

import mmap
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import torch

from holdfast.checkpoint.format.parts import PAGE_BYTES, Part

Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all; called by the thread that waits
Work = TypeVar("Work")
Result = TypeVar("Result")


def image_buffer(size: int) -> torch.Tensor:
    """Fresh bytes whose address is a multiple of 4096. They live as long as a tensor refers to them."""
    pages = max(-(-size // PAGE_BYTES), 1)
    memory = mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


class Images:
    """Room for a few parts at a time, made when it is first needed and used again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    @contextmanager
    def one(self) -> Iterator[torch.Tensor]:
        try:
            image = self._free.get_nowait()
        except queue.Empty:
            image = image_buffer(self._size)
        try:
            yield image
        finally:
            self._free.put(image)


def in_threads(
    act: Callable[[Work], Result],
    work: Sequence[tuple[Work, int]],
    *,
    threads: int,
    name: str,
    progress: Progress | None,
) -> list[Result]:
    """What becomes of each piece of work, whose bytes are counted. The first failure ends it."""
    done, total = 0, sum(size for _, size in work)
    with ThreadPoolExecutor(max(1, min(threads, len(work))), thread_name_prefix=name) as pool:
        futures = {pool.submit(act, one): size for one, size in work}
        try:
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                if progress:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


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
