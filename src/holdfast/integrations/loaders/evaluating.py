"""The batches of an evaluation's DataLoader by their numbers, so that workers can share them out. Owns nothing."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler


class Batches:
    """Batch n is what the loader gives as its nth, with its number."""

    def __init__(self, loader: DataLoader[Any], *, batches_max: int | None = None) -> None:
        sampler: Any = loader.batch_sampler
        self._dataset: Any = loader.dataset
        self._collate = loader.collate_fn
        self._size = int(sampler.batch_size)
        self._count = len(sampler) if batches_max is None else min(len(sampler), batches_max)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, Any]:
        first = number * self._size
        return number, self._collate([self._dataset[place] for place in range(first, self.end_of(number))])

    def end_of(self, number: int) -> int:
        return min((number + 1) * self._size, len(self._dataset))

    def size_of(self, number: int) -> int:
        return self.end_of(number) - number * self._size


def can_be_shared_out(loader: Any) -> bool:
    """Whether anybody can fetch any batch of it: in the dataset's own order, by numbers."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler: Any = loader.batch_sampler
    return type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler


def only(batches: list[Any]) -> Any:
    """As collate function: each batch is by itself already."""
    return batches[0]
