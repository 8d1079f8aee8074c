"""Cases of the conformance suite: each is a function of the rank and the size that all workers call at the same time.

A case is named by what it checks, `allreduce-sum-float32-2d`. It asserts; what it leaves behind does not matter to the
next one. runner.py calls them in workers, test_conformance.py reads what came of them.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast.horovod.torch as hvd
from holdfast.core.errors import ConfigError
from holdfast.horovod.common.exceptions import CollectiveMismatch, CollectiveStall, HorovodInternalError
from holdfast.horovod.exchange.words import Kind
from holdfast.horovod.torch.handles import ask
from holdfast.horovod.world.runtime import runtime

Case = Callable[[int, int], None]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = {
    "scalar": (),
    "1d": (17,),
    "2d": (5, 7),
    "3d": (3, 4, 5),
    "empty": (0,),
    "empty2d": (4, 0),
    "large": (70_003,),
}
CASES: dict[str, Case] = {}


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def case(name: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return keep


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, others on every rank: sums and products of a few are exact in every dtype."""
    count = math.prod(shape)
    numbers = (torch.arange(count) * (rank + 1) + rank) % 3 + 1
    return (numbers % 2 == 0 if dtype is torch.bool else numbers).to(dtype).view(shape)


def all_values(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, shape, dtype) for rank in range(size)])


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype is wanted.dtype, (found.dtype, wanted.dtype)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert torch.equal(found, wanted), (found, wanted)


