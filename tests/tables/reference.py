"""A table as a dict, one number at a time: what the shipped one must be like, without kernels, blocks or indices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from holdfast.tables.rows.plain import first_values
from holdfast.tables.rows.port import FirstValues, corrections
from holdfast.tables.settings import Adam, TableSettings

F = np.float32


@dataclass
class Row:
    values: list[np.float32]
    state: list[np.float32]
    used: int = 0
    uses: int = 0


@dataclass
class DictTable:
    settings: TableSettings
    rows: dict[int, Row] = field(default_factory=dict)
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # id -> (last update, how often)
    updates: int = 0

    def first(self, one: int) -> list[np.float32]:
        ids = np.array([one], dtype=np.uint64)
        return list(first_values(FirstValues.of(self.settings), ids, self.settings.dim)[0])

    def look_up(self, one: int) -> list[np.float32]:
        return list(self.rows[one].values) if one in self.rows else self.first(one)

    def update(self, ids: list[int], gradients: np.ndarray, lr: float) -> None:
        self.updates += 1
        sums: dict[int, list[np.float32]] = {}
        for one, gradient in zip(ids, gradients, strict=True):
            old = sums.get(one)
            sums[one] = list(gradient) if old is None else [a + b for a, b in zip(old, gradient, strict=True)]
        for one, gradient in sums.items():
            if one not in self.rows and not self._admitted(one, ids.count(one)):
                continue
            self._step(self.rows[one], gradient, F(lr))
        self._expire()

    def _admitted(self, one: int, times: int) -> bool:
        times += self.seen.get(one, (0, 0))[1]
        if self.settings.admit > 1 and times < self.settings.admit:
            self.seen[one] = self.updates, times
            return False
        self.seen.pop(one, None)
        self.rows[one] = Row(self.first(one), [F(0)] * self.settings.optimizer.state_elements(self.settings.dim))
        return True

    def _step(self, row: Row, g: list[np.float32], lr: np.float32) -> None:
        optimizer, dim = self.settings.optimizer, self.settings.dim
        kind, decay, eps = optimizer.kind, F(optimizer.weight_decay), F(getattr(optimizer, "eps", 0))
        row.used, row.uses = self.updates, row.uses + 1
        p, s = row.values, row.state
        if decay and kind != "adamw":
            g = [a + decay * b for a, b in zip(g, p, strict=True)]
        if kind == "rowwise-adagrad":
            lanes = [F(0)] * 16
            for k in range(dim):
                lanes[k % 16] = lanes[k % 16] + g[k] * g[k]
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [lanes[k] + lanes[k + half] for k in range(half)]
            s[0] = s[0] + lanes[0] / F(dim)
        for k in range(dim):
            if kind == "sgd":
                p[k] = p[k] - lr * g[k]
            elif kind == "adagrad":
                s[k] = s[k] + g[k] * g[k]
                p[k] = p[k] - (lr * g[k]) / (np.sqrt(s[k]) + eps)
            elif kind == "rowwise-adagrad":
                p[k] = p[k] - (lr / (np.sqrt(s[0]) + eps)) * g[k]
            else:
                assert isinstance(optimizer, Adam)
                b1, b2 = optimizer.betas
                tables = corrections(b1, b2)
                at = min(row.uses, len(tables[0]) - 1)
                s[k] = F(b1) * s[k] + F(1.0 - b1) * g[k]
                s[dim + k] = F(b2) * s[dim + k] + (F(1.0 - b2) * g[k]) * g[k]
                keep = F(1) - lr * decay if kind == "adamw" else F(1)
                p[k] = keep * p[k] - (lr * tables[0][at] * s[k]) / (np.sqrt(s[dim + k]) * tables[1][at] + eps)

    def _expire(self) -> None:
        expire = self.settings.expire
        oldest = (0, 0)
        if expire.updates and self.updates % max(1, expire.updates // 16) == 0:
            oldest = max(oldest, (self.updates - expire.updates, 2**64 - 1))
        if expire.rows and len(self.rows) > expire.rows:
            in_order = sorted((row.used, one) for one, row in self.rows.items())
            oldest = max(oldest, in_order[len(in_order) - (expire.rows - expire.rows // 16) - 1])
        self.rows = {one: row for one, row in self.rows.items() if (row.used, one) > oldest}
        self.seen = {one: seen for one, seen in self.seen.items() if (seen[0], one) > oldest}
        if len(self.seen) > self.settings.candidates_max:
            kept = sorted((seen[0], one) for one, seen in self.seen.items())[-(self.settings.candidates_max // 2) :]
            self.seen = {one: seen for one, seen in self.seen.items() if (seen[0], one) in set(kept)}
