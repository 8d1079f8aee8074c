"""Cases of the conformance suite for TensorFlow and Keras, as cases.py has them for PyTorch.

Collectives are called twice in most cases: eagerly, and inside a tf.function.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_tf_keras
import keras
import numpy as np
import tensorflow as tf

from holdfast.core.errors import ConfigError
from holdfast.horovod.common.exceptions import CollectiveMismatch, CollectiveStall, HorovodInternalError
from holdfast.horovod.tensorflow.bridge import own_errors

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}
FLOATS = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
INTS = (tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64)
SHAPES = {"scalar": (), "2d": (5, 7), "empty": (0,), "empty2d": (4, 0), "large": (70_003,)}
OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def case(name: str) -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return keep


def numbers(rank: int, shape: tuple[int, ...]) -> Any:
    """Small whole numbers, others on every rank: sums and products of a few are exact in every dtype."""
    count = math.prod(shape)
    return ((np.arange(count) * (rank + 1) + rank) % 3 + 1).reshape(shape)


def tensor(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return tf.cast(tf.constant(numbers(rank, shape)), dtype)


def same(found: Any, wanted: Any, dtype: Any = None) -> None:
    assert dtype is None or found.dtype == dtype, (found.dtype, dtype)
    got = tf.cast(found, tf.float64).numpy() if found.dtype != tf.bool else found.numpy()
    assert got.shape == np.shape(wanted), (got.shape, np.shape(wanted))
    assert np.array_equal(got, np.asarray(wanted)), (got, wanted)


def both_ways(call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What comes of it eagerly, and in a graph, which does not know the shapes.

    A graph takes longer to make than all else, so that one dtype of a size does for the others.
    """
    if arguments[0].dtype not in (tf.float32, tf.bfloat16, tf.int64, tf.bool):
        return [call(*arguments)]
    unknown = [tf.TensorSpec([None] * one.shape.rank, one.dtype) for one in arguments]
    in_graph = tf.function(call, input_signature=unknown)
    return [call(*arguments), in_graph(*arguments)]


def reduced(size: int, shape: tuple[int, ...], dtype: Any, op: Any) -> Any:
    stack = np.stack([numbers(rank, shape) for rank in range(size)]).astype(np.float64)
    if op == hvd.Average:
        total = stack.sum(0)
        exact = total / size if dtype.is_floating else np.trunc(total / size)
        return (
            tf.cast(tf.cast(exact, dtype), tf.float64).numpy()
            if dtype != tf.float32
            else np.float32(np.float32(total) / np.float32(size)).astype(np.float64)
        )
    return {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op](stack, axis=0)


def _collectives() -> None:
    for name, op in OPS.items():
        for dtype in (*FLOATS, *INTS):
            for label, shape in SHAPES.items():
                if label != "2d" and dtype not in (tf.float32, tf.int64):
                    continue
                if name not in ("sum", "average") and label not in ("2d", "empty"):
                    continue

                def one(rank: int, size: int, op: Any = op, dtype: Any = dtype, shape: Any = shape) -> None:
                    for found in both_ways(lambda mine: hvd.allreduce(mine, op=op), tensor(rank, shape, dtype)):
                        same(found, reduced(size, shape, dtype, op), dtype)

                CASES[f"allreduce-{name}-{dtype.name}-{label}"] = one
    for dtype in (*FLOATS, *INTS, tf.uint32, tf.complex64, tf.bool):
        _moves(dtype)


def _moves(dtype: Any) -> None:
    """What carries values and does not compute with them."""

    def plain(rank: int, rows: int) -> Any:
        values = numbers(rank, (rows, 3))
        return tf.constant(values % 2 == 0) if dtype == tf.bool else tf.cast(tf.constant(values), dtype)

    def equal(found: Any, wanted: Any) -> None:
        assert found.dtype == dtype and found.shape == wanted.shape, (found.dtype, found.shape, wanted.shape)
        assert np.array_equal(found.numpy(), wanted.numpy()), (found, wanted)

    def gather(rank: int, size: int) -> None:
        wanted = tf.concat([plain(one, one + 1) for one in range(size)], 0)
        for found in both_ways(hvd.allgather, plain(rank, rank + 1)):
            equal(found, wanted)

    def send(rank: int, size: int) -> None:
        for root in range(size):
            for found in both_ways(lambda mine, root=root: hvd.broadcast(mine, root), plain(rank, 4)):
                equal(found, plain(root, 4))

    def around(rank: int, size: int) -> None:
        wanted = tf.concat([plain(one, 2 * size)[2 * rank : 2 * rank + 2] for one in range(size)], 0)
        for found in both_ways(hvd.alltoall, plain(rank, 2 * size)):
            equal(found, wanted)

    CASES[f"allgather-{dtype.name}"] = gather
    CASES[f"broadcast-{dtype.name}"] = send
    CASES[f"alltoall-{dtype.name}"] = around