def reduced(stack: torch.Tensor, op: Any) -> torch.Tensor:
    dtype, size = stack.dtype, len(stack)
    if dtype is torch.bool:
        return stack.any(0) if op in (hvd.Sum, hvd.Max) else stack.all(0)
    wide = stack.double() if dtype.is_floating_point else stack.to(torch.int64)
    if op == hvd.Sum:
        return wide.sum(0).to(dtype)
    if op == hvd.Average:
        return (wide.sum(0).to(dtype) / size) if dtype.is_floating_point else (wide.sum(0) // size).to(dtype)
    if op == hvd.Min:
        return wide.amin(0).to(dtype)
    if op == hvd.Max:
        return wide.amax(0).to(dtype)
    return wide.prod(0).to(dtype)


OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def _allreduces() -> None:
    for name, op in OPS.items():
        for dtype in (*FLOATS, *INTS):
            for label, shape in SHAPES.items():
                if label != "2d" and dtype not in (torch.float32, torch.int64, torch.bfloat16):
                    continue
                if name not in ("sum", "average") and label not in ("2d", "empty", "large"):
                    continue

                def one(rank: int, size: int, op: Any = op, dtype: Any = dtype, shape: Any = shape) -> None:
                    mine = values(rank, shape, dtype)
                    kept = mine.clone()
                    wanted = reduced(all_values(size, shape, dtype), op)
                    same(hvd.allreduce(mine, op=op), wanted)
                    same(mine, kept)
                    assert hvd.allreduce_(mine, op=op) is mine
                    same(mine, wanted)

                CASES[f"allreduce-{name}-{word(dtype)}-{label}"] = one
    for name in ("sum", "min", "max", "product"):

        def of_bool(rank: int, size: int, op: Any = OPS[name]) -> None:
            same(
                hvd.allreduce(values(rank, (5, 7), torch.bool), op=op),
                reduced(all_values(size, (5, 7), torch.bool), op),
            )

        CASES[f"allreduce-{name}-bool-2d"] = of_bool


def _gathers() -> None:
    for dtype in (*FLOATS, *INTS, torch.bool):
        for label, rest in (("1d", ()), ("3d", (2, 3)), ("large", (3001,))):
            if label == "large" and dtype not in (torch.float32, torch.uint8):
                continue

            def gather(rank: int, size: int, dtype: Any = dtype, rest: Any = rest) -> None:
                parts = [values(one, (one + 1, *rest), dtype) for one in range(size)]
                same(hvd.allgather(parts[rank]), torch.cat(parts))

            CASES[f"allgather-{word(dtype)}-{label}"] = gather

            def send(rank: int, size: int, dtype: Any = dtype, rest: Any = rest) -> None:
                for root in range(size):
                    mine = values(rank, (4, *rest), dtype)
                    same(hvd.broadcast(mine, root), values(root, (4, *rest), dtype))
                    assert hvd.broadcast_(mine, root) is mine
                    same(mine, values(root, (4, *rest), dtype))

            CASES[f"broadcast-{word(dtype)}-{label}"] = send

            def around(rank: int, size: int, dtype: Any = dtype, rest: Any = rest) -> None:
                mine = values(rank, (2 * size, *rest), dtype)
                wanted = torch.cat(
                    [values(one, (2 * size, *rest), dtype)[2 * rank : 2 * rank + 2] for one in range(size)]
                )
                same(hvd.alltoall(mine), wanted)

            CASES[f"alltoall-{word(dtype)}-{label}"] = around
    for dtype in (*FLOATS, torch.int32, torch.int64):
        for name in ("sum", "average"):
            for label, shape in (("even", (12, 3)), ("uneven", (7, 2)), ("few", (1, 4)), ("large", (6, 30_001))):

                def scatter(rank: int, size: int, op: Any = OPS[name], dtype: Any = dtype, shape: Any = shape) -> None:
                    whole = reduced(all_values(size, shape, dtype), op)
                    share = [shape[0] // size + (one < shape[0] % size) for one in range(size)]
                    start = sum(share[:rank])
                    same(hvd.reducescatter(values(rank, shape, dtype), op=op), whole[start : start + share[rank]])

                CASES[f"reducescatter-{name}-{word(dtype)}-{label}"] = scatter


_allreduces()
_gathers()


@case("allreduce-of-tensors-that-are-not-contiguous")
def _(rank: int, size: int) -> None:
    mine = values(rank, (6, 4), torch.float32).t()
    same(hvd.allreduce(mine, op=hvd.Sum), sum(values(one, (6, 4), torch.float32).t() for one in range(size)))  # type: ignore[arg-type]
    hvd.allreduce_(mine, op=hvd.Sum)
    same(mine, sum(values(one, (6, 4), torch.float32).t() for one in range(size)))  # type: ignore[arg-type]


@case("allreduce-sums-have-the-shape-of-the-tree")
def _(rank: int, size: int) -> None:
    """The same bits on all ranks, small and large, and those of the tree over ranks."""
    for count in (100, 300_000):
        parts = [torch.rand(count, generator=torch.Generator().manual_seed(one)) for one in range(size)]
        wanted = parts[0] + parts[1] if size == 2 else (parts[0] + parts[1]) + parts[2]
        same(hvd.allreduce(parts[rank], op=hvd.Sum), wanted)


for _dtype in (torch.float32, torch.float64, torch.int32):
    for _which in ("prescale", "postscale"):
        for _count in (11, 90_001):

            def _scaled(rank: int, size: int, dtype: Any = _dtype, which: str = _which, count: int = _count) -> None:
                factor = 2.5
                mine = values(rank, (count,), dtype)
                found = hvd.allreduce(mine, op=hvd.Sum, **{f"{which}_factor": factor})
                stack = all_values(size, (count,), dtype)

                def times(one: torch.Tensor) -> torch.Tensor:
                    return (one.double() * factor).to(dtype)

                scaled = torch.stack([times(one) for one in stack]) if which == "prescale" else stack
                wanted = scaled.sum(0).to(dtype)
                same(found, times(wanted) if which == "postscale" else wanted)

            CASES[f"allreduce-{_which}-{word(_dtype)}-{_count}"] = _scaled


@case("allreduce-average-argument")
def _(rank: int, size: int) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(hvd.allreduce(torch.ones(3), average=False), torch.full((3,), float(size)))
        same(hvd.allreduce(torch.ones(3), average=True), torch.ones(3))
    try:
        hvd.allreduce(torch.ones(3), average=True, op=hvd.Sum)
    except ValueError:
        return
    raise AssertionError("op and average together")


@case("allreduce-compression-fp16")
def _(rank: int, size: int) -> None:
    found = hvd.allreduce(torch.full((100,), 1.5 + rank), op=hvd.Sum, compression=hvd.Compression.fp16)
    same(found, torch.full((100,), sum(1.5 + one for one in range(size))))


@case("async-in-different-orders")
def _(rank: int, size: int) -> None:
    """Ranks submit in different orders, and wait in another."""
    count = 24
    order = list(range(count)) if rank % 2 == 0 else list(reversed(range(count)))
    tensors = {number: torch.full((number * 500 + 1,), float(number + rank)) for number in order}
    handles = {number: hvd.allreduce_async(tensors[number], name=f"t{number}", op=hvd.Sum) for number in order}
    for number in sorted(order, key=lambda one: (one * 7 + rank) % count):
        wanted = torch.full((number * 500 + 1,), float(sum(number + one for one in range(size))))
        same(hvd.synchronize(handles[number]), wanted)


@case("async-waits-for-the-second-first")
def _(rank: int, size: int) -> None:
    """One rank waits for b before it submits a; the others submit a first: nobody waits for ever."""
    if rank == 0:
        a = hvd.allreduce_async(torch.ones(4), name="first", op=hvd.Sum)
        b = hvd.allreduce_async(torch.ones(4), name="second", op=hvd.Sum)
        hvd.synchronize(b)
        hvd.synchronize(a)
    else:
        same(hvd.allreduce(torch.ones(4), name="second", op=hvd.Sum), torch.full((4,), float(size)))
        same(hvd.allreduce(torch.ones(4), name="first", op=hvd.Sum), torch.full((4,), float(size)))


@case("async-poll")
def _(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(100_000), name="polled", op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), torch.full((100_000,), float(size)))
    assert hvd.synchronize(handle) is None  # known no more


@case("async-input-may-change-after-submission")
def _(rank: int, size: int) -> None:
    mine = torch.ones(200_000)
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    mine.zero_()
    same(hvd.synchronize(handle), torch.full((200_000,), float(size)))


@case("async-many-at-once")
def _(rank: int, size: int) -> None:
    handles = [hvd.allreduce_async(torch.full((3,), float(number)), op=hvd.Sum) for number in range(400)]
    for number, handle in enumerate(handles):
        same(hvd.synchronize(handle), torch.full((3,), float(number * size)))


@case("a-name-again-and-again")
def _(rank: int, size: int) -> None:
    for number in range(100):
        same(
            hvd.allreduce(torch.full((2,), float(number)), name="again", op=hvd.Sum),
            torch.full((2,), float(number * size)),
        )


@case("one-name-for-two-kinds")
def _(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="both", op=hvd.Sum)
    same(hvd.broadcast(torch.full((2,), float(rank)), 0, name="both"), torch.zeros(2))
    same(hvd.synchronize(handle), torch.full((2,), float(size)))


@case("grouped-allreduce-mixed")
def _(rank: int, size: int) -> None:
    tensors = [values(rank, (5,), torch.float32), values(rank, (2, 3), torch.float64), values(rank, (4,), torch.int64)]
    tensors += [values(rank, (0,), torch.float32), values(rank, (90_000,), torch.float32)]
    kept = [one.clone() for one in tensors]
    wanted = [reduced(all_values(size, tuple(one.shape), one.dtype), hvd.Sum) for one in tensors]
    for found, one in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), wanted, strict=True):
        same(found, one)
    for one, before in zip(tensors, kept, strict=True):
        same(one, before)
    hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="mixed")
    for one, other in zip(tensors, wanted, strict=True):
        same(one, other)
    handle = hvd.grouped_allreduce_async([one.clone() for one in kept], op=hvd.Sum)
    for found, one in zip(hvd.synchronize(handle), wanted, strict=True):
        same(found, one)


