"""Arithmetic that gives the same bits on every worker: settings that belong to the run, and a fingerprint to compare.

Results depend on the number of compute threads, on the CPU's capabilities and on torch's version. Threads are set.
The rest cannot be, so a worker computes a few small things that are known to differ and compares digests. Of a device
that is not enough: which kernel it takes depends on sizes too. So what decides that is compared as well: its type and
capability, the versions of its libraries, and the settings that allow it to round more than the script says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch

from holdfast.core.errors import NumericsError
from holdfast.devices.copies import here
from holdfast.devices.visible import WORKSPACE
from holdfast.placement.late_dynamo import be_deterministic

SETTINGS = (  # of torch.backends: what lets a device round more than float32 does, and choose its kernels by trying
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cudnn.benchmark",
    "cudnn.deterministic",
)


def fix_arithmetic(threads: int) -> None:
    """Make this process compute as the run does. Called before the fingerprint is taken."""
    torch.set_num_threads(threads)
    be_deterministic()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.set_flush_denormal(False)


def fingerprint(device: torch.device | None = None) -> str:
    """A digest of small results in which CPUs, capabilities and versions are known to differ; and of what decides bits
    on the device that the model is on."""
    generator = torch.Generator().manual_seed(20_240_229)
    state = torch.random.get_rng_state()
    results = [torch.randn(1024, generator=generator)]
    x = torch.randn(64, 96, generator=generator)
    w = torch.randn(96, 80, generator=generator)
    results.append(x @ w)
    results.append(torch.nn.functional.conv2d(x.view(1, 4, 32, 48), w[:72].reshape(-1)[:288].view(8, 4, 3, 3)))
    for function in (torch.exp, torch.tanh, torch.erf, torch.sigmoid, torch.sin, torch.nn.functional.gelu):
        results.append(function(x))
    results += [torch.softmax(x, 1), torch.nn.functional.layer_norm(x, (96,)), x.sum(), x.var(0), torch.rsqrt(x * x)]
    results.append((x.bfloat16() @ w.bfloat16()).float())
    torch.random.set_rng_state(state)
    hasher = hashlib.blake2b(digest_size=12)
    for result in results:
        hasher.update(result.contiguous().numpy().tobytes())
    if device is not None:
        hasher.update(json.dumps(decides_bits(device), sort_keys=True).encode())
        for result in here(_computed_on(device)):
            hasher.update(result.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def decides_bits(device: torch.device) -> dict[str, str]:
    """What is known to, as far as torch tells."""
    module = torch.get_device_module(device)
    asked: dict[str, Callable[[], object]] = {
        "type": lambda: device.type,
        "name": lambda: module.get_device_name(device),
        "capability": lambda: module.get_device_capability(device),
        "cuda": lambda: torch.version.cuda,
        "hip": lambda: torch.version.hip,
        "xpu": lambda: torch.version.xpu,
        "cudnn": lambda: torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "matmul": torch.get_float32_matmul_precision,
        **{setting: partial(_setting, setting) for setting in SETTINGS},
        "workspace": lambda: os.environ.get(WORKSPACE, ""),
    }
    return {name: _answer(question) for name, question in asked.items()}


def _setting(path: str) -> object:
    return attrgetter(path)(torch.backends)


def _answer(question: Callable[[], object]) -> str:
    try:
        return str(question())
    except (AttributeError, RuntimeError, NotImplementedError):  # this device or this torch does not have it
        return ""


def _computed_on(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(20_240_229)
    x, w = (torch.randn(*shape, generator=generator).to(device) for shape in ((64, 96), (96, 80)))
    found = [x @ w, (x.bfloat16() @ w.bfloat16()).float(), x.sum(), x.var(0), torch.softmax(x, 1)]
    found += [function(x) for function in (torch.exp, torch.tanh, torch.erf, torch.nn.functional.gelu)]
    return found


def check_fingerprint(mine: str, theirs: str, other: str) -> None:
    if mine != theirs:
        raise NumericsError(
            f"this machine's arithmetic does not give the same bits as {other}'s",
            hint="use the same CPU type, torch version and threads on all hosts, or `holdfast run --numerics warn`",
        )
