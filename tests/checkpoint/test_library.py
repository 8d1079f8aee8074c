"""`holdfast.checkpoint.save` and `load`: what goes in comes out, bit for bit, or an older one with a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint import Keep, load, save
from holdfast.checkpoint.restoring.reading import list_checkpoints
from holdfast.checkpoint.storage import local
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError, IntegrityError
from holdfast.state.layout import DTYPES, spec_of

from .conftest import every_kind, snapshot_of


def same(one: Any, other: Any) -> bool:
    return snapshot_of(one, 0).digest() == snapshot_of(other, 0).digest()


@pytest.mark.parametrize("small", [False, True])
def test_everything_comes_back(tmp_path: Path, small: bool, request: pytest.FixtureRequest) -> None:
    if small:
        request.getfixturevalue("small_parts")
    state = every_kind()
    assert save(str(tmp_path), state) == 0
    loaded = load(str(tmp_path))
    assert same(loaded, state)
    assert loaded["nested"] == state["nested"] and list(loaded) == list(state)
    assert loaded["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert spec_of(loaded["transposed"]) == spec_of(state["transposed"])
    for name, tensor in loaded["dtypes"].items():
        assert tensor.dtype == DTYPES[name]


def zeroed(state: Any) -> Any:
    """The same shapes in the same layouts, without the bytes."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)  # keeps strides
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(zeroed(value) for value in state)
    return state


@pytest.mark.parametrize("block_bytes", [4096, 8 << 20])
@pytest.mark.parametrize("small", [False, True])
def test_a_state_is_read_to_where_its_tensors_are(
    tmp_path: Path, small: bool, block_bytes: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        request.getfixturevalue("small_parts")
    monkeypatch.setattr(local, "BLOCK_BYTES", block_bytes)
    state = {
        "w": torch.randn(64, 129),
        "empty": [torch.empty(0), torch.empty(3, 0)],
        "bias": torch.randn(7, dtype=torch.float64).bfloat16(),
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "steps": [torch.tensor(3), 17],
    }
    save(str(tmp_path), state)
    into = zeroed(state)
    loaded = load(str(tmp_path), into=into)
    assert same(loaded, state) and same(into, state)
    assert loaded["last"].data_ptr() == into["last"].data_ptr()


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"w": torch.zeros(4, 5)}, "nothing for bias|float32 .4. for bias, and `into` has nothing"),
        ({"w": torch.zeros(4, 6), "bias": torch.zeros(4)}, r"float32 \[4, 5\] for w, and `into` has float32 \[4, 6\]"),
        ({"w": torch.zeros(4, 5).double(), "bias": torch.zeros(4)}, "`into` has float64"),
        ({"w": torch.zeros(4, 10)[:, ::2], "bias": torch.zeros(4)}, "nothing can be read into w"),
    ],
    ids=["less", "shape", "dtype", "strided"],
)
def test_what_cannot_be_read_to_is_named(tmp_path: Path, into: Any, words: str) -> None:
    save(str(tmp_path), {"w": torch.ones(4, 5), "bias": torch.ones(4)})
    with pytest.raises(ConfigError, match=words):
        load(str(tmp_path), into=into)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.builds(
        lambda dtype, shape, value: torch.full(shape, value).to(dtype),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(-100, 100),
    ),
    st.builds(numpy.arange, st.integers(1, 4)),
    st.builds(numpy.float32, st.floats(width=32)),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(-5, 5)), inner, max_size=3),
    ),
)


@given(states)
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    uri = str(tmp_path_factory.mktemp("any"))
    save(uri, state)
    loaded = load(uri)
    assert type(loaded) is type(state) and same(loaded, state)


def test_an_empty_array_comes_back(tmp_path: Path) -> None:
    save(str(tmp_path), {"array": numpy.arange(0), "matrix": numpy.zeros((0, 3), dtype="float32")})
    loaded = load(str(tmp_path))
    assert loaded["array"].shape == (0,) and loaded["array"].dtype == numpy.int64
    assert loaded["matrix"].shape == (0, 3) and loaded["matrix"].dtype == numpy.float32


