"""A sampler that deals what is left of an epoch to however many ranks there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from holdfast.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Every rank gets an equal part of the samples of this epoch that were not recorded as processed.

    Put it into the TorchState, call `record_batch` after each batch and `set_epoch` at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.rank = 0
        self.num_replicas = 1
        self.num_samples = 0
        self.total_size = 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """The next epoch, from its beginning."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This batch is processed, and the same one by every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = int(state_dict["epoch"])
        self.processed_num = int(state_dict["processed_num"])
        self.reset()

    def reset(self) -> None:
        """Deal anew to the ranks that there are now."""
        self.rank, self.num_replicas = rank(), size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        whole = [left[index % len(left)] for index in range(self.total_size)] if left else []
        return iter(whole[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
