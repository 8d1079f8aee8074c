"""Arithmetic that gives the same bits on every worker: settings that belong to the run, and a fingerprint to compare.

Results depend on the number of compute threads, on the CPU's capabilities and on torch's version. Threads are set.
The rest cannot be, so a worker computes a few small things that are known to differ and compares digests.
"""

from __future__ import annotations

import hashlib

import torch

from holdfast.core.errors import NumericsError
from holdfast.placement.late_dynamo import be_deterministic


def fix_arithmetic(threads: int) -> None:
    """Make this process compute as the run does. Called before the fingerprint is taken."""
    torch.set_num_threads(threads)
    be_deterministic()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.set_flush_denormal(False)


def fingerprint() -> str:
    """A digest of small results in which CPUs, capabilities and versions are known to differ."""
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
    return hasher.hexdigest()


def check_fingerprint(mine: str, theirs: str, other: str) -> None:
    if mine != theirs:
        raise NumericsError(
            f"this machine's arithmetic does not give the same bits as {other}'s",
            hint="use the same CPU type, torch version and threads on all hosts, or `holdfast run --numerics warn`",
        )