@case("grouped-allreduce-average-scaled")
def _(rank: int, size: int) -> None:
    found = hvd.grouped_allreduce(
        [torch.full((3,), 2.0), torch.full((5,), 4.0)], prescale_factor=0.5, postscale_factor=3.0
    )
    same(found[0], torch.full((3,), 3.0))
    same(found[1], torch.full((5,), 6.0))


@case("grouped-allgather")
def _(rank: int, size: int) -> None:
    found = hvd.grouped_allgather([values(rank, (rank + 1, 2), torch.float32), values(rank, (2,), torch.int32)])
    same(found[0], torch.cat([values(one, (one + 1, 2), torch.float32) for one in range(size)]))
    same(found[1], torch.cat([values(one, (2,), torch.int32) for one in range(size)]))
    handle = hvd.grouped_allgather_async([torch.full((1,), float(rank))], name="ga")
    same(hvd.synchronize(handle)[0], torch.arange(float(size)))


@case("grouped-reducescatter")
def _(rank: int, size: int) -> None:
    found = hvd.grouped_reducescatter([torch.ones(size * 2, 3), torch.ones(size)], op=hvd.Sum)
    same(found[0], torch.full((2, 3), float(size)))
    same(found[1], torch.full((1,), float(size)))


@case("reducescatter-scaled")
def _(rank: int, size: int) -> None:
    found = hvd.reducescatter(torch.ones(size, 2), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    same(found, torch.full((1, 2), float(size)))
    handle = hvd.reducescatter_async(torch.ones(size, 2), name="rs", op=hvd.Average)
    same(hvd.synchronize(handle), torch.ones(1, 2))


@case("allgather-where-some-have-nothing")
def _(rank: int, size: int) -> None:
    mine = torch.full((0 if rank == 0 else 3, 2), float(rank))
    same(hvd.allgather(mine), torch.cat([torch.full((3, 2), float(one)) for one in range(1, size)]))
    same(hvd.allgather(torch.zeros(0, 4)), torch.zeros(0, 4))


@case("alltoall-splits")
def _(rank: int, size: int) -> None:
    splits = [one + 1 for one in range(size)]
    mine = torch.cat([torch.full((one + 1, 2), float(rank * 10 + one)) for one in range(size)])
    wanted = torch.cat([torch.full((rank + 1, 2), float(one * 10 + rank)) for one in range(size)])
    found, received = hvd.alltoall(mine, splits=torch.tensor(splits, dtype=torch.int32))
    same(found, wanted)
    assert received.tolist() == [rank + 1] * size
    found, received = hvd.alltoall(mine, splits=splits, name="by list")
    same(found, wanted)


@case("alltoall-to-one")
def _(rank: int, size: int) -> None:
    found, received = hvd.alltoall(torch.full((4,), float(rank)), splits=[4] + [0] * (size - 1))
    assert received.tolist() == ([4] * size if rank == 0 else [0] * size)
    assert found.numel() == (4 * size if rank == 0 else 0)


@case("sparse-allreduce")
def _(rank: int, size: int) -> None:
    torch.sparse.check_sparse_tensor_invariants.enable()
    mine = torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], (size + 1,))
    found = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Sum)()
    wanted = sum(torch.sparse_coo_tensor([[0, one]], [1.0, 2.0], (size + 1,)).to_dense() for one in range(size))
    same(found.to_dense(), wanted)  # type: ignore[arg-type]
    found = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Average)()
    assert torch.allclose(found.to_dense(), wanted / size)  # type: ignore[operator]


