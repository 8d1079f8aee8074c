"""Compiled and blocked kernels: the same bits on any processor setting, with any threads; and compiling itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.byzantine import parse
from holdfast.byzantine.kernels import native
from holdfast.byzantine.kernels.blocked import BlockedKernels
from holdfast.byzantine.kernels.choosing import kernels
from holdfast.byzantine.kernels.native import NativeKernels
from holdfast.byzantine.kernels.networks import sorting_network
from holdfast.byzantine.kernels.port import PAGE, Kind, Order
from holdfast.core.errors import ConfigError
from holdfast.native import compiling
from holdfast.native.choosing import VARIABLE

needs_compiler = pytest.mark.skipif(not native.available(torch.float32), reason="no C compiler")


@pytest.mark.parametrize("rows", [*range(1, 11), 13])
def test_a_network_sorts_whatever_it_is_given(rows: int) -> None:
    """By the zero-one principle all columns of zeros and ones suffice."""
    columns = torch.tensor([[number >> row & 1 for number in range(2**rows)] for row in range(rows)])
    values = list(columns)
    for low, high in sorting_network(rows):
        values[low], values[high] = torch.minimum(values[low], values[high]), torch.maximum(values[low], values[high])
    assert torch.equal(torch.stack(values), columns.sort(dim=0).values)


def test_a_pruned_network_is_shorter_and_still_right_where_it_is_asked() -> None:
    x = torch.randn(21, 500)
    pruned = sorting_network(21, frozenset({10}))
    assert len(pruned) < len(sorting_network(21))
    values = list(x)
    for low, high in pruned:
        values[low], values[high] = torch.minimum(values[low], values[high]), torch.maximum(values[low], values[high])
    assert torch.equal(values[10], x.median(dim=0).values)


@needs_compiler
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 12),
    d=st.sampled_from([1, 127, 128, 1000, PAGE, 2 * PAGE + 5]),
    offset=st.sampled_from([0, 1, 128, 5000]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    mixed=st.booleans(),
    weighted=st.booleans(),
)
def test_both_kernels_give_the_same_bits(
    seed: int, n: int, d: int, offset: int, dtype: torch.dtype, mixed: bool, weighted: bool
) -> None:
    generator, chance = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -30, 20, (n, 1), generator=generator
    )
    x[:, ::3] = x[:, ::3].round()  # equal numbers, zeros of both signs
    rows = list(x.to(dtype))
    mix = chance.random((max(1, n - 1), n)) if mixed else None
    m = n if mix is None else len(mix)
    weights = chance.integers(1, 4, m).astype(float) if weighted else None
    one, other = torch.empty(d, dtype=dtype), torch.empty(d, dtype=dtype)
    for kind in Kind:
        order = Order(kind, m, (m - 1) // 3, kept=m - (m - 1) // 3)
        seen = NativeKernels().order(rows, mix, weights, order, offset, one)
        also = BlockedKernels().order(rows, mix, weights, order, offset, other)
        assert one.numpy().tobytes() == other.numpy().tobytes()
        assert np.array_equal(seen.outside, also.outside) and seen.counted == also.counted
        assert not seen.bad.any() and not also.bad.any()
    for origin in (False, True):
        grams = [np.triu(kind.gram(rows, mix, origin)[0]) for kind in (NativeKernels(), BlockedKernels())]
        assert np.array_equal(*grams)
    factors = chance.random(n)
    NativeKernels().combine(rows, factors, one)
    BlockedKernels().combine(rows, factors, other)
    assert one.numpy().tobytes() == other.numpy().tobytes()


def test_gram_gives_distances_as_good_as_the_numbers() -> None:
    x = torch.randn(6, 3 * PAGE + 17, generator=torch.Generator().manual_seed(3))
    pages, _ = kernels(torch.float32).gram(list(x), None, False)
    gram = np.triu(pages.sum(axis=0))
    gram = gram + np.triu(gram, 1).T
    expected = torch.cdist(x.double(), x.double()).square().numpy()
    own = np.diagonal(gram)
    assert np.allclose(own[:, None] + own[None, :] - 2.0 * gram, expected, rtol=1e-7, atol=1e-3)


@pytest.mark.parametrize("exponent", [-1074, -1040, -1002, -1001, -1000, -997, -996, -990, -500])
def test_numbers_of_any_smallness_give_a_finite_gram_matrix_of_the_same_bits(exponent: int) -> None:
    """Powers of two that make them whole numbers run over below 2 ** -1001."""
    x = torch.zeros(5, 300, dtype=torch.float64)
    x[:3] = torch.tensor([1.0, -3.0, 2.0]).view(3, 1).double() * 2.0**exponent
    x[3, 5] = 1.0
    found = [kind().gram(list(x), None, True)[0] for kind in (BlockedKernels, kernels(torch.float64).__class__)]
    grams = [np.triu(one) for one in found]
    assert np.isfinite(grams[0]).all() and np.array_equal(*grams)
    assert grams[0][0, 3, 3] > 0.5


def test_a_tiny_update_is_not_what_krum_chooses_for_being_tiny() -> None:
    """NaN among its distances would be the smallest score to some, and any to others."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:6] = x[0] + 0.01 * x[:6]
    x[6, :128] = 100.0
    x[:, 128:] = 0.0
    x[6, 200] = 1e-305  # in a group of its own
    found = parse("krum").aggregate(x, 1)
    assert not found.trusted[6] and np.isfinite(found.scores).all()