_collectives()


for _dtype in (tf.float32, tf.float64, tf.int32):
    for _op in ("sum", "average"):
        for _label, _shape in (("even", (12, 3)), ("uneven", (7, 2)), ("few", (1, 4))):

            def _scatters(rank: int, size: int, dtype: Any = _dtype, op: Any = OPS[_op], shape: Any = _shape) -> None:
                whole = reduced(size, shape, dtype, op)
                share = [shape[0] // size + (one < shape[0] % size) for one in range(size)]
                start = sum(share[:rank])
                for found in both_ways(lambda mine: hvd.reducescatter(mine, op=op), tensor(rank, shape, dtype)):
                    same(found, whole[start : start + share[rank]], dtype)

            CASES[f"reducescatter-{_op}-{_dtype.name}-{_label}"] = _scatters


@case("allreduce-scaled")
def _(rank: int, size: int) -> None:
    for found in both_ways(
        lambda mine: hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        tf.ones([4]) * (rank + 1),
    ):
        same(found, [size * (size + 1) / 2.0] * 4)


@case("allreduce-average-argument-and-others")
def _(rank: int, size: int) -> None:
    same(hvd.allreduce(tf.ones([2]), average=False), [float(size)] * 2)
    same(hvd.allreduce(tf.ones([2]), device_dense="/cpu:0", device_sparse="", ignore_name_scope=True), [1.0] * 2)
    same(hvd.allreduce(tf.Variable([1.0, 2.0]), op=hvd.Sum), [size, 2.0 * size])
    raises(ValueError, lambda: hvd.allreduce(tf.ones([2]), average=True, op=hvd.Sum), "not both")
    raises(TypeError, lambda: hvd.allreduce(tf.ones([2]), nothing=1), "nothing")


@case("allreduce-compression-fp16")
def _(rank: int, size: int) -> None:
    for found in both_ways(
        lambda mine: hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16), tf.ones([3]) * 1.0009765625
    ):
        same(found, [float(np.float16(np.float16(1.0009765625) * size))] * 3, tf.float32)


@case("grouped")
def _(rank: int, size: int) -> None:
    def reduce(one: Any, other: Any) -> Any:
        return hvd.grouped_allreduce([one, other], op=hvd.Sum, name="pair")

    for one, other in both_ways(reduce, tensor(rank, (3, 2), tf.float32), tensor(rank, (5,), tf.int64)):
        same(one, reduced(size, (3, 2), tf.float32, hvd.Sum), tf.float32)
        same(other, reduced(size, (5,), tf.int64, hvd.Sum), tf.int64)
    for one, other in both_ways(
        lambda one, other: hvd.grouped_allgather([one, other]), tf.fill([rank + 1], float(rank)), tf.fill([1], rank)
    ):
        same(one, [float(which) for which in range(size) for _ in range(which + 1)])
        same(other, list(range(size)), tf.int32)
    for one, other in both_ways(
        lambda one, other: hvd.grouped_reducescatter([one, other], op=hvd.Sum), tf.ones([size]), tf.ones([2 * size, 2])
    ):
        same(one, [float(size)])
        same(other, np.full((2, 2), float(size)))
    assert hvd.grouped_allreduce([]) == []


@case("allgather-where-some-have-nothing")
def _(rank: int, size: int) -> None:
    for found in both_ways(hvd.allgather, tf.ones([2 if rank == 1 else 0, 3])):
        same(found, np.ones((2, 3)))