@case("adasum")
def _(rank: int, size: int) -> None:
    if size == 3:
        try:
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        except NotImplementedError:
            return
        raise AssertionError("three ranks")
    parallel = hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum)  # what they share counts once
    assert torch.allclose(parallel, torch.tensor([1.0, 2.0])), parallel
    apart = torch.tensor([1.0, 0.0]) if rank == 0 else torch.tensor([0.0, 3.0])
    assert torch.allclose(hvd.allreduce(apart, op=hvd.Adasum), torch.tensor([1.0, 3.0]))


@case("barrier")
def _(rank: int, size: int) -> None:
    for _ in range(20):
        hvd.barrier()


@case("join-with-allreduce")
def _(rank: int, size: int) -> None:
    for first in range(size):
        turns = 2 if rank == first else 5
        for turn in range(turns):
            taking_part = size if turn < 2 else size - 1
            found = hvd.allreduce(torch.ones(40_000 * (turn % 2) + 3), name="turn", op=hvd.Sum)
            assert found[0] == taking_part, (found[0], turn)
        last = hvd.join()
        assert last != first
        assert hvd.allgather_object(last) == [last] * size
        same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


@case("join-average-is-over-all")
def _(rank: int, size: int) -> None:
    if rank:
        same(hvd.allreduce(torch.ones(4)), torch.full((4,), (size - 1) / size))
    hvd.join()


@case("join-with-allgather-fails")
def _(rank: int, size: int) -> None:
    if rank:
        raises(CollectiveMismatch, lambda: hvd.allgather(torch.ones(2)))
    hvd.join()
    same(hvd.allgather(torch.ones(1)), torch.ones(size))


def raises(kind: type[BaseException], call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except kind as error:
        for one in words:
            assert one in str(error), (one, str(error))
        return
    raise AssertionError(f"{kind.__name__} was not raised")


@case("error-shape")
def _(rank: int, size: int) -> None:
    raises(CollectiveMismatch, lambda: hvd.allreduce(torch.ones(3 + rank)), "shape")
    raises(CollectiveMismatch, lambda: hvd.allreduce(torch.ones(100_000 + rank)), "shape")
    raises(CollectiveMismatch, lambda: hvd.allreduce(torch.ones(*((6,) if rank else (2, 3)))), "shape")
    raises(HorovodInternalError, lambda: hvd.broadcast(torch.ones(3 + rank), 0), "shape")
    raises(RuntimeError, lambda: hvd.allgather(torch.ones(2, 3 + rank)), "shape")
    raises(RuntimeError, lambda: hvd.allgather(torch.ones(*[2] * (rank + 1))), "shape")
    raises(RuntimeError, lambda: hvd.reducescatter(torch.ones(4 + rank, 2)), "shape")
    raises(RuntimeError, lambda: hvd.alltoall(torch.ones(size, 2 + rank)), "shape")
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


@case("error-dtype")
def _(rank: int, size: int) -> None:
    mine = torch.ones(6, dtype=torch.float32 if rank else torch.int32)
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda one: hvd.broadcast(one, 0)):
        raises(CollectiveMismatch, lambda call=call: call(mine), "dtype")  # type: ignore[misc]
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


@case("error-op")
def _(rank: int, size: int) -> None:
    raises(CollectiveMismatch, lambda: hvd.allreduce(torch.ones(3), op=hvd.Min if rank else hvd.Max), "op", "Max")
    raises(CollectiveMismatch, lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + rank), "scale")
    raises(CollectiveMismatch, lambda: hvd.broadcast(torch.ones(3), 1 if rank else 0), "root")


@case("error-kind")
def _(rank: int, size: int) -> None:
    raises(
        CollectiveMismatch, lambda: hvd.allreduce(torch.ones(3)) if rank else hvd.allgather(torch.ones(3)), "allgather"
    )
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


@case("error-group")
def _(rank: int, size: int) -> None:
    raises(CollectiveMismatch, lambda: hvd.grouped_allreduce([torch.ones(2)] * (rank + 1)), "number of tensors")


@case("error-name")
def _(rank: int, size: int) -> None:
    """Every rank waits for another name: all are told, rather than waiting for ever."""
    raises(CollectiveStall, lambda: hvd.allreduce(torch.ones(3), name=f"of-{rank}"), "of-0", "of-1", "rank 1")
    same(hvd.allreduce(torch.ones(3), name="after", op=hvd.Sum), torch.full((3,), float(size)))
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


@case("error-name-in-a-process-set")
def _(rank: int, size: int) -> None:
    """Two ranks wait for each other; the third is busy all the while, and is none of theirs."""
    if size == 2:
        return
    some = hvd.add_process_set([0, 1])
    told = Path(str(hvd.broadcast_object(tempfile.mkdtemp(), 0)))
    if rank < 2:
        mine = lambda: hvd.allreduce(torch.ones(3), name=f"set-{rank}", process_set=some)  # noqa: E731
        raises(CollectiveStall, mine, "rank 0 waits for allreduce 'set-0', which rank 1 has not submitted", "set-1")
        (told / str(rank)).touch()
    else:
        until = time.monotonic() + 60.0
        while len(list(told.iterdir())) < 2:
            assert time.monotonic() < until, "ranks 0 and 1 wait for ever"
            time.sleep(0.05)
    for _ in range(2):
        same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))
    hvd.remove_process_set(some)


