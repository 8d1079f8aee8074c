"""One compute thread, as in a small worker: the bits do not depend on the machine's cores."""

from __future__ import annotations

import warnings

import torch

torch.set_num_threads(1)

with warnings.catch_warnings():
    # torch says once in a process that complex32 is experimental: not in the middle of a test, as an error.
    warnings.simplefilter("ignore")
    torch.empty(0, dtype=torch.complex32)
