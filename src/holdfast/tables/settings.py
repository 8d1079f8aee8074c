"""What a table is: its width, its optimizer, how rows begin, come to be and end. Plain values, checked once.

The settings travel to servers and into logs as JSON; two stores with different ones are never mixed. What is computed
with them is in rows/: a row is trained as if it were a parameter of its own, whose optimizer steps when it has a
gradient and rests when it has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from holdfast.core.errors import ConfigError, ProtocolError

DIM_MAX = 1 << 14
ADMIT_MAX = (1 << 24) - 1  # what a mark has room for
ROWS_MAX = (1 << 31) - 1
CANDIDATES_MAX = 1 << 22


class Optimizer:
    """How a row changes. `lr` can be changed while training: it travels with every update."""

    kind: ClassVar[str] = ""
    lr: float

    def state_elements(self, dim: int) -> int:
        """What it keeps for each row, beside the values."""
        raise NotImplementedError

    def check(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers):
                raise ConfigError(
                    f"{one.name}={value!r} of {type(self).__name__}", hint="give a finite number from 0 on"
                )


@dataclass(frozen=True)
class SGD(Optimizer):
    kind: ClassVar[str] = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0

    def state_elements(self, dim: int) -> int:
        return 0


@dataclass(frozen=True)
class Adagrad(Optimizer):
    kind: ClassVar[str] = "adagrad"
    lr: float = 0.01
    weight_decay: float = 0.0
    eps: float = 1e-10

    def state_elements(self, dim: int) -> int:
        return dim


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """One accumulator for a row, of the mean of its squared gradients."""

    kind: ClassVar[str] = "rowwise-adagrad"
    lr: float = 0.01
    weight_decay: float = 0.0
    eps: float = 1e-10

    def state_elements(self, dim: int) -> int:
        return 1


@dataclass(frozen=True)
class Adam(Optimizer):
    """Its bias correction counts the row's own updates, not the table's."""

    kind: ClassVar[str] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def state_elements(self, dim: int) -> int:
        return 2 * dim

    def check(self) -> None:
        super().check()
        if len(self.betas) != 2 or not all(beta < 1.0 for beta in self.betas):
            raise ConfigError(
                f"betas={self.betas!r} of {type(self).__name__}", hint="give two numbers from 0 to below 1"
            )


@dataclass(frozen=True)
class AdamW(Adam):
    """With weight decay beside the gradient; a row decays when it is updated, and rests otherwise."""

    kind: ClassVar[str] = "adamw"
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Uniform:
    """First values from -scale to scale."""

    kind: ClassVar[str] = "uniform"
    scale: float = 0.05


@dataclass(frozen=True)
class Normal:
    """First values around 0 with this deviation: the sum of four uniform numbers, so none is beyond 3.5 of them."""

    kind: ClassVar[str] = "normal"
    scale: float = 0.05


@dataclass(frozen=True)
class Expire:
    """When rows are removed. None: never for that reason.

    `updates`: a row that none of so many updates of its shard has touched; `seconds`: none for so long, by the clock
    of whoever sends updates; `rows`: at most so many rows in a shard, and those go first that were used longest ago.
    """

    updates: int | None = None
    seconds: float | None = None
    rows: int | None = None

    def check(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (type(value) in (int, float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"expire with {name}={value!r}", hint="give a number above 0, or leave it out")
        for name in ("updates", "rows"):
            if isinstance(getattr(self, name), float):
                raise ConfigError(f"expire with {name}={getattr(self, name)!r}", hint="give a whole number")
        if self.rows is not None and self.rows > ROWS_MAX:
            raise ConfigError(f"expire with rows={self.rows}", hint=f"a shard has room for {ROWS_MAX}")


_OPTIMIZERS: dict[str, type[Optimizer]] = {one.kind: one for one in (SGD, Adagrad, RowwiseAdagrad, Adam, AdamW)}
_FIRST_VALUES: dict[str, type[Uniform | Normal]] = {one.kind: one for one in (Uniform, Normal)}


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    dim: int
    optimizer: Optimizer = field(default_factory=Adagrad)
    first: Uniform | Normal = field(default_factory=Uniform)
    admit: int = 1  # a row comes to be when its id has been seen so often
    expire: Expire = field(default_factory=Expire)
    seed: int = 0
    candidates_max: int = CANDIDATES_MAX  # ids that are counted and not yet admitted; the older half is forgotten then

    def validate(self) -> TableSettings:
        _whole("dim", self.dim, 1, DIM_MAX)
        _whole("admit", self.admit, 1, ADMIT_MAX)
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("candidates_max", self.candidates_max, 2, 1 << 28)
        if not isinstance(self.optimizer, Optimizer) or self.optimizer.kind not in _OPTIMIZERS:
            raise ConfigError(
                f"a table cannot be trained with {type(self.optimizer).__name__}",
                hint="give one of holdfast.tables: SGD, Adagrad, RowwiseAdagrad, Adam, AdamW",
            )
        if not isinstance(self.first, Uniform | Normal) or not (
            math.isfinite(self.first.scale) and self.first.scale >= 0
        ):
            raise ConfigError(
                f"first values {self.first!r}", hint="give holdfast.tables.Uniform(scale) or Normal(scale)"
            )
        if not isinstance(self.expire, Expire):
            raise ConfigError(
                f"expire={self.expire!r}", hint="give holdfast.tables.Expire(updates=…, seconds=…, rows=…)"
            )
        self.optimizer.check()
        self.expire.check()
        return self

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("optimizer", "first"):
            plain[name] = {"kind": plain[name].kind, **asdict(plain[name])}
        return {**plain, "expire": asdict(self.expire)}

    @classmethod
    def decode(cls, told: Any) -> TableSettings:
        """ProtocolError for what no table encodes."""
        try:
            first, optimizer = dict(told["first"]), dict(told["optimizer"])
            if "betas" in optimizer:
                optimizer["betas"] = tuple(optimizer["betas"])
            made: Callable[..., Optimizer] = _OPTIMIZERS[optimizer.pop("kind")]
            kinds: Callable[..., Uniform | Normal] = _FIRST_VALUES[first.pop("kind")]
            rest = {"optimizer": made(**optimizer), "first": kinds(**first), "expire": Expire(**told["expire"])}
            return cls(**{**told, **rest}).validate()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"not the settings of a table: {str(error)[:200]}") from error


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"a table with {name}={value!r}", hint=f"give a whole number from {least} to {most}")
