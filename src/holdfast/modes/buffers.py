"""A model's buffers in the exact mode: every shard starts from the step's first values, the step ends with the mean.

Owns the tensors that were the buffers when the run was joined; a forward that assigns another tensor to a buffer
(`self.mean = ...`) gets the first one back afterwards, with the new values. How buffers are added over shards:

    float16, bfloat16, float8     in float32, complex32 in complex64; the mean is rounded once
    integers                      exactly, as two halves of 32 bits each and a count of the shards; the mean is floored
    bool                          true if it is so in one shard
    the others                    as they are

On a device whether a shard has changed a buffer is not looked at, which would mean to wait: flags are kept there.

A non-persistent buffer that appears, or gets another shape, is a cache: it follows from its input, is left alone and
does not travel. A persistent one that does so is refused, since workers that compute no shard would not have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from holdfast.core.errors import ConfigError
from holdfast.data.alignment import Moved, align_tensor
from holdfast.state.naming import plain_name

_HALF: Final = 1 << 32
_NARROW: Final = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_TO_WIDE: Final = dict.fromkeys(_NARROW, torch.float32) | {torch.complex32: torch.complex64}
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """Collects and loads. Belongs to the thread that runs the user's loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._entries = _buffers_of(model)
        moved: Moved = {}
        for entry in self._entries:
            align_tensor(entry.tensor, moved)
        self._live = [entry.tensor for entry in self._entries]
        self._base = [_plain(tensor).clone() for tensor in self._live]
        self._waits = any(tensor.device.type != "cpu" for tensor in self._live)  # whoever looks at a value
        self.sums_like = [_sum_like(tensor) for tensor in self._base]
        self._dirty: set[int] = set()  # those that the last shard has changed
        self._known = [(module, prefix, set(module._buffers.keys())) for prefix, module in model.named_modules()]
        self._empty = [
            (module, key) for module in model.modules() for key, tensor in module._buffers.items() if tensor is None
        ]
        self._looked = 0

    def base(self) -> Mapping[str, torch.Tensor]:
        """As they were when the step began, by name."""
        return {entry.name: base for entry, base in zip(self._entries, self._base, strict=True)}

    def to_restore(self) -> Mapping[str, torch.Tensor]:
        """The live tensors that a state is written into."""
        self._put_back(keep_values=False)
        return {entry.name: entry.tensor for entry in self._entries}

    def rebase(self) -> None:
        """Whatever they are now is where the next step starts."""
        self.check_births()
        if self._live:
            with torch.no_grad():
                self._put_back(keep_values=True)
                _copy(self._base, self._live)
        self._dirty.clear()

    def start_again(self) -> None:
        """Before a shard: the step's first values."""
        if self._dirty:
            with torch.no_grad():
                self._put_back(keep_values=False)
                dirty = sorted(self._dirty)
                _copy([self._live[at] for at in dirty], [self._base[at] for at in dirty])
            self._dirty.clear()

    def collect(self) -> tuple[list[torch.Tensor], list[int] | torch.Tensor]:
        """After a shard: what is added for each, and the numbers of those that it has changed, or a flag for each."""
        if self._looked < 8:  # a buffer is born in a forward of the first step, if it is at all; else see `rebase`
            self._looked += 1
            self.check_births()
        if self._waits:
            return self._collect_there()
        tensors, changed = [], []
        for number, (entry, base) in enumerate(zip(self._entries, self._base, strict=True)):
            live = entry.now()
            if not _same_bits(live, base):
                changed.append(number)
                self._dirty.add(number)
            tensors.append(_to_sum(live))
        return tensors, changed

    def _collect_there(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        live = [entry.now() for entry in self._entries]
        flags = [_differ(one, base) for one, base in zip(live, self._base, strict=True)]
        self._dirty.update(range(len(live)))
        return [_to_sum(one) for one in live], torch.stack(flags)

    def load(self, sums: Sequence[torch.Tensor], present: Iterable[int]) -> None:
        """The means: of those that some shard has changed. The others are as they were when the step began."""
        brought = frozenset(present)
        self._put_back(keep_values=False)
        for number, (live, base) in enumerate(zip(self._live, self._base, strict=True)):
            if number in brought:
                live.copy_(_mean(sums[number], live))
            elif number in self._dirty:
                live.copy_(base)
        self._dirty.clear()

    def skip(self) -> None:
        """As if the step had brought nothing."""
        if self._live:
            with torch.no_grad():
                self._put_back(keep_values=False)
                _copy(self._live, self._base)
        self._dirty.clear()

    def first_non_finite(self, present: Iterable[int]) -> str:
        """The first that is not finite since this step; a mask of infinities is what it was before."""
        for number in present:
            if not _is_finite(self._live[number]) and _is_finite(self._base[number]):
                return self._entries[number].name
        return ""

    def check_births(self) -> None:
        """ConfigError if a persistent buffer was born since the run was joined."""
        for module, key in self._empty:
            if module._buffers.get(key) is not None and key not in module._non_persistent_buffers_set:
                self._refuse(module, key)
        for module, _, known in self._known:
            if len(module._buffers) != len(known):
                for key in module._buffers.keys() - known - module._non_persistent_buffers_set:
                    self._refuse(module, key)

    def _refuse(self, module: torch.nn.Module, key: str) -> None:
        prefix = next((prefix for other, prefix, _ in self._known if other is module), "")
        name = plain_name(f"{prefix}.{key}" if prefix else key)
        raise ConfigError(
            f"the buffer {name} came to be in a forward pass, after holdfast.join",
            hint="register it as a tensor of its final shape, or run one forward pass before join; "
            "persistent=False if it is a cache that needs no mean over shards",
        )

    def _put_back(self, *, keep_values: bool) -> None:
        for entry in self._entries:
            live = entry.now()
            if live is not entry.tensor:
                if keep_values:
                    entry.tensor.copy_(live)
                entry.owner._buffers[entry.key] = entry.tensor


@dataclass
class _Buffer:
    """Where a buffer lives, and the tensor that it was at first and always is again between shards."""

    name: str
    owner: torch.nn.Module
    key: str
    tensor: torch.Tensor

    def now(self) -> torch.Tensor:
        """What the user's code has made of it, in place or by assignment."""
        buffers = self.owner._buffers
        tensor = buffers[self.key] if self.key in buffers else None  # noqa: SIM401  a scripted module's has no get
        if tensor is self.tensor:
            return tensor
        if tensor is not None and tensor.shape == self.tensor.shape and tensor.dtype == self.tensor.dtype:
            return tensor
        if self.key in self.owner._non_persistent_buffers_set:
            # A cache that grows with what comes (rotary embeddings).
            self.owner = _Nowhere(self.key, self.tensor)
            return self.tensor
        raise ConfigError(
            f"the buffer {self.name} got another shape or dtype after holdfast.join",
            hint="keep its shape, or register it with persistent=False if it is a cache that needs no mean over shards",
        )


class _Nowhere(torch.nn.Module):
    """The home of a buffer that is no longer in the model."""

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer(key, tensor)


def _buffers_of(model: torch.nn.Module) -> list[_Buffer]:
    """Each tensor once, under the name that `named_buffers` gives it."""
    found: dict[int, _Buffer] = {}
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in found:
                found[id(tensor)] = _Buffer(plain_name(f"{prefix}.{key}" if prefix else key), module, key, tensor)
    return list(found.values())


def _is_finite(tensor: torch.Tensor) -> bool:
    wide = tensor.to(_TO_WIDE[tensor.dtype]) if tensor.dtype in _TO_WIDE else tensor
    return bool(torch.isfinite(wide).all())


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if any(target.is_conj() or target.is_neg() for target in targets):  # which torch cannot write to many at once
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    elif targets:
        torch._foreach_copy_(targets, sources)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without a conjugation or negation that is still to be done."""
    return tensor.detach().resolve_conj().resolve_neg()


def _is_added_as_it_is(dtype: torch.dtype) -> bool:
    return dtype == torch.bool or ((dtype.is_floating_point or dtype.is_complex) and dtype not in _TO_WIDE)


def _sum_like(tensor: torch.Tensor) -> torch.Tensor:
    """What its sum over shards is kept in."""
    if _is_added_as_it_is(tensor.dtype):
        return tensor
    if tensor.dtype in _TO_WIDE:
        return torch.empty(tensor.shape, dtype=_TO_WIDE[tensor.dtype], device="meta")
    return torch.empty(2 * tensor.numel() + 1, dtype=torch.int64, device="meta")


def _to_sum(tensor: torch.Tensor) -> torch.Tensor:
    """What one shard adds."""
    if _is_added_as_it_is(tensor.dtype):
        return tensor
    if tensor.dtype in _TO_WIDE:
        return tensor.to(_TO_WIDE[tensor.dtype])
    whole = _as_int64(tensor).flatten()
    low = torch.bitwise_and(whole, _HALF - 1)
    high = whole >> 32
    if tensor.dtype == torch.uint64:
        high = torch.bitwise_and(high, _HALF - 1)
    return torch.cat([low, high, torch.ones(1, dtype=torch.int64, device=tensor.device)])


def _mean(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if _is_added_as_it_is(like.dtype) or like.dtype in _TO_WIDE:
        return total
    count = int(total[-1]) if total.device.type == "cpu" else total[-1]
    low, high = total[: like.numel()], total[like.numel() : -1]
    quotient = torch.div(high, count, rounding_mode="floor")
    rest = (high - quotient * count) * _HALF + low
    whole = quotient * _HALF + torch.div(rest, count, rounding_mode="floor")
    return (whole.view(torch.uint64) if like.dtype == torch.uint64 else whole).view(like.shape)


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """0.0 and -0.0 are equal, NaN is not equal to itself: neither says whether a shard has written here."""
    return torch.equal(_bits(one), _bits(other))


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (_bits(one) != _bits(other)).any()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype.is_complex else tensor
    return plain.view(_BITS[plain.element_size()])