@case("alltoall-splits")
def _(rank: int, size: int) -> None:
    mine, splits = tf.fill([size * (size + 1) // 2], float(rank)), tf.range(1, size + 1)
    for found, received in both_ways(lambda mine, splits: hvd.alltoall(mine, splits), mine, splits):
        same(found, [float(one) for one in range(size) for _ in range(rank + 1)])
        same(received, [rank + 1] * size, tf.int32)


@case("adasum")
def _(rank: int, size: int) -> None:
    mine = tf.constant([1.0, 0.0] if rank == 0 else [0.0, 2.0])
    if size == 2:
        same(hvd.allreduce(mine, op=hvd.Adasum), [1.0, 2.0])
    else:
        raises(NotImplementedError, lambda: hvd.allreduce(mine, op=hvd.Adasum), "power of two")


@case("sparse")
def _(rank: int, size: int) -> None:
    """Rows of all ranks, with their indices; also in a graph, and as a dense tensor on request."""

    def gradients(table: Any, dense: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 4]) * float(rank + 1))
        return hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, table)

    table = tf.Variable(tf.ones([5, 2]))
    wanted = np.zeros((5, 2))
    for one in range(size):
        wanted[one] += (one + 1.0) / size
        wanted[4] += (one + 1.0) / size
    for call in (gradients, tf.function(gradients)):
        slices, dense = call(table, False), call(table, True)
        assert isinstance(slices, tf.IndexedSlices) and not isinstance(dense, tf.IndexedSlices)
        assert slices.values.shape == (2 * size, 2)
        for found in (tf.convert_to_tensor(slices), dense):
            assert np.allclose(found.numpy(), wanted, atol=1e-6), (found, wanted)
    rows = tf.IndexedSlices(tf.ones([1, 2]), [rank], dense_shape=[5, 2])
    same(tf.convert_to_tensor(hvd.allreduce(rows, op=hvd.Sum)), [[1.0 * (row < size)] * 2 for row in range(5)])
    raises(NotImplementedError, lambda: hvd.allreduce(rows, op=hvd.Min), "Min")
    raises(NotImplementedError, lambda: hvd.allreduce(rows, op=hvd.Adasum), "sparse_as_dense")


@case("join-barrier-and-numbers")
def _(rank: int, size: int) -> None:
    if rank == 0:
        same(hvd.allreduce(tf.ones([2]), op=hvd.Sum), [1.0, 1.0])
    assert 0 <= hvd.join() < size
    hvd.barrier()
    numbers_now = tf.function(
        lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.process_set_included_op())
    )
    assert [int(one) for one in numbers_now()] == [rank, size, rank, 1]
    assert int(hvd.local_size_op()) == hvd.local_size() == size


