"""The codec: exact there and back, a path for what cannot travel, and nothing but typed errors for hostile bytes."""

from __future__ import annotations

import ast
import json
import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast.state
from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.state.codec import TREE_BYTES_MAX, InOrder, flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.layout import DTYPES, TensorSpec, allocate, memory_of, readable, spec_of


def there_and_back(value: Any, **options: Any) -> Any:
    tree, tensors = flatten(value, **options)
    return unflatten(unpack_tree(pack_tree(tree)), tensors)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit and the last type."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and not isinstance(one, numpy.generic):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, (numpy.generic, numpy.ndarray)):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = dtype.itemsize
    for size in shape:
        count *= size
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    # Not integers(2**64, 2**5000): that bound is in the strategy's repr, and hypothesis warns of long ones.
    st.builds(lambda bits, low: (1 << bits) + low, st.integers(64, 5000), st.integers(0, 2**64)),
    st.floats(allow_nan=True),
    st.text(),
    st.sampled_from([numpy.float32(0.1), numpy.int64(-3), numpy.bool_(True), numpy.float64("nan")]),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")]),
    tensors(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(-(2**63), 2**63)), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(values)
@example([float("nan"), float("inf"), -float("inf"), -0.0, struct.unpack(">d", b"\xff\xf0\0\0\0\0\0\1")[0], 5e-324])
@example({1: "a", "1": "b", "T": 3, "d": []})
@example([b"", b"\xff\0"])
def test_every_value_comes_back_exactly(value: Any) -> None:
    assert same(value, there_and_back(value))


def test_kinds_of_dicts() -> None:
    ordered = there_and_back(OrderedDict(b=1, a=2))
    assert type(ordered) is OrderedDict and list(ordered.items()) == [("b", 1), ("a", 2)]
    for factory in (list, float, None):
        default = there_and_back(defaultdict(factory, {3: [1]}))
        assert type(default) is defaultdict and default.default_factory is factory and default == {3: [1]}
    assert there_and_back(torch.Size([2, 3])) == torch.Size([2, 3])
    # MultiStepLR keeps its milestones in one, and calls .elements() on it.
    assert same(there_and_back(Counter([30, 30, 80])), Counter([30, 30, 80]))
    assert list(there_and_back({"b": 1, 10: 2, "a": 3, 9: 4}, sort=True)) == [9, 10, "a", "b"]
    array = numpy.arange(6, dtype=numpy.uint32).reshape(2, 3)[:, ::-1]
    assert same(there_and_back({"a": array}), {"a": numpy.ascontiguousarray(array)})
    turned = numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))
    assert there_and_back(turned).flags.f_contiguous and same(there_and_back(turned), turned)


def test_what_is_in_order_stays_in_order() -> None:
    value = {"b": InOrder({"z": 1, "y": {"q": 2, "p": 3}}), "a": {"z": 1, "y": 2}}
    back = there_and_back(value, sort=True)
    assert list(back) == ["a", "b"] and list(back["a"]) == ["y", "z"]
    assert list(back["b"]) == ["z", "y"] and list(back["b"]["y"]) == ["q", "p"]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 1), (3, 2, 1, 1), (0, 3, 2, 2)])
def test_channels_last_tensors_are_read_in_place_and_keep_their_strides(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    assert readable(tensor, "").data_ptr() == tensor.data_ptr()
    (twin,) = allocate([spec_of(tensor)])
    memory_of(twin)[:] = memory_of(tensor)
    assert same(twin, tensor) and spec_of(twin) == spec_of(tensor)
    if 1 not in shape and 0 not in shape:
        assert twin.stride() == tensor.stride()


def test_tensors_are_references_unless_they_have_gaps() -> None:
    whole = torch.arange(12.0).view(3, 4)
    _, (kept, turned, copied) = flatten([whole, whole.T, whole[:, ::2]])
    assert kept.data_ptr() == turned.data_ptr() == whole.data_ptr()
    assert copied.is_contiguous() and same(copied, whole[:, ::2])
    parameter = torch.nn.Parameter(whole)
    assert type(there_and_back(parameter)) is torch.Tensor
    turned = torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    assert same(there_and_back(turned), turned.resolve_conj())


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": Thing()}]}, "state['a'][1]['b'] is a Thing"),
        ({"a": numpy.ma.masked_array([1.0, 2.0], mask=[0, 1])}, "state['a'] is a numpy MaskedArray"),
        ({"a": defaultdict(lambda: 3)}, "state['a'] is a defaultdict whose default is"),
        ({"a": {1, 2}}, "state['a'] is a set"),
        ({"f": lambda: 0}, "state['f'] is a function"),
        ({(1, 2): 3}, "state has the key (1, 2), a tuple"),
        ({"s": {1}}, "state['s'] is a set"),
        ([torch.eye(2).to_sparse()], "state[0] is a sparse_coo tensor"),
        ([torch.empty(2, device="meta")], "state[0] is a strided tensor of float32 on meta"),
        (numpy.array(["x"]), "state is a numpy <U1"),
        (bytearray(b"bytes"), "state is a bytearray"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flatten(value)
    assert caught.value.message.startswith(path)
    assert caught.value.hint


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested more than 64 deep"):
        flatten(loop)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["d", "c", "t", "f", "i", "n", "T", "a", "dtype", "device", "x"]), inner, max_size=2
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=300)
@given(json_values)
@example({"i": "9" * 5000})
@example({"n": ["object", "00"]})
@example({"T": True})
@example({"T": -1})
@example({"d": [[[], 1]]})
@example({"d": [["a", 1], ["a", 2]]})
@example({"device": "no:where"})
@example({"a": 1})
def test_hostile_trees_get_a_typed_error(tree: Any) -> None:
    try:
        unflatten(unpack_tree(json.dumps(tree).encode()), [torch.zeros(2), torch.zeros(1, dtype=torch.bfloat16)])
    except ProtocolError:
        pass


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"NaN")
@example(b'{"i":' + b"9" * 5000 + b"}")
@example(b"9" * 5000)
def test_hostile_bytes_get_a_typed_error(data: bytes) -> None:
    try:
        unflatten(unpack_tree(data), [])
    except ProtocolError:
        pass


def test_trees_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        unpack_tree(b" " * (TREE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="more than"):
        pack_tree("x" * TREE_BYTES_MAX)
    with pytest.raises(ProtocolError, match="deep"):
        unflatten(unpack_tree(b"[" * 100 + b"]" * 100), [])


@given(json_values | st.lists(json_values, min_size=2, max_size=3))
@example(["float32", [2**62, 2**62]])
@example(["float32", [-1]])
@example(["float32", [2, 2], [0, 0]])
@example(["quint8", [1]])
@example(["float32", [True]])
def test_hostile_tensor_descriptions_get_a_typed_error(value: Any) -> None:
    try:
        spec = TensorSpec.from_json(value)
    except ProtocolError:
        return
    assert spec.to_json()[:2] == value[:2]


def test_nothing_in_this_room_can_unpickle() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    folder = Path(holdfast.state.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [f"{getattr(node.value, 'id', '')}.{node.attr}"]
            elif isinstance(node, ast.Name):
                names = [node.id]
            for name in names:
                assert name.split(".")[0] not in forbidden, f"{path.name} uses {name}"
                assert name not in ("torch.load", "numpy.load", "torch.save", "eval", "exec"), f"{path.name}: {name}"
