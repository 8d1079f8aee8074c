"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch

from holdfast.horovod.basics import Sum, is_initialized, size
from holdfast.horovod.torch.reductions import allreduce


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """As torch.nn.BatchNorm, with the mean and the variance of all ranks' samples together, in training."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"a batch has at least 2 dimensions, and this has {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training or not is_initialized() or size() == 1:
            result: torch.Tensor = super().forward(input)
            return result
        axes = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = torch.full((1,), input.numel() / input.shape[1], dtype=input.dtype)
        total = allreduce(torch.cat([input.sum(axes), count]), op=Sum)
        samples = total[-1].detach()
        mean = total[:-1] / samples
        centred = input - mean.view(shape)
        variance = allreduce((centred * centred).sum(axes), op=Sum) / samples
        self._follow(mean.detach(), variance.detach(), float(samples))
        normal = centred / torch.sqrt(variance + self.eps).view(shape)
        if self.affine:
            return normal * self.weight.view(shape) + self.bias.view(shape)
        return normal

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, samples: float) -> None:
        """The running statistics, with the unbiased variance."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - share).add_(mean, alpha=share)
        self.running_var.mul_(1 - share).add_(variance * (samples / max(1.0, samples - 1)), alpha=share)