def raises(kind: type[BaseException], call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except kind as error:
        for one in words:
            assert one in str(error), (one, str(error))
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def all_is_well(size: int) -> None:
    same(hvd.allreduce(tf.ones([3]), op=hvd.Sum), [float(size)] * 3)


@case("error-shape-dtype-op-and-kind")
def _(rank: int, size: int) -> None:
    one = tf.ones([6], tf.float32 if rank else tf.int32)
    raises(CollectiveMismatch, lambda: hvd.allreduce(tf.ones([3 + rank])), "shape")
    raises(CollectiveMismatch, lambda: hvd.allgather(tf.ones([2, 3 + rank])), "shape")
    raises(CollectiveMismatch, lambda: hvd.reducescatter(tf.ones([4 + rank, 2])), "shape")
    raises(CollectiveMismatch, lambda: hvd.allreduce(one), "dtype")
    raises(CollectiveMismatch, lambda: hvd.allgather(one), "dtype")
    raises(CollectiveMismatch, lambda: hvd.allreduce(tf.ones([3]), op=hvd.Min if rank else hvd.Max), "op")
    raises(CollectiveMismatch, lambda: hvd.broadcast(tf.ones([3]), 1 if rank else 0), "root")
    raises(CollectiveMismatch, lambda: hvd.broadcast_variables([tf.Variable(tf.ones([3 + rank]))], 0), "shape")
    raises(CollectiveMismatch, lambda: hvd.allreduce(tf.ones([3])) if rank else hvd.allgather(tf.ones([3])))
    raises(CollectiveMismatch, lambda: hvd.grouped_allreduce([tf.ones([2])] * (rank + 1)), "number of tensors")
    all_is_well(size)


@case("error-names")
def _(rank: int, size: int) -> None:
    raises(CollectiveStall, lambda: hvd.allreduce(tf.ones([3]), name=f"of-{rank}"), "of-0", "of-1")
    all_is_well(size)


@case("error-in-a-graph")
def _(rank: int, size: int) -> None:
    """TensorFlow's error on every rank, with the sentence in it; elastic.run has the one that was raised."""
    wrong = tf.function(lambda: hvd.allreduce(tf.ones([3 + rank])))
    raises(tf.errors.OpError, wrong, "shape")

    def unwrapped() -> None:
        with own_errors():
            wrong()

    raises(CollectiveMismatch, unwrapped, "shape")
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(1)
        wrong()

    raises(CollectiveMismatch, lambda: train(hvd.elastic.ObjectState(batch=0)), "shape")
    assert calls == [1]
    all_is_well(size)


@case("error-of-one-rank")
def _(rank: int, size: int) -> None:
    if rank == 0:
        raises(ValueError, lambda: hvd.alltoall(tf.ones([4]), splits=[4, 1, *[0] * (size - 2)]), "splits")
    else:
        raises(CollectiveMismatch, lambda: hvd.alltoall(tf.ones([size])), "rank 0", "splits")
    raises(ValueError, lambda: hvd.alltoall(tf.ones([size + 1])), "splits")
    raises(ValueError, lambda: hvd.broadcast(tf.ones([2]), size), "root_rank")
    raises(HorovodInternalError, lambda: hvd.allgather(tf.constant(1.0)), "scalar")
    raises(HorovodInternalError, lambda: hvd.allreduce(tf.ones([2], tf.uint32)), "uint32")
    raises(HorovodInternalError, lambda: hvd.allreduce(tf.constant([True])), "bool")
    raises(ValueError, lambda: hvd.allreduce(tf.constant(["a"])), "strings")
    all_is_well(size)


@case("process-sets")
def _(rank: int, size: int) -> None:
    if size == 2:
        alone = [hvd.add_process_set([one]) for one in range(size)]
        same(hvd.allreduce(tf.fill([2], float(rank)), process_set=alone[rank]), [float(rank)] * 2)
        assert all(hvd.remove_process_set(one) for one in alone)
        return
    some = hvd.add_process_set([0, size - 1])
    variable = tf.Variable([float(rank)])
    with tf.GradientTape() as tape:
        loss = variable * float(rank)
    gradient = hvd.DistributedGradientTape(tape, process_set=some).gradient(loss, variable)
    if rank in some.ranks:
        for found in both_ways(lambda one: hvd.allreduce(one, op=hvd.Sum, process_set=some), tf.fill([4], float(rank))):
            same(found, [size - 1.0] * 4)
        same(hvd.allgather(tf.fill([1], float(rank)), process_set=some), [0.0, size - 1.0])
        hvd.broadcast_variables([variable], size - 1, process_set=some)
        same(variable, [size - 1.0])
        same(gradient, [(size - 1) / 2])
        assert hvd.broadcast_object(rank, 0, process_set=some) == 0
    else:
        raises(ValueError, lambda: hvd.allreduce(tf.ones([2]), process_set=some), "process set")
        same(gradient, [float(rank)])
    all_is_well(size)
    assert hvd.remove_process_set(some)


def gradient(call: Callable[[Any], Any], of: Any, upstream: Any) -> list[Any]:
    """Of a collective: eagerly, and in a graph."""

    def found() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(of)
            result = call(of)
        return tape.gradient(result, of, output_gradients=upstream)

    return [found(), tf.function(found)()]


@case("gradients-of-reductions")
def _(rank: int, size: int) -> None:
    """As Horovod has them."""
    for op, wanted in ((hvd.Sum, float(size)), (hvd.Average, 1.0)):
        for found in gradient(partial(hvd.allreduce, op=op), tf.ones([4]), tf.ones([4])):
            same(found, [wanted] * 4)
        for found in gradient(partial(hvd.reducescatter, op=op), tf.ones([2 * size, 2]), tf.ones([2, 2])):
            same(found, np.full((2 * size, 2), wanted))

    def second(one: Any) -> Any:
        return hvd.grouped_allreduce([one, one], op=hvd.Sum)[1]

    for found in gradient(second, tf.ones([2]), tf.ones([2])):
        same(found, [float(size)] * 2)


@case("gradients-of-gathering")
def _(rank: int, size: int) -> None:
    """As Horovod has them."""
    weights = tf.concat([tf.fill([one + 1, 2], float(one)) for one in range(size)], 0)
    for found in gradient(hvd.allgather, tf.ones([rank + 1, 2]), weights):
        same(found, np.full((rank + 1, 2), float(rank)))
    for found in gradient(partial(hvd.broadcast, root_rank=1), tf.ones([3]), tf.ones([3])):
        same(found, [1.0 if rank == 1 else 0.0] * 3)
    for found in gradient(hvd.alltoall, tf.ones([2 * size]), tf.fill([2 * size], float(rank))):
        same(found, [float(one) for one in range(size) for _ in range(2)])


@case("tape")
def _(rank: int, size: int) -> None:
    one, other, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(1.0)

    def mean(factor: float, **options: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_sum(one) * factor + other * factor
        return tape.gradient(loss, {"one": one, "rest": [other, unused]})

    wanted = sum(range(1, size + 1)) / size
    for call in (mean, tf.function(mean)):
        for options in ({}, {"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}):
            found = call(float(rank + 1), **options)
            assert np.allclose(found["one"].numpy(), [wanted] * 2) and np.isclose(found["rest"][0].numpy(), wanted)
            assert found["rest"][1] is None
        found = call(float(rank + 1), op=hvd.Sum)
        assert np.allclose(found["one"].numpy(), [wanted * size] * 2)
    raises(ValueError, lambda: mean(1.0, op=hvd.Sum, gradient_predivide_factor=2.0), "Average")


@case("broadcast-variables")
def _(rank: int, size: int) -> None:
    mine = [tf.Variable([float(rank)] * 3), tf.Variable(rank), keras.Variable([rank], dtype="uint32")]
    hvd.broadcast_variables(mine, 1)
    assert [np.asarray(one).tolist() for one in mine] == [[1.0] * 3, 1, [1]]
    in_graph = tf.Variable([float(rank)])
    tf.function(lambda: hvd.broadcast_variables([in_graph], root_rank=0))()
    same(in_graph, [0.0])
    raises(ConfigError, lambda: hvd_keras.broadcast_global_variables(0), "TensorFlow 2")
    large = [tf.Variable(tf.fill([90_000], float(rank + number))) for number in range(3)]

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def first_step() -> Any:
        hvd.broadcast_variables(large, root_rank=1)
        return hvd.grouped_allreduce([one * 0.0 - 5.0 for one in large])

    for _ in range(3):
        first_step()
        for number, one in enumerate(large):
            same(one, np.full(90_000, 1.0 + number))
            one.assign(tf.fill([90_000], float(rank + number)))


@case("objects")
def _(rank: int, size: int) -> None:
    assert hvd.allgather_object({"rank": rank}, name="all") == [{"rank": one} for one in range(size)]
    assert hvd.broadcast_object([1, "a"] if rank == 0 else None, root_rank=0, name="one") == [1, "a"]
    assert hvd.broadcast_object_fn(root_rank=1)(rank) == 1
    if rank == 0:
        raises(ConfigError, lambda: hvd.broadcast_object(object(), 0), "cannot be sent")
    else:
        raises(HorovodInternalError, lambda: hvd.broadcast_object(None, 0), "rank 0")


# ---- Keras


def small_model(seed: int, optimizer: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Input([3]), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(loss="mse", optimizer=optimizer, **options)
    return model


def data(rank: int, rows: int = 16) -> tuple[Any, Any]:
    random = np.random.default_rng(rank)
    return random.random((rows, 3), np.float32), random.random((rows, 1), np.float32)


def weights_of(model: Any) -> Any:
    return np.concatenate([one.ravel() for one in model.get_weights()])


@case("keras-fit-is-training-on-all-batches")
def _(rank: int, size: int) -> None:
    """With the mean of gradients, ranks with a batch each make the steps of one that has all of them."""
    for kind in (keras.optimizers.SGD, keras.optimizers.Adam):
        model = small_model(0, hvd_keras.DistributedOptimizer(kind(0.05)))
        assert model.jit_compile is False and type(model.optimizer).__name__ == kind.__name__
        model.fit(*data(rank), batch_size=16, epochs=3, verbose=0, shuffle=False)
        if rank == 0:
            alone = small_model(0, kind(0.05), jit_compile=False)
            everything = [np.concatenate(parts) for parts in zip(*(data(one) for one in range(size)), strict=True)]
            alone.fit(*everything, batch_size=16 * size, epochs=3, verbose=0, shuffle=False)
            assert np.allclose(weights_of(model), weights_of(alone), atol=1e-4)
        everybodys = hvd.allgather(tf.constant(weights_of(model))[None]).numpy()
        assert all(np.array_equal(one, everybodys[0]) for one in everybodys)


@case("keras-optimizer-options")
def _(rank: int, size: int) -> None:
    given = [tf.constant([float(rank + 1)])]
    mean = sum(range(1, size + 1)) / size
    for options, wanted in (
        ({}, mean),
        ({"op": hvd.Sum}, mean * size),
        ({"compression": hvd.Compression.fp16, "name": "mine", "device_dense": ""}, mean),
        ({"gradient_predivide_factor": 2.0, "groups": 2}, mean),
    ):
        for make in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer, hvd_tf_keras.DistributedOptimizer):
            variable = keras.Variable([0.0])
            optimizer = make(keras.optimizers.SGD(1.0), **options)
            optimizer.apply_gradients([(given[0], variable)])
            optimizer.apply(given, [variable])
            assert np.allclose(variable.numpy(), [-2 * wanted]), (options, variable.numpy())
    raises(ValueError, lambda: hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Max), "hvd.Adasum")
    raises(ValueError, lambda: hvd_keras.DistributedOptimizer("sgd"), "optimizer of Keras")
    twice = hvd_keras.DistributedOptimizer(keras.optimizers.SGD())
    raises(ValueError, lambda: hvd_keras.DistributedOptimizer(twice), "already")
    clipped, variable = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=0.5)), keras.Variable([0.0])
    clipped.apply([tf.constant([1.0 if rank == 0 else 0.0])], [variable])
    assert np.allclose(variable.numpy(), [-min(0.5, 1.0 / size)]), "the mean is clipped, not what it is of"


@case("keras-loss-scaling")
def _(rank: int, size: int) -> None:
    """A step that one rank must leave out is left out by all."""
    variable = keras.Variable([0.0])
    optimizer = keras.optimizers.LossScaleOptimizer(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    optimizer.build([variable])
    scale = float(optimizer.scale_loss(tf.constant(1.0)))
    optimizer.apply([tf.constant([float("inf") if rank == 0 else scale])])
    assert float(variable.numpy()[0]) == 0.0
    scale = float(optimizer.scale_loss(tf.constant(1.0)))
    optimizer.apply([tf.constant([scale * (rank + 1)])])
    assert np.isclose(variable.numpy()[0], -(size + 1) / 2), variable.numpy()
    raises(ValueError, lambda: hvd_keras.DistributedOptimizer(optimizer), "inner optimizer")


@case("keras-backward-passes-per-step")
def _(rank: int, size: int) -> None:
    for average, times in ((True, 1.0), (False, 2.0)):
        variable = keras.Variable([0.0])
        optimizer = hvd_tf_keras.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        seen = []
        for number in range(4):
            optimizer.apply([tf.constant([float(rank + number)])], [variable])
            seen.append(float(variable.numpy()[0]))
        mean = (size - 1) / 2
        assert np.allclose(seen, [0.0, -times * (mean + 0.5), -times * (mean + 0.5), -times * (2 * mean + 3.0)]), seen


@case("keras-callbacks")
def _(rank: int, size: int) -> None:
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    model = small_model(rank, hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), metrics=["mae"])
    callbacks = hvd_keras.callbacks
    first, means = callbacks.BroadcastGlobalVariablesCallback(0), callbacks.MetricAverageCallback()
    warmup = callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2, verbose=1)
    later = callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5, start_epoch=2)
    history = model.fit(
        *data(rank),
        batch_size=4,
        epochs=4,
        verbose=0,
        callbacks=[first, warmup, later, Rates(), means],
    )
    assert rates[:8] == sorted(rates[:8]) and np.isclose(rates[7], 0.1), rates
    assert np.isclose(rates[0], 0.1 / size * (1 + (size - 1) / 8)), rates
    assert np.allclose(rates[8:], [0.1] * 4 + [0.05] * 4), rates
    assert len({str(one) for one in hvd.allgather_object(history.history)}) == 1, "metrics are means over ranks"
    states = hvd.allgather_object([weights_of(model), [np.asarray(one) for one in model.optimizer.variables]])
    for weights, variables in states:
        assert np.array_equal(weights, states[0][0])
        assert all(np.array_equal(one, other) for one, other in zip(variables, states[0][1], strict=True))


