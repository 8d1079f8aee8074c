"""Embedding tables: rows by 64-bit id, trained row by row, in this process or on parameter servers.

    table = holdfast.EmbeddingTable(32, optimizer=holdfast.tables.Adagrad(lr=0.05), admit=2)

The module is in module.py, what a table may be in settings.py, one shard of rows in shard.py.
"""

from __future__ import annotations

from holdfast.tables.following import Follower, follow
from holdfast.tables.module import EmbeddingTable
from holdfast.tables.publishing import Publisher, publish
from holdfast.tables.settings import SGD, Adagrad, Adam, AdamW, Expire, Normal, RowwiseAdagrad, Uniform

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "EmbeddingTable",
    "Expire",
    "Follower",
    "Normal",
    "Publisher",
    "RowwiseAdagrad",
    "Uniform",
    "follow",
    "publish",
]
