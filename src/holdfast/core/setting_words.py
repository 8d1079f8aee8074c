"""A run's settings in the words of the person who made them: arguments of `join`, options, or what they are. Pure."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.options.declaring import options_of
from holdfast.core.options.run import WorkerOptions

_PATHS = {
    "host": "gradients through one host's memory",
    "hosts": "gradients through hosts' memory and between hosts",
    "network": "gradients over the network alone (--path network)",
    "process-group": "gradients by a process group of torch (--path process-group)",
}
_WORDS: dict[str, Callable[[object], str]] = {
    "length": lambda value: f"a dataset of {value} samples",
    "order_seed": lambda value: "no generator" if value is None else f"a generator with the seed {value}",
    "order": lambda value: f"a sampler whose first order has the digest {value!s:.8}" if value else "no sampler",
    "batches": lambda value: "a batch sampler" if value else "batches of one size",
    "parameters": lambda value: f"a model with {value} trained numbers",
    "path": lambda value: _PATHS.get(str(value), f"the path {value}"),
    "checkpoint": lambda value: f"checkpoints in {value}" if value else "no checkpoints",
    "mode": lambda value: f"mode={value}",
}
LABELS = {
    "length": "samples in the dataset",
    "order_seed": "seed of the generator",
    "order": "digest of the sampler's first order",
    "batches": "batches come from a batch sampler",
    "parameters": "trained numbers in the model",
    "path": "way of the gradients",
    "outage_s": "seconds without the ledger at most",
}


def setting_words(name: str, value: object) -> str:
    """`batch_size=64` for an argument of join, `--audit 0.5` for an option, `a dataset of 8 samples` for neither."""
    words = _WORDS.get(name)
    option = next((one for one in options_of(WorkerOptions) if one.setting == name), None)
    if words is None and option is not None and isinstance(value, int | float | str):
        return f"{option.flag} {option.kind.spell(value)}"
    return words(value) if words is not None else f"{name}={value!r}"