@case("keras-momentum-correction")
def _(rank: int, size: int) -> None:
    """What has been gathered as momentum is scaled with the rate: it is a variable, also of a compiled step."""
    for correct, wanted in ((True, 1.0), (False, 2.0)):
        model = small_model(0, keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
        for one in model.optimizer.momentums:
            one.assign(np.full(one.shape, 2.0))
        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.5, momentum_correction=correct)
        schedule.set_model(model)
        schedule.on_epoch_begin(1)
        schedule.on_train_batch_begin(0)
        assert np.isclose(model.optimizer.learning_rate.numpy(), 0.05)
        assert all(np.allclose(np.asarray(one), wanted) for one in model.optimizer.momentums)


@case("keras-save-and-load")
def _(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        best = hvd_tf_keras.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(Path(folder) / "best.keras"))
        model = small_model(0, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.05)))
        model.fit(*data(rank), batch_size=8, verbose=0, callbacks=[best])
        assert (Path(folder) / "best.keras").exists()
        model.save(path)
        plain, ours = keras.models.load_model(path), hvd_tf_keras.load_model(path)
        assert type(plain.optimizer) is keras.optimizers.Adam, "what is saved loads without Holdfast"
        for loaded in (plain, ours):
            kept = zip(loaded.optimizer.variables, model.optimizer.variables, strict=True)
            assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in kept)
        ours.fit(*data(rank), batch_size=8, verbose=0, shuffle=False)
        everybodys = hvd.allgather(tf.constant(weights_of(ours))[None]).numpy()
        assert all(np.array_equal(one, everybodys[0]) for one in everybodys), "it goes on with all ranks' gradients"


