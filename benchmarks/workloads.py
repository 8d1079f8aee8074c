"""The work that every system under test does: the same models, data, optimizer and batch.

A workload is a plain ReLU classifier over synthetic data, SGD with momentum, and a batch that is divided among
the workers. Nothing here knows which system trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model size. `batch` is the whole step's, so that more workers means smaller shards, not more work."""

    name: str
    widths: tuple[int, ...]  # input, hidden layers, classes
    batch: int
    samples: int
    warmup: int  # steps that are not measured
    steps: int  # steps that are

    @property
    def parameters(self) -> int:
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.widths))

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.parameters

    def model(self) -> nn.Sequential:
        torch.manual_seed(SEED)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def dataset(self) -> TensorDataset:
        """Classes that a random linear map decides: learnable, and the same in every process."""
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(self.samples, self.widths[0], generator=generator)
        rule = torch.randn(self.widths[0], self.widths[-1], generator=generator)
        labels: Tensor = (x @ rule).argmax(dim=1)
        return TensorDataset(x, labels)

    @staticmethod
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Each layer by itself, as people do with blocks, and the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Batches:
    """One rank's share of each step's batch: what DataLoader and DistributedSampler do, without their overhead."""

    def __init__(self, workload: Workload, *, rank: int, workers: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        order = torch.randperm(workload.samples, generator=generator).tolist()
        share = workload.batch // workers
        starts = range(rank * share, workload.samples, workload.batch)
        self._dataset = workload.dataset()
        self._indices = [order[start : start + share] for start in starts]

    def fetch(self, step: int) -> list[Tensor]:
        return default_collate([self._dataset[i] for i in self._indices[step % len(self._indices)]])


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="10k", widths=(64, 96, 32, 10), batch=64, samples=8192, warmup=50, steps=400),
        Workload(name="1m", widths=(256, 768, 768, 256, 10), batch=128, samples=8192, warmup=10, steps=100),
        Workload(name="25m", widths=(1024, *(2048,) * 6, 1000), batch=128, samples=2048, warmup=3, steps=8),
    )
}
