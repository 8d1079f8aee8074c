"""Process groups of gloo between workers in threads of this process, which meet by stores as a view's members do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from holdfast.core.config import PROCESS_GROUP
from holdfast.core.words import View
from holdfast.net.kernel import SYSTEM
from holdfast.reduce.carrier import GLOO, Carrier, open_backend, prefixed
from holdfast.reduce.paths import make_path
from holdfast.reduce.reduction import Path
from holdfast.reduce.view_store import ViewStore

from .crews import Crew

WAIT_S = 30.0


class Standing:
    """A group that stands from the beginning, or never does."""

    def __init__(self, carrier: Carrier | None) -> None:
        self.carrier = carrier
        self.failures: list[str] = []

    def open(self, view: View) -> None:
        pass

    def close(self) -> None:
        if self.carrier is not None:
            held = self.carrier.surrender()
            while held:
                held.pop()

    def worked(self) -> None:
        self.failures.clear()

    def failed(self, why: str) -> None:
        self.failures.append(why)


def stores(count: int) -> list[ViewStore]:
    """Whatever one of them is told to set, all hear."""
    made: list[ViewStore] = []
    for _ in range(count):
        made.append(ViewStore(lambda key, value: [one.heard(key, value) for one in made] and None, SYSTEM, WAIT_S))
    return made


def carriers(members: Sequence[str]) -> dict[str, Carrier]:
    count = len(members)
    with ThreadPoolExecutor(count) as pool:
        jobs = [
            pool.submit(open_backend, GLOO, prefixed(store, "view-1"), rank, count, "127.0.0.1")
            for rank, store in enumerate(stores(count))
        ]
        backends = [job.result(WAIT_S) for job in jobs]
    return {member: Carrier(backends[rank], rank, count) for rank, member in enumerate(members)}


def process_group_paths(crew: Crew, *, small: bool) -> tuple[dict[str, Path], dict[str, Standing]]:
    made = carriers(crew.members) if len(crew.members) > 1 else {}
    standing = {member: Standing(made.get(member)) for member in crew.members}
    terms = crew.terms(small=small)
    paths = {
        member: make_path(PROCESS_GROUP, group, crew.arenas[member], replace(terms, carrying=standing[member]))
        for member, group in crew.groups.items()
    }
    return paths, standing


def end(standing: Mapping[str, Standing]) -> None:
    """All at once: gloo waits for what is under way."""
    with ThreadPoolExecutor(len(standing)) as pool:
        for job in [pool.submit(one.close) for one in standing.values()]:
            job.result(WAIT_S)