@case("keras-values")
def _(rank: int, size: int) -> None:
    assert hvd_keras.allreduce(float(rank)) == (size - 1) / 2
    assert hvd_keras.allreduce([1.0], average=False).tolist() == [float(size)]
    assert hvd_tf_keras.allgather([rank]).tolist() == list(range(size))
    assert hvd_keras.broadcast(rank, 1) == 1
    assert hvd_keras.reducescatter([1.0] * size, op=hvd.Sum).tolist() == [float(size)]


@case("elastic-states")
def _(rank: int, size: int) -> None:
    variables = [tf.Variable([float(rank)] * 2), tf.Variable(rank)]
    state = hvd.elastic.TensorFlowState(variables, batch=rank)
    for _ in range(2):  # the second time all have it already
        state.sync()
        assert state.batch == 0 and [one.numpy().tolist() for one in variables] == [[0.0, 0.0], 0]
    variables[0].assign([9.0, 9.0])
    state.batch = 5
    state.restore()
    assert state.batch == 0 and variables[0].numpy().tolist() == [0.0, 0.0]
    variables[1].assign(7)
    state.commit()
    variables[1].assign(8)
    state.restore()
    assert int(variables[1]) == 7


@case("elastic-keras-state")
def _(rank: int, size: int) -> None:
    model = small_model(rank, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    state = hvd_keras.elastic.KerasState(model, batch=rank, epoch=0)
    assert model.optimizer.built, "no step is needed before"
    state.sync()
    shorter = [
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    model.fit(*data(rank), batch_size=4, epochs=2, verbose=0, callbacks=shorter)
    assert (state.batch, state.epoch) == (0, 2)
    kept = weights_of(model)
    model.fit(*data(rank), batch_size=4, epochs=1, verbose=0)
    assert not np.array_equal(kept, weights_of(model))
    state.restore()
    assert np.array_equal(kept, weights_of(model)) and int(model.optimizer.iterations.numpy()) == 8
    raises(ValueError, lambda: hvd_keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])), "build")


