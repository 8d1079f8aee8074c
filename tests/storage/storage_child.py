"""A process that uses a storage as it is told on its command line, to be raced and killed by the contract suite.

    storage_child.py URI write NAME BYTES FILL...   writes NAME once for each FILL: that byte, BYTES times
    storage_child.py URI create NAME TEXT           says whether it won

It says `ready`, waits for a line, says `doing` before each call and what came of it after.
"""

from __future__ import annotations

import mmap
import sys

from holdfast.checkpoint.storage.opening import open_storage


def main(uri: str, call: str, name: str, *arguments: str) -> None:
    storage = open_storage(uri)
    if call == "create":
        steps = [lambda: storage.create(name, arguments[0].encode())]
    else:
        assert call == "write", call
        size = int(arguments[0])
        contents = [memoryview(mmap.mmap(-1, size)) for _ in arguments[1:]]  # page-aligned, as in a worker
        for content, fill in zip(contents, arguments[1:], strict=True):
            content[:] = bytes([int(fill)]) * size
        steps = [lambda content=content: storage.write(name, content) for content in contents]
    print("ready", flush=True)
    for step in steps:
        if not sys.stdin.readline():
            return
        print("doing", flush=True)
        print(f"done {step()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
