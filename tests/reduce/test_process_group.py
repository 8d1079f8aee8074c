"""A process group of gloo carries, and we add: the same bits as by hand, and nobody waits for one who is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.byzantine import parse
from holdfast.byzantine.shard_rows import RobustShards
from holdfast.core.errors import PeerError
from holdfast.net.groups import BrokenGroup
from holdfast.net.kernel import SYSTEM
from holdfast.reduce.carrier import MOVE_S, Carrier, CarrierFailed, library_for
from holdfast.reduce.process_group import ProcessGroup
from holdfast.reduce.reduction import Brought, Path
from holdfast.reduce.view_store import KEY_CHARACTERS_MAX, VALUE_BYTES_MAX, ViewStore

from .crews import STEP, Crew, Reduced, on_hosts, one_host, tcp_pair
from .process_groups import Standing, end, process_group_paths, stores


@contextmanager
def carried(crew: Crew, *, small: bool = False) -> Iterator[tuple[dict[str, Path], dict[str, Standing]]]:
    paths, standing = process_group_paths(crew, small=small)
    yield paths, standing
    end(standing)
    crew.close()


def reduce(crew: Crew, paths: Mapping[str, Path], stands: Mapping[str, bool] = {}) -> dict[str, Reduced]:
    """As Crew.reduce, with what members say of their groups."""
    notes = {
        member: Brought(brought.nodes, brought.present, {}, carried=stands.get(member, len(crew.members) > 1))
        for member, brought in crew.brought().items()
    }
    with ThreadPoolExecutor(len(paths)) as pool:
        jobs = {
            member: pool.submit(path.reduce, STEP, crew.layout, crew.members, notes) for member, path in paths.items()
        }
        return {member: job.result(30.0) for member, job in jobs.items()}


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("shards", [1, 7, 8])
@pytest.mark.parametrize("members", [one_host(1), one_host(2), one_host(3), one_host(5), on_hosts(2, 1)], ids=len)
def test_the_bits_are_those_of_one_worker(members: tuple[str, ...], shards: int, small: bool) -> None:
    """With fewer shards than workers some bring nothing; with more pages than workers or fewer, slices differ."""
    crew = Crew(members, shards, tcp_pair)
    with carried(crew, small=small) as (paths, _):
        before = crew.slots()
        assert all(isinstance(path, ProcessGroup) and path.two_rounds for path in paths.values())
        crew.check(reduce(crew, paths))
        crew.check(reduce(crew, paths))  # again, on the same sums: they were left whole
        assert all(torch.equal(a, b) for a, b in zip(before, crew.slots(), strict=True))


def test_while_one_group_does_not_stand_all_go_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    inner = Carrier.all_to_all
    monkeypatch.setattr(
        Carrier, "all_to_all", lambda self, *args: [moved.append(self.rank), inner(self, *args)][1], raising=True
    )
    crew = Crew(one_host(3), 8, tcp_pair)
    with carried(crew) as (paths, _):
        kept = reduce(crew, paths, {"w1.1": False})
        crew.check(kept)
        assert not moved
        crew.check(reduce(crew, paths))
        assert sorted(moved) == [0, 1, 2]


def test_a_robust_rule_is_told_what_others_found_over_the_own_connections() -> None:
    def rows(shard: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(shard)
        return [torch.randn(3000, generator=generator) * (1 + 50 * (shard == 2)), torch.randn(7, generator=generator)]

    found = []
    for count in (1, 3):
        rule = RobustShards(parse("nnm+trimmed-mean"), 1)
        crew = Crew(one_host(count), 6, tcp_pair, tensors=rows, aggregator=rule)
        with carried(crew) as (paths, _):
            reduced = reduce(crew, paths)
            found += [crew.layout.vectors(memory.clone()) for memory, _ in reduced.values()]
            trusted = {path.trusted() for path in paths.values()}
            assert len(trusted) == 1
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def one_alone(crew: Crew, paths: Mapping[str, Path], member: str, meanwhile: Any) -> tuple[BaseException | None, float]:
    """What this member's reduction comes to, while the others do something else; and after how long."""
    notes = {name: Brought(one.nodes, one.present, {}, carried=True) for name, one in crew.brought().items()}
    thread = threading.Thread(target=meanwhile)
    began = time.monotonic()
    thread.start()
    try:
        paths[member].reduce(STEP, crew.layout, crew.members, notes)
    except BrokenGroup as error:
        return error, time.monotonic() - began
    finally:
        thread.join()
    return None, 0.0


