"""What shards leave behind for embedding tables: kept by shard until the script's lines send it with `table.step()`.

Belongs to the thread of the user's loop, like the capture that it is a part of.
"""

from __future__ import annotations

import torch

from holdfast.tables.module import EmbeddingTable


class TableGradients:
    def __init__(self, model: torch.nn.Module) -> None:
        self._tables = [module for module in model.modules() if isinstance(module, EmbeddingTable)]

    @property
    def on_servers(self) -> list[EmbeddingTable]:
        return [table for table in self._tables if table.is_on_servers]

    def begin_step(self) -> None:
        """ConfigError if the last step's gradients were not sent."""
        for table in self._tables:
            table.check_sent()

    def before_shard(self) -> None:
        for table in self._tables:
            table.before_shard()

    def after_shard(self, shard: int, share: float) -> None:
        """The shard counts for so much of the step."""
        for table in self._tables:
            table.after_shard(shard, share)

    def flush(self) -> None:
        """At the end of a loop: what was sent is acknowledged."""
        for table in self._tables:
            table.flush()