@case("keras-adasum")
def _(rank: int, size: int) -> None:
    if size & (size - 1):
        return
    for compiled in (False, True):
        variable = keras.Variable([1.0, 2.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), op=hvd.Adasum)
        optimizer.build([variable])
        step = tf.function(optimizer.apply) if compiled else optimizer.apply
        step([tf.constant([2.0, 0.0] if rank == 0 else [0.0, 4.0])])  # they do different things: both count
        assert np.allclose(variable.numpy(), [0.0, 0.0]), variable.numpy()
        step([tf.constant([2.0, 2.0])])  # all do the same, which counts once
        assert np.allclose(variable.numpy(), [-1.0, -1.0]), variable.numpy()


@case("local-layers-of-a-tape")
def _(rank: int, size: int) -> None:
    alone, together = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    inputs, mean = tf.constant([[float(rank + 1)]]), (size + 1) / 2
    model = keras.Sequential([keras.Input([1]), alone, together])
    for layer in (alone, together):
        layer.kernel.assign([[1.0]])
    for scale, wanted in ((True, (rank + 1) / size), (False, rank + 1.0)):
        for compiled in (False, True):

            def gradients(scale: bool = scale) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(inputs))
                found = hvd.PartialDistributedGradientTape(tape, local_layers=alone, scale_local_gradients=scale)
                return found.gradient(loss, model.trainable_variables)

            mine, all_ranks = (tf.function(gradients) if compiled else gradients)()
            assert np.isclose(float(mine[0, 0]), wanted) and np.isclose(float(all_ranks[0, 0]), mean), (mine, all_ranks)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(inputs))
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(alone.kernel)
    local, others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert [one for one, _ in local] == [alone.kernel] and [one for one, _ in others] == [together.kernel]
    raises(ValueError, lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["x"]), "layers")