def test_a_model_and_its_optimizer_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    def trained(steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().sum().backward()
            optimizer.step()
        return model

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    trained(3, model, optimizer)
    save(str(tmp_path), {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=3)
    other, its_optimizer = made()
    state = load(str(tmp_path))
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    assert same(trained(3, other, its_optimizer).state_dict(), trained(3, model, optimizer).state_dict())


def test_steps(tmp_path: Path) -> None:
    uri = str(tmp_path)
    assert save(uri, {"x": 1}) == 0
    assert save(uri, {"x": 2}) == 1
    assert save(uri, {"x": 3}, step=40) == 40
    assert save(uri, {"x": 4}, step=20) == 20
    assert load(uri) == {"x": 3} and load(uri, step=20) == {"x": 4}
    with pytest.raises(ConfigError, match="already has a checkpoint of step 20"):
        save(uri, {"x": 4}, step=20)
    with pytest.raises(ConfigError, match="no checkpoint of step 21"):
        load(uri, step=21)
    with pytest.raises(ConfigError):
        save(uri, {"x": 4}, step=-1)
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        load(str(tmp_path / "none"))


def test_keeping(tmp_path: Path) -> None:
    uri = str(tmp_path)
    for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
        save(uri, {"step": step}, metrics={"loss": loss}, keep=Keep(last=1, best="loss:min"))
    assert [entry.step for entry in list_checkpoints(LocalStorage(uri))] == [3, 1]
    save(uri, {}, keep=1)
    assert [entry.step for entry in list_checkpoints(LocalStorage(uri))] == [4]
    with pytest.raises(ConfigError):
        save(uri, {}, keep=0)


def test_an_older_one_is_loaded_with_a_warning(tmp_path: Path) -> None:
    uri = str(tmp_path)
    save(uri, {"old": torch.ones(3)})
    save(uri, {"new": torch.ones(3)})
    (part,) = (tmp_path / "checkpoint-000000000001").glob("part-*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="step 1 cannot be used.*the bytes of new are not those") as said:
        assert same(load(uri), {"old": torch.ones(3)})
    assert said[0].filename == __file__
    with pytest.raises(IntegrityError, match="the bytes of new"), warnings.catch_warnings():
        load(uri, step=1)


def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\['x'\]\[1\] is a object"):
        save(str(tmp_path), {"x": [1, object()]})
    assert list(tmp_path.iterdir()) == []


def test_it_is_loaded_when_it_is_used() -> None:
    assert set(holdfast.checkpoint.__all__) == {"Keep", "load", "save"}
    for name in holdfast.checkpoint.__all__:
        assert getattr(holdfast.checkpoint, name) is not None
    code = "import holdfast, sys; holdfast.checkpoint; assert 'torch' not in sys.modules; holdfast.checkpoint.save"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError):
        holdfast.checkpoint.nothing  # noqa: B018


def test_the_format_is_as_its_page_says(tmp_path: Path) -> None:
    """The page's own way of reading a checkpoint, and what it says of each name."""
    page = (Path(__file__).parents[2] / "docs/reference/checkpoint-format.md").read_text()
    save(str(tmp_path / "checkpoints"), {"a": torch.ones(3), "b": [torch.zeros(2)]}, step=120)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code.replace('Path("', f'Path("{tmp_path}/'), found)
    assert same(found["tensors"], {"a": torch.ones(3), "b/0": torch.zeros(2)})
    data = (tmp_path / "checkpoints" / "checkpoint-000000000120" / "manifest.json").read_bytes()
    about = json.loads(data)
    assert re.findall(r"^\| `(\w+)` \|", page.partition("## The manifest")[2], re.MULTILINE) == list(about)
    assert xxhash.xxh3_128_hexdigest(b"{" + data.partition(b",")[2]) == about["digest"]
    for name, size in about["parts"]:
        part = (tmp_path / "checkpoints" / "checkpoint-000000000120" / name).read_bytes()
        header = part[: 8 + int.from_bytes(part[:8], "little")]
        assert len(part) == size and name == f"part-0000-{xxhash.xxh3_128_hexdigest(header)}.safetensors"
        entry = json.loads(header[8:])["b/0"]["data_offsets"]
        digest = json.loads(header[8:])["__metadata__"]["digest:b/0"]
        assert digest == xxhash.xxh3_128_hexdigest(part[len(header) + entry[0] : len(header) + entry[1]])


def test_the_how_to_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/use-checkpoints-alone.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code.replace("s3://bucket/mine", str(tmp_path)), {})
    assert [entry.step for entry in list_checkpoints(LocalStorage(tmp_path))] == [0]
    for action in ("ls", "show", "verify", "export", "import", "prune"):
        assert main(["checkpoint", action, "--help"]) == 0
        options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help", "--dir"}
        (line,) = re.findall(rf"^holdfast checkpoint {action} .*$", page, re.MULTILINE)
        assert set(re.findall(r"--[a-z-]+", line)) == options
