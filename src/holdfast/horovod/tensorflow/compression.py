"""How gradients are made smaller on their way: not at all, or as 16-bit floats."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

Tensor = Any


class Compressor:
    """`compress` gives a tensor to send and what `decompress` must know."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class NoneCompressor(Compressor):
    """What it is."""


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16, and become what they were."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        if tensor.dtype.is_floating and tensor.dtype != tf.float16:
            return tf.cast(tensor, tf.float16), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    none = NoneCompressor
    fp16 = FP16Compressor