def test_whoever_is_lost_is_noticed_though_its_library_says_nothing() -> None:
    """Its process lives, and so do the sockets of gloo, which would wait for as long as it has patience."""
    crew = Crew(one_host(3), 8, tcp_pair)
    paths, standing = process_group_paths(crew, small=False)
    error, took_s = one_alone(crew, paths, "w0.1", crew.groups["w1.1"].close)
    assert isinstance(error, BrokenGroup) and error.peer == "w1.1"
    assert took_s < MOVE_S / 2
    assert not standing["w0.1"].failures
    began = time.monotonic()
    for one in standing.values():
        threading.Thread(target=one.close, daemon=True).start()  # waits for what is under way; nobody waits for it
    assert time.monotonic() - began < MOVE_S / 2
    crew.close()


def test_a_library_that_fails_breaks_the_view_and_is_told_of() -> None:
    crew = Crew(one_host(2), 4, tcp_pair)
    paths, standing = process_group_paths(crew, small=False)
    error, _ = one_alone(crew, paths, "w0.1", standing["w1.1"].close)  # its connections to us are whole
    assert isinstance(error, BrokenGroup) and not error.peer and "process group failed" in error.reason
    assert len(standing["w0.1"].failures) == 1
    end(standing)
    crew.close()


def test_bytes_of_another_step_are_not_taken() -> None:
    crew = Crew(one_host(2), 4, tcp_pair)
    paths, standing = process_group_paths(crew, small=False)
    notes = {name: Brought(one.nodes, one.present, {}, carried=True) for name, one in crew.brought().items()}

    def behind() -> None:
        with pytest.raises(BrokenGroup):
            paths["w1.1"].reduce(STEP - 1, crew.layout, crew.members, notes)

    error, _ = one_alone(crew, paths, "w0.1", behind)
    assert isinstance(error, BrokenGroup) and f"(1, {STEP - 1}), not (1, {STEP})" in error.reason
    end(standing)
    crew.close()


def test_a_group_that_was_given_up_moves_nothing() -> None:
    carrier = Carrier(object(), 0, 2)
    assert len(carrier.surrender()) == 2
    with pytest.raises(CarrierFailed):
        carrier.all_gather(torch.zeros(64, dtype=torch.uint8))


def test_gradients_in_memory_are_for_gloo() -> None:
    assert library_for(None) == library_for(torch.device("cpu")) == ("gloo", None)
    assert library_for(torch.device("cuda:0")) == ("gloo", None)  # here, where there is no NCCL


def test_a_store_is_what_its_members_have_said() -> None:
    one, two = stores(2)
    one.set("a", "1")
    assert two.get("a") == b"1" and two.check(["a"]) and not two.check(["a", "b"])
    two.set("a", b"2")  # set once: the first value stays
    assert one.get("a") == b"1" and one.num_keys() == 1
    for key, value in (("k" * (KEY_CHARACTERS_MAX + 1), b""), ("k", b"v" * (VALUE_BYTES_MAX + 1))):
        with pytest.raises(PeerError, match="too much"):
            one.set(key, value)


def test_nobody_waits_in_a_store_of_a_view_that_is_over() -> None:
    store = ViewStore(lambda key, value: None, SYSTEM, 60.0)
    threading.Timer(0.05, store.close).start()
    with pytest.raises(PeerError, match="the view is over"):
        store.get("never")
    store = ViewStore(lambda key, value: None, SYSTEM, 0.02)
    with pytest.raises(PeerError, match="nobody has set it"):
        store.get("never")