@case("process-sets-one-after-the-other")
def _(rank: int, size: int) -> None:
    """Of other ranks, whose collectives are counted from the beginning, by who was in the first set, too."""
    for members in ([0, 1], [1, 2], [0, 2], [0, 1]) if size == 3 else ([0], [1], [0]):
        some = hvd.add_process_set(members)
        for turn in range(3 if rank in members else 0):
            for name in ("x", None):
                found = hvd.allreduce(torch.full((2,), float(turn)), name=name, op=hvd.Sum, process_set=some)
                same(found, torch.full((2,), float(turn * len(members))))
        hvd.remove_process_set(some)


@case("process-set-that-is-removed-under-way")
def _(rank: int, size: int) -> None:
    if size == 2:
        return
    some = hvd.add_process_set([0, 1])
    handle = hvd.allreduce_async(torch.ones(2), name="left", process_set=some) if rank == 0 else None
    hvd.remove_process_set(some)
    if handle is not None:
        raises(HorovodInternalError, lambda: hvd.synchronize(handle), "removed")
    if rank == 0:
        assert hvd.poll(handle)  # type: ignore[arg-type]


@case("error-duplicate-name")
def _(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum) if rank == 0 else None
    if rank == 0:
        raises(ValueError, lambda: hvd.allreduce_async(torch.ones(2), name="twice"), "twice")
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    same(hvd.synchronize(handle), torch.full((2,), float(size)))


@case("error-on-one-rank-only")
def _(rank: int, size: int) -> None:
    """A rank's own mistake is a ValueError there, and the others are told."""
    if rank == 0:
        raises(ValueError, lambda: hvd.alltoall(torch.ones(4), splits=[4, 1, *[0] * (size - 2)]), "splits")
    else:
        raises(CollectiveMismatch, lambda: hvd.alltoall(torch.ones(size)), "rank 0", "splits")
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


@case("error-splits")
def _(rank: int, size: int) -> None:
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(4), splits=[4]))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(size), splits=torch.ones(size)))
    raises(ValueError, lambda: hvd.broadcast(torch.ones(2), size))


@case("error-scalars-and-kinds")
def _(rank: int, size: int) -> None:
    raises(RuntimeError, lambda: hvd.allgather(torch.tensor(1.0)), "scalar")
    raises(RuntimeError, lambda: hvd.reducescatter(torch.tensor(1.0)), "scalar")
    raises(RuntimeError, lambda: hvd.reducescatter(torch.ones(size), op=hvd.Min), "Min")
    raises(RuntimeError, lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)), "bool")
    raises(ValueError, lambda: hvd.allreduce([1.0]))  # type: ignore[arg-type]


@case("objects")
def _(rank: int, size: int) -> None:
    obj = {"a": [1, 2.5, None, "x"], "t": torch.arange(4), "rank": rank}
    found = hvd.broadcast_object(obj, 1)
    assert found["rank"] == 1 and found["a"] == obj["a"] and torch.equal(found["t"], obj["t"])
    assert hvd.broadcast_object(None if rank else ("only", "root"), 0, name="n") == ("only", "root")
    assert [one["rank"] for one in hvd.allgather_object(obj)] == list(range(size))
    large = hvd.allgather_object(torch.full((50_000 * (rank + 1),), float(rank)))
    assert [one.numel() for one in large] == [50_000 * (one + 1) for one in range(size)]


class NotPlain:
    def __init__(self, value: int) -> None:
        self.value = value


@case("objects-that-cannot-travel")
def _(rank: int, size: int) -> None:
    if rank == 0:
        raises(ConfigError, lambda: hvd.broadcast_object(NotPlain(1), 0), "allow_pickle")
    else:
        raises(HorovodInternalError, lambda: hvd.broadcast_object(None, 0), "rank 0")
    assert hvd.broadcast_object(NotPlain(7 + rank), 0, allow_pickle=True).value == 7
    if rank == 0:
        hvd.broadcast_object(NotPlain(1), 0, allow_pickle=True)
    else:  # who has not said so itself unpickles nothing
        raises(ConfigError, lambda: hvd.broadcast_object(None, 0), "allow_pickle")