@pytest.mark.parametrize("kind", [pytest.param(NativeKernels, marks=needs_compiler), BlockedKernels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_is_named_by_every_pass(kind: type[NativeKernels], dtype: torch.dtype) -> None:
    x = torch.randn(4, 300, dtype=dtype)
    x[1, 299], x[3, 0] = float("nan"), float("-inf")
    out = torch.empty(300, dtype=dtype)
    expected = [False, True, False, True]
    assert kind().order(list(x), None, None, Order(Kind.MEDIAN, 4, 1), 0, out).bad.tolist() == expected
    assert kind().gram(list(x), None, False)[1].tolist() == expected
    assert kind().combine(list(x), np.ones(4), out).tolist() == expected


@pytest.mark.parametrize("kind", [pytest.param(NativeKernels, marks=needs_compiler), BlockedKernels])
def test_columns_are_counted_once_however_they_are_cut_and_only_where_somebody_differs(
    kind: type[NativeKernels],
) -> None:
    x = torch.randn(5, 10_000, generator=torch.Generator().manual_seed(2))
    x[:, ::2] = 0.0
    order, out = Order(Kind.TRIMMED, 5, 1), torch.empty(10_000)

    def counted(start: int, stop: int) -> tuple[int, list[int]]:
        found = kind().order([row[start:stop] for row in x], None, None, order, 3 + start, out[start:stop])
        return found.counted, found.outside.tolist()

    whole, outside = counted(0, 10_000)
    parts = [counted(start, min(start + 77, 10_000)) for start in range(0, 10_000, 77)]
    assert whole == sum(count for count, _ in parts) and 500 < whole < 800
    assert outside == [sum(column) for column in zip(*(found for _, found in parts), strict=True)]
    assert sum(outside) == 2 * whole


DIGEST = """
import hashlib, sys, torch
from holdfast.byzantine import parse
base = torch.arange(11 * 40_000, dtype=torch.int64)
x = ((base * 2654435761 % 1000003).double() / 1000003.0 - 0.5).float().view(11, 40_000)
x[3] *= 7.0
x[5] = 2.5
words = ["mean", "median", "trimmed-mean", "meamed", "geometric-median", "krum", "multi-krum", "bulyan", "mda", "caf"]
words += ["centered-clipping", "nnm+trimmed-mean", "arc+nnm+krum", "bucketing:2+median", "clip:50+mean"]
words += ["distinct+centered-clipping"]
for threads in (1, 2):
    torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for word in words:
        weights = [1.0, 2.0, 3.0, 1.5, 1.0, 9.0, 1.0, 2.0, 1.0, 1.0, 1.0] if len(word) % 2 else None
        found = parse(word).aggregate(x, 2, weights)
        digest.update(found.value.numpy().tobytes() + repr((found.trusted, found.scores)).encode())
    print(digest.hexdigest())
"""


@pytest.mark.processes
@needs_compiler
def test_replicated_servers_agree_on_any_processor_setting_and_with_any_threads() -> None:
    found = {}
    for kernel, capability in (("native", "avx2"), ("torch", "default"), ("torch", "avx2")):
        surroundings = {**os.environ, VARIABLE: kernel, "ATEN_CPU_CAPABILITY": capability, "OMP_WAIT_POLICY": "PASSIVE"}
        surroundings |= {"NPY_DISABLE_CPU_FEATURES": "AVX2 AVX512F"} if capability == "default" else {}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIGEST],
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        found[kernel, capability] = done.stdout.split()
    assert len({digest for digests in found.values() for digest in digests}) == 1, found
    assert all(len(digests) == 2 for digests in found.values())


@needs_compiler
def test_other_instructions_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled for the oldest processor of this architecture, or hardly optimised at all."""
    x = torch.randn(11, 3 * PAGE + 50, generator=torch.Generator().manual_seed(1)) * 3.0
    words = ("median", "trimmed-mean", "bulyan", "geometric-median", "nnm+meamed", "caf")
    expected = [parse(word).aggregate(x, 2, [1.0, 2.0] * 5 + [3.0]) for word in words]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "native")
    native_flag = "-march=native"
    for flags in ((), ("-O0", native_flag)):
        kept = [flag for flag in compiling.FLAGS if flag != native_flag]
        monkeypatch.setattr(compiling, "FLAGS", (*kept, *flags))
        compiling.library.cache_clear()
        found = [parse(word).aggregate(x, 2, [1.0, 2.0] * 5 + [3.0]) for word in words]
        for one, other in zip(found, expected, strict=True):
            assert one.value.numpy().tobytes() == other.value.numpy().tobytes() and one.scores == other.scores
    compiling.library.cache_clear()


@needs_compiler
def test_two_that_compile_at_once_both_have_a_whole_library(tmp_path: Path) -> None:
    paths: list[Path] = []
    source = native.SOURCE, tmp_path, "REAL=float"
    threads = [threading.Thread(target=lambda: paths.append(compiling.compiled(*source))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 3 and len(set(paths)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [paths[0].name], "nothing unfinished is left behind"
    stamp = paths[0].stat().st_mtime_ns
    assert compiling.compiled(*source).stat().st_mtime_ns == stamp, "compiled once"


def test_without_a_compiler_or_a_cache_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(7, 500)
    expected = parse("nnm+trimmed-mean").aggregate(x, 2).value
    not_a_directory = tmp_path / "file"
    not_a_directory.write_text("")
    for name, setting in (("CC", "no-such-compiler"), ("CC", "false"), ("XDG_CACHE_HOME", str(not_a_directory))):
        with monkeypatch.context() as changed:
            changed.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            changed.setenv(name, setting)
            compiling.library.cache_clear()
            assert isinstance(kernels(torch.float32), BlockedKernels)
            assert torch.equal(parse("nnm+trimmed-mean").aggregate(x, 2).value, expected)
            changed.setenv(VARIABLE, "native")
            with pytest.raises(ConfigError, match="could not be compiled here"):
                kernels(torch.float32)
    compiling.library.cache_clear()


def test_the_choice_can_be_forced_and_a_wrong_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert isinstance(kernels(torch.float64), BlockedKernels)
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match="neither native nor torch"):
        kernels(torch.float32)