@case("local-layers-of-an-optimizer")
def _(rank: int, size: int) -> None:
    for make in (hvd.PartialDistributedOptimizer, hvd_keras.PartialDistributedOptimizer):
        alone, together = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input([1]), alone, together])
        for layer in (alone, together):
            layer.kernel.assign([[1.0]])
        optimizer = make(keras.optimizers.SGD(1.0), local_layers=[alone], scale_local_gradients=False)
        model.compile(loss=lambda truth, found: tf.reduce_sum(found), optimizer=optimizer)
        model.fit(np.full((1, 1), rank + 1.0, np.float32), np.zeros((1, 1), np.float32), verbose=0)
        assert np.isclose(float(alone.kernel.numpy()[0, 0]), 1.0 - (rank + 1)), alone.kernel.numpy()
        assert np.isclose(float(together.kernel.numpy()[0, 0]), 1.0 - (size + 1) / 2), together.kernel.numpy()


@case("sync-batch-normalization")
def _(rank: int, size: int) -> None:
    """As one rank with all samples would have it: ranks have different numbers of them."""
    everything = np.random.default_rng(0).normal(3.0, 2.0, (2 * size + 1, 4)).astype(np.float32)
    own = slice(2 * rank, 2 * rank + 2 + (rank == size - 1))
    results = []
    for inputs, layer in (
        (everything, keras.layers.BatchNormalization()),
        (everything[own], hvd.SyncBatchNormalization()),
    ):
        layer.build((None, 4))
        with tf.GradientTape() as tape:
            given = tf.constant(inputs)
            tape.watch(given)
            output = layer(given, training=True)
            loss = tf.reduce_sum(output**3)
        results.append((output.numpy(), tape.gradient(loss, given).numpy(), layer.moving_mean.numpy()))
        moving = layer.moving_variance.numpy()
        assert np.allclose(moving, 0.99 + 0.01 * everything.var(0), rtol=1e-4), moving
    (wanted, slopes, mean), (found, found_slopes, found_mean) = results
    assert np.allclose(found, wanted[own], atol=1e-4) and np.allclose(found_mean, mean, atol=1e-5)
    assert np.allclose(found_slopes, slopes[own], atol=2e-3), (found_slopes, slopes[own])
    raises(ValueError, lambda: hvd.SyncBatchNormalization(fused=True), "fused")


@case("sessions")
def _(rank: int, size: int) -> None:
    v1 = tf.compat.v1
    raises(ConfigError, lambda: hvd.broadcast_global_variables(0), "no global variables")
    with tf.Graph().as_default():
        weight = v1.get_variable("weight", initializer=tf.constant([float(rank)]), use_resource=True)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        loss = tf.reduce_sum(weight * float(rank + 1))
        train = optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
        with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(size - 1)]) as session:
            for _ in range(2):
                session.run(train)
            found = session.run(weight)
    assert np.allclose(found, [(size - 1) - 2 * (size + 1) / 2]), found