@case("process-sets")
def _(rank: int, size: int) -> None:
    if size == 2:
        raises(ValueError, lambda: hvd.add_process_set([0, 1]), "already")
        return
    some = hvd.add_process_set([0, size - 1])
    assert some.process_set_id and some.ranks == [0, size - 1]
    if rank in some.ranks:
        assert some.included() and some.rank() == some.ranks.index(rank) and some.size() == 2
        same(hvd.allreduce(torch.full((4,), float(rank)), op=hvd.Sum, process_set=some), torch.full((4,), size - 1.0))
        same(hvd.allgather(torch.full((1,), float(rank)), process_set=some), torch.tensor([0.0, size - 1.0]))
        same(hvd.broadcast(torch.full((2,), float(rank)), size - 1, process_set=some), torch.full((2,), size - 1.0))
        large = hvd.allreduce(torch.full((90_000,), 1.0), op=hvd.Sum, process_set=some)
        same(large, torch.full((90_000,), 2.0))
        same(hvd.reducescatter(torch.ones(2), op=hvd.Sum, process_set=some), torch.full((1,), 2.0))
        same(hvd.alltoall(torch.full((2,), float(rank)), process_set=some), torch.tensor([0.0, size - 1.0]))
        hvd.barrier(process_set=some)
        assert hvd.broadcast_object(rank, 0, process_set=some) == 0
    elif size > 2:
        raises(ValueError, lambda: hvd.allreduce(torch.ones(2), process_set=some), "process set")
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))
    assert hvd.remove_process_set(some)
    assert some.process_set_id is None and not hvd.remove_process_set(some)
    raises(ValueError, lambda: hvd.allreduce(torch.ones(2), process_set=some), "add_process_set")


@case("process-sets-of-one-and-wrong-ones")
def _(rank: int, size: int) -> None:
    alone = [hvd.add_process_set([one]) for one in range(size)] if size > 1 else []
    same(
        hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum, process_set=alone[rank]), torch.full((2,), float(rank))
    )
    raises(ValueError, lambda: hvd.add_process_set([0]), "already")
    raises(ValueError, lambda: hvd.add_process_set([0, size]), "not ranks")
    raises(ValueError, lambda: hvd.ProcessSet(["x"]))  # type: ignore[list-item]
    for one in alone:
        assert hvd.remove_process_set(one)


@case("gradients")
def _(rank: int, size: int) -> None:
    """As Horovod has them."""
    for op, wanted in ((hvd.Sum, float(size)), (hvd.Average, 1.0)):
        mine = torch.ones(4, requires_grad=True)
        hvd.allreduce(mine, op=op).backward(torch.ones(4))
        assert mine.grad is not None
        same(mine.grad, torch.full((4,), wanted))
    pair = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    sum(one.sum() for one in hvd.grouped_allreduce(pair, op=hvd.Sum)).backward()  # type: ignore[union-attr]
    assert all(one.grad is not None and torch.equal(one.grad, torch.full_like(one, float(size))) for one in pair)
    mine = torch.full((rank + 1, 2), 1.0, requires_grad=True)
    weights = torch.cat([torch.full((one + 1, 2), float(one)) for one in range(size)])
    hvd.allgather(mine).backward(weights)
    assert mine.grad is not None
    same(mine.grad, torch.full((rank + 1, 2), float(rank)))
    mine = torch.ones(3, requires_grad=True)
    hvd.broadcast(mine, 1).backward(torch.ones(3))
    assert mine.grad is not None
    same(mine.grad, torch.full((3,), 1.0 if rank == 1 else 0.0))
    mine = torch.ones(size * 2, requires_grad=True)
    hvd.alltoall(mine).backward(torch.full((size * 2,), float(rank)))
    assert mine.grad is not None
    same(mine.grad, torch.arange(float(size)).repeat_interleave(2))
    for op, wanted in ((hvd.Sum, float(size)), (hvd.Average, 1.0)):
        mine = torch.ones(size * 2, 2, requires_grad=True)
        hvd.reducescatter(mine, op=op).backward(torch.ones(2, 2))
        assert mine.grad is not None
        same(mine.grad, torch.full((size * 2, 2), wanted))


