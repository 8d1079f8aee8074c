"""One compute thread, as in a small worker: the bits do not depend on the machine's cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
