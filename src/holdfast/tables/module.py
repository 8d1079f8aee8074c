"""holdfast.EmbeddingTable: rows by 64-bit id, as a module.

`forward` looks rows up; `backward` gathers the gradients of those that were touched; `step` sends them to where the
rows are. They are in this process until `connect` is called: a run that has parameter servers connects its tables. Rows
are no parameters: no optimizer of torch sees them, and no worker holds them all.

Where a run computes a step in shards, the gradients are kept by shard, so that a shard that is computed again counts
once. Used by the thread of the user's loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast.core.errors import ConfigError
from holdfast.tables.rows.port import Ids, Values
from holdfast.tables.settings import Adagrad, Expire, Normal, Optimizer, TableSettings, Uniform
from holdfast.tables.shard import Changes, Moment
from holdfast.tables.stores import LocalStore, TableStore

Gathered: TypeAlias = list[tuple[Ids, Values]]


class EmbeddingTable(torch.nn.Module):
    """Rows of `dim` numbers for ids of 64 bits, any number of them.

    `optimizer`: one of holdfast.tables (SGD, Adagrad, RowwiseAdagrad, Adam, AdamW). `admit`: a row comes to be when its
    id has been in updates so often; before, a look-up gives first values, which follow from the seed and the id.
    `expire`: holdfast.tables.Expire. `first`: holdfast.tables.Uniform or Normal. With `rows_in_memory` and `disk`, the
    rows that are used least are in a file in that directory.
    """

    def __init__(
        self,
        dim: int,
        *,
        optimizer: Optimizer | None = None,
        admit: int = 1,
        expire: Expire | None = None,
        first: Uniform | Normal | None = None,
        seed: int = 0,
        rows_in_memory: int | None = None,
        disk: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.settings = TableSettings(
            dim=dim,
            optimizer=Adagrad() if optimizer is None else optimizer,
            admit=admit,
            expire=Expire() if expire is None else expire,
            first=Uniform() if first is None else first,
            seed=seed,
        ).validate()
        if (rows_in_memory is None) != (disk is None):
            raise ConfigError(
                "a table with rows on disk needs rows_in_memory and disk", hint="give both of them, or neither"
            )
        self.lr = self.settings.optimizer.lr
        self.name = "table"
        self.unit: int | None = (
            None  # of data, that the next update is made of: for a mode whose units may be made again
        )
        place = None if disk is None else Path(disk)
        self.store: TableStore = LocalStore(self.settings, rows_in_memory=rows_in_memory, disk=place)
        self._trained = True
        self._owns = True  # the rows are this module's, and not those that a copy looks up
        self._begun = False  # some step has sent gradients, of this worker or another
        self._held: list[Changes] = []  # rows that are on servers, while a checkpoint takes them
        self._anchor = torch.zeros(0, requires_grad=True)  # what backward begins at: rows are no leaves
        self._gathered: Gathered = []
        self._of_shards: dict[int, Gathered] = {}

    def extra_repr(self) -> str:
        return f"{self.settings.dim}, optimizer={self.settings.optimizer}, admit={self.settings.admit}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A row for each id, of the shape of `ids` with `dim` more."""
        if ids.dtype not in (torch.int64, torch.int32, torch.uint64, torch.int16, torch.uint8, torch.int8):
            raise ConfigError(f"ids are {ids.dtype}", hint="look rows up by whole numbers: ids.long()")
        if self._trained and torch.is_grad_enabled():
            rows: torch.Tensor = _LookUp.apply(self._anchor, ids, self)  # type: ignore[no-untyped-call]
            return rows
        return self._look_up(ids)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        values = torch.from_numpy(self.store.look_up(numbers_of(ids)))
        return values.view(*ids.shape, self.settings.dim).to(ids.device)

    def requires_grad_(self, requires_grad: bool = True) -> EmbeddingTable:
        """False: rows stay as they are, and nothing is gathered."""
        self._trained = requires_grad
        return self

    @property
    def is_trained(self) -> bool:
        return self._trained

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was gathered and not sent."""
        self._gathered, self._of_shards = [], {}

    def _gather(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        flat = gradients.detach().to("cpu", torch.float32).reshape(-1, self.settings.dim).contiguous()
        self._gathered.append((numbers_of(ids), flat.numpy()))

    def step(self) -> None:
        """Send the gradients that were gathered since the last time: one update. Call it after `optimizer.step()`.

        DivergedError, with nothing applied, if one is not finite.
        """
        self._begun = self._begun or self._trained
        found = [one for _, some in sorted(self._of_shards.items()) for one in some] + self._gathered
        self._gathered, self._of_shards = [], {}
        if found:
            ids = found[0][0] if len(found) == 1 else np.concatenate([one for one, _ in found])
            gradients = found[0][1] if len(found) == 1 else np.concatenate([one for _, one in found])
            unit, self.unit = self.unit, None
            self.store.push(ids, gradients, lr=self.lr, unit=unit)

    def flush(self) -> None:
        """Wait until all updates are acknowledged. `step` may return before."""
        self.store.flush()

    # ---- where a run computes shards

    def before_shard(self) -> None:
        self._gathered = []

    def after_shard(self, shard: int, share: float) -> None:
        """What was gathered is of this shard, which counts for `share` of the step. A shard counts once."""
        some, self._gathered = self._gathered, []
        factor = np.float32(share)
        self._of_shards[shard] = [(ids, gradients * factor) for ids, gradients in some]

    def check_sent(self) -> None:
        """ConfigError if a step of a run is over, and what it gathered was not sent."""
        if any(self._of_shards.values()):
            raise ConfigError(
                f"the gradients of the table {self.name} were gathered in a step and not sent",
                hint="call table.step() after optimizer.step()",
            )
        self._of_shards = {}

    def connect(self, name: str, store: TableStore) -> None:
        """From now on the rows are there."""
        self.name, self.store = name, store

    # ---- rows on servers, in checkpoints

    @property
    def is_on_servers(self) -> bool:
        return not isinstance(self.store, LocalStore)

    def hold_rows(self) -> None:
        """The state has all rows from now on, as they are now."""
        if self.is_on_servers and self._owns:
            self._held = [self.store.changes(shard) for shard in range(self.store.shards)]

    def let_go_of_rows(self) -> None:
        self._held = []

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingTable:
        """A copy looks up the same rows: an averaged model averages what is dense. Its state_dict has no rows."""
        made = EmbeddingTable(self.settings.dim)
        made.settings, made.store, made.name, made.lr = self.settings, self.store, self.name, self.lr
        made.training, made._trained, made._owns = self.training, self._trained, False
        memo[id(self)] = made
        return made

    # ---- as a part of the model's state

    def get_extra_state(self) -> dict[str, Any]:
        """Rows within this process belong to the state_dict; those on servers, while they are held."""
        told: dict[str, Any] = {"settings": self.settings.encode(), "begun": self._begun and self._owns}
        if isinstance(self.store, LocalStore) and self._owns:
            told["shards"] = [_plain(one.changes()) for one in self.store.states]
        elif self._held:
            told["shards"] = [_plain(one) for one in self._held]
        return told

    def set_extra_state(self, state: Any) -> None:
        """ConfigError if the rows that belong to this state are not there."""
        mine = self.settings.encode()
        if not isinstance(state, dict) or state.get("settings") != mine:
            raise ConfigError(
                "the state is of a table with other settings than this one",
                hint="build the table with the dim, optimizer, admit, expire, first and seed that it was saved with",
            )
        shards = state.get("shards")
        if shards is not None and len(shards) == self.store.shards:
            self.store.put_back([_changes(told) for told in shards])
        elif state.get("begun") and not any(self.store.updates(shard) for shard in range(self.store.shards)):
            raise ConfigError(
                f"the table {self.name} was trained in this state, and its rows are not here",
                hint="restore them from a log before the loop: holdfast.tables.publish(table, uri).restore()",
            )
        self._begun = bool(state.get("begun"))


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, table: EmbeddingTable) -> torch.Tensor:
        ctx.ids, ctx.table = ids, table
        return table._look_up(ids)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.table._gather(ctx.ids, gradients[0])
        return None, None, None


def numbers_of(ids: torch.Tensor) -> Ids:
    """As 64 bits without a sign: -1 and 2^64 - 1 are one id."""
    plain = ids.detach().to("cpu")
    if plain.dtype != torch.uint64:
        plain = plain.to(torch.int64)
    return plain.contiguous().reshape(-1).numpy().view(np.uint64)


def _plain(changes: Changes) -> dict[str, Any]:
    """As tensors that every checkpoint can hold."""
    ids, marks = changes.candidates
    return {
        "moment": changes.moment.encode(),
        "records": torch.from_numpy(changes.records.view(np.int32)),
        "candidates": torch.from_numpy(np.stack([ids, marks]).view(np.int64)),
    }


def _changes(told: Any) -> Changes:
    records = told["records"].contiguous().numpy().view(np.uint32)
    ids, marks = told["candidates"].contiguous().numpy().view(np.uint64)
    return Changes(0, Moment.decode(told["moment"]), records, (ids, marks))