@case("timeline")
def _(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        hvd.start_timeline(str(path))
        hvd.allreduce(torch.ones(3), name="traced")
        hvd.allgather(torch.ones(3), name="also")
        hvd.stop_timeline()
        if rank == 0:
            events = json.loads(path.read_text())
            names = {event.get("name") for event in events}
            assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_ALLGATHER", "ALLGATHER"} <= names, names
            assert sum(event["ph"] == "B" for event in events) == sum(event["ph"] == "E" for event in events)
            rows = {event["args"]["name"] for event in events if event.get("ph") == "M"}
            assert rows == {"allreduce.traced", "allgather.also"}


@case("basics")
def _(rank: int, size: int) -> None:
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert not hvd.mpi_built() and not hvd.mpi_enabled() and hvd.gloo_built() and hvd.gloo_enabled()
    assert not hvd.nccl_built() and not hvd.cuda_built() and not hvd.rocm_built()
    hvd.init()
    assert hvd.rank() == rank


@case("init-again")
def _(rank: int, size: int) -> None:
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    raises(ValueError, hvd.rank, "init")
    hvd.init()
    assert hvd.size() == size and hvd.rank() == rank
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


def _training(rank: int, size: int, **options: Any) -> list[torch.Tensor]:
    """The weights after a few steps of a small model, each rank with its part of the batch."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    data = torch.rand(size * 4, 6, generator=torch.Generator().manual_seed(1))
    target = torch.rand(size * 4, 3, generator=torch.Generator().manual_seed(2))
    passes = options.get("backward_passes_per_step", 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    for _ in range(4):
        optimizer.zero_grad()
        part = slice(rank * 4, rank * 4 + 4)
        for piece in range(passes):
            rows = slice(part.start + piece * 4 // passes, part.start + (piece + 1) * 4 // passes)
            (torch.nn.functional.mse_loss(model(data[rows]), target[rows]) / passes).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def _alone(size: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    data = torch.rand(size * 4, 6, generator=torch.Generator().manual_seed(1))
    target = torch.rand(size * 4, 3, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def _options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "plain", {}
    yield "fp16", {"compression": hvd.Compression.fp16}
    yield "predivided", {"gradient_predivide_factor": 2.0}
    yield "in-passes", {"backward_passes_per_step": 2}
    yield "groups", {"groups": 2}


for _label, _given in _options():

    def _trains(rank: int, size: int, given: Any = _given) -> None:
        found, wanted = _training(rank, size, **given), _alone(size)
        near = 2e-2 if "compression" in given else 1e-5
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, atol=near), (one - other).abs().max()
        for one in found:
            same(hvd.broadcast(one, 0), one)

    CASES[f"optimizer-{_label}"] = _trains


@case("optimizer-unused-parameters-and-clipping")
def _(rank: int, size: int) -> None:
    torch.manual_seed(0)
    used, unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1))
    before = unused.weight.detach().clone()
    (used(torch.ones(1, 3)).sum() + (unused(torch.ones(1, 3)).sum() if rank == 0 else 0.0)).backward()
    optimizer.synchronize()
    assert unused.weight.grad is not None
    same(unused.weight.grad, torch.ones(2, 3) / size)
    torch.nn.utils.clip_grad_norm_(used.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(unused.weight, before - 0.1 / size)
    used(torch.ones(1, 3)).sum().backward()
    raises(AssertionError, optimizer.zero_grad)
    optimizer.step()


@case("optimizers-that-share-a-backward-pass")
def _(rank: int, size: int) -> None:
    """As of a generator and a discriminator: both reduce at the same time, with names and without."""
    for named in (True, False):
        one, other = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
        optimizers = []
        for prefix, model in (("one", one), ("other", other)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            names = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
            plain = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizers.append(hvd.DistributedOptimizer(plain, named_parameters=names if named else None))
        order = optimizers if rank == 0 else optimizers[::-1]
        other(one(torch.full((1, 3), float(rank)))).sum().backward()
        for optimizer in order:
            optimizer.step()
        mean = (size - 1) / 2
        same(other.bias.detach(), torch.zeros(1))
        same(one.weight.detach(), torch.full((2, 3), 1.0 - mean))
        same(other.weight.detach(), torch.full((1, 2), 1.0 - (3 * mean + 1)))


@case("optimizer-misuse")
def _(rank: int, size: int) -> None:
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(ValueError, lambda: hvd.DistributedOptimizer(plain, named_parameters=[("a", model.weight)]), "lacks 1")
    pairs = [("a", model.weight), ("a", model.bias)]
    raises(ValueError, lambda: hvd.DistributedOptimizer(plain, named_parameters=pairs), "unique")
    raises(ValueError, lambda: hvd.DistributedOptimizer(plain, named_parameters=[model.weight]))  # type: ignore[list-item]
    raises(ValueError, lambda: hvd.DistributedOptimizer(plain, op=hvd.Sum, gradient_predivide_factor=2.0))


@case("optimizer-adasum")
def _(rank: int, size: int) -> None:
    if size == 3:
        return
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - 0.1)


@case("optimizer-adasum-with-compression-and-several-passes")
def _(rank: int, size: int) -> None:
    if size == 3:
        return
    model = torch.nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        op=hvd.Adasum,
        backward_passes_per_step=2,
        compression=hvd.Compression.fp16,
    )
    for _ in range(2):
        before = model.weight.detach().clone()
        for _ in range(2):
            model(torch.full((1, 3), 1.0 + 2.0**-14)).sum().backward()  # which float16 cannot tell from 1
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(model.weight, before - 2.0, atol=1e-6), before - model.weight
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    raises(AssertionError, lambda: model(torch.ones(1, 3)).sum().backward(), "backward_passes_per_step")


@case("in-place-with-parameters")
def _(rank: int, size: int) -> None:
    """Which require a gradient, small and large ones."""
    for shape in ((3,), (300, 301)):
        total = torch.full(shape, float(sum(range(size))))
        for call in (hvd.allreduce_, lambda one, op: hvd.synchronize(hvd.allreduce_async_(one, op=op))):
            parameter = torch.nn.Parameter(torch.full(shape, float(rank)))
            assert call(parameter, op=hvd.Sum) is parameter and parameter.requires_grad and parameter.is_leaf  # type: ignore[operator]
            same(parameter.detach(), total)
        several = [torch.nn.Parameter(torch.full(shape, float(rank))) for _ in range(2)]
        for call_all in (
            hvd.grouped_allreduce_,
            lambda ones, op: hvd.synchronize(hvd.grouped_allreduce_async_(ones, op=op)),
        ):
            with torch.no_grad():
                for one in several:
                    one.fill_(rank)
            for one, found in zip(several, call_all(several, op=hvd.Sum), strict=True):  # type: ignore[operator]
                assert one is found
                same(one.detach(), total)


@case("broadcast-that-is-taken-later")
def _(rank: int, size: int) -> None:
    """As one to a GPU is: when it is taken, the root has put other things where it was."""
    numbers = torch.full((10_000,), 1.0 + rank)
    exchange = runtime().world.exchange
    handle = exchange.submit(ask(Kind.BROADCAST, [numbers], "later", hvd.global_process_set, root=0), [numbers])
    while not exchange.poll(handle):
        pass
    for turn in range(5):
        hvd.allreduce(torch.full((10_000,), 7.0 + turn), name="over it")
    same(exchange.synchronize(handle).results[0], torch.ones(10_000))


@case("optimizer-of-a-process-set")
def _(rank: int, size: int) -> None:
    some = hvd.add_process_set([1])
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=some)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    same(model.weight.detach(), torch.full((1, 2), -1.0))
    hvd.remove_process_set(some)


@case("optimizer-sparse-gradients")
def _(rank: int, size: int) -> None:
    for dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=dense)
        table(torch.tensor([0, min(rank + 1, 3)])).sum().backward()
        optimizer.step()
        wanted = torch.zeros(4, 2)
        wanted[0] = -1.0
        for one in range(size):
            wanted[min(one + 1, 3)] -= 1.0 / size
        assert torch.allclose(table.weight.detach(), wanted), table.weight


@case("broadcast-parameters-and-optimizer-state")
def _(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
    if rank == 0:
        for _ in range(3):
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object([model.state_dict(), optimizer.state_dict()])
    for one in states[1:]:
        assert torch.equal(one[0]["weight"], states[0][0]["weight"])
        assert torch.equal(one[1]["state"][0]["exp_avg"], states[0][1]["state"][0]["exp_avg"])
        assert one[1]["param_groups"][0]["lr"] == 0.01
    raises(ValueError, lambda: hvd.broadcast_parameters(3, 0))  # type: ignore[arg-type]
    raises(ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0))


@case("sync-batch-norm")
def _(rank: int, size: int) -> None:
    torch.manual_seed(3)
    whole = torch.rand(4 * size, 3, 5, dtype=torch.float64)
    plain, ours = torch.nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
    mine = whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    every = whole.clone().requires_grad_()
    found, wanted = ours(mine), plain(every)
    weights = torch.rand(4 * size, 3, 5, dtype=torch.float64)
    (found * weights[4 * rank : 4 * rank + 4]).sum().backward()
    (wanted * weights).sum().backward()
    assert torch.allclose(found, wanted[4 * rank : 4 * rank + 4])
    assert mine.grad is not None and every.grad is not None
    assert torch.allclose(mine.grad, every.grad[4 * rank : 4 * rank + 4])
    assert torch.allclose(ours.running_var, plain.running_var) and torch.allclose(ours.running_mean, plain.running_mean)  # type: ignore[arg-type]
    ours.eval()
    plain.eval()
    assert torch.allclose(ours(whole), plain(whole))


@case("elastic-state")
def _(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sampler = hvd.elastic.ElasticSampler(range(10))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=rank, names=["a"])
    for _ in range(2):  # the second time all have it already
        sampler.num_replicas = 99
        state.sync()
        assert sampler.num_replicas == size and state.batch == 0 and state.names == ["a"]
        states = hvd.allgather_object([state.model.state_dict(), state.optimizer.state_dict()])
        assert all(torch.equal(one[0]["weight"], states[0][0]["weight"]) for one in states)
        assert all(one[1]["param_groups"][0]["lr"] == 0.1 for one in states)
    with torch.no_grad():
        model.weight.add_(1.0)
    state.batch = 5
    state.names.append("b")
    state.restore()
    assert state.batch == 0 and state.names == ["a"] and torch.equal(model.weight, states[0][0]["weight"])
    state.batch = 6
    state.commit()
    state.batch = 7
    state.restore()
    assert state.batch == 6
    called: list[int] = []
    state.register_reset_callbacks([lambda: called.append(1)])
    state.on_reset()
    assert called == [1]


@case("elastic-run-gives-mistakes-of-the-script-back")
def _(rank: int, size: int) -> None:
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(1)
        hvd.allreduce(torch.ones(2 + rank))

    state = hvd.elastic.ObjectState(batch=0)
    raises(CollectiveMismatch, lambda: train(state), "shape")
    assert calls == [1]


@case("elastic-sampler")
def _(rank: int, size: int) -> None:
    sampler = hvd.elastic.ElasticSampler(list(range(20)), shuffle=True, seed=3)
    everybodys = hvd.allgather_object(list(sampler))
    assert {one for part in everybodys for one in part} == set(range(20)) and len({len(one) for one in everybodys}) == 1
    sampler.record_batch(0, 2)
    again = hvd.elastic.ElasticSampler(list(range(20)), shuffle=True, seed=3)
    again.load_state_dict(sampler.state_dict())
    assert again.processed_num == 2 * size
    left = {one for part in hvd.allgather_object(list(again)) for one in part}
    assert len(left) == 20 - 2 * size
