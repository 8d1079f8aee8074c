"""What a snapshot says of itself while it moves, as bytes. Pure: no sockets here, so that hostile bytes can be tried.

    summary    JSON: step, digest, bytes
    manifest   4 bytes: length of a JSON head (the summary's fields and the tensor table); the head; the tree

Every decoder raises ProtocolError for what no encoder writes, and allocates no more than it was sent.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.core.words import decode_json, encode_json
from holdfast.state.codec import TREE_BYTES_MAX
from holdfast.state.layout import TensorSpec, spec_of
from holdfast.state.snapshot import Snapshot

_LENGTH = struct.Struct("!I")
SUMMARY_BYTES_MAX = 1024
_HEAD_BYTES_MAX = 16 * 2**20
MANIFEST_BYTES_MAX = _LENGTH.size + _HEAD_BYTES_MAX + TREE_BYTES_MAX
_DIGEST_CHARACTERS = 32


@dataclass(frozen=True)
class Summary:
    """What peers must agree on before anything moves."""

    step: int
    digest: str
    nbytes: int

    def fields(self) -> dict[str, Any]:
        return {"step": self.step, "digest": self.digest, "bytes": self.nbytes}

    def encode(self) -> bytes:
        return encode_json(self.fields())

    @classmethod
    def of(cls, snapshot: Snapshot) -> Summary:
        return cls(snapshot.step, snapshot.digest(), snapshot.nbytes)

    @classmethod
    def decode(cls, data: bytes) -> Summary:
        return cls.from_fields(decode_json(data[:SUMMARY_BYTES_MAX]))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Summary:
        step, digest, nbytes = fields.get("step"), fields.get("digest"), fields.get("bytes")
        if type(step) is not int or type(nbytes) is not int or step < 0 or nbytes < 0:
            raise ProtocolError(f"a snapshot of step {step!r:.40} with {nbytes!r:.40} bytes")
        if not isinstance(digest, str) or len(digest) != _DIGEST_CHARACTERS:
            raise ProtocolError(f"not a digest: {digest!r:.80}")
        return cls(step, digest, nbytes)


@dataclass(frozen=True)
class TransferManifest:
    """Everything of a snapshot but the tensors' bytes."""

    summary: Summary
    specs: tuple[TensorSpec, ...]
    tree: bytes

    @classmethod
    def of(cls, snapshot: Snapshot) -> TransferManifest:
        return cls(Summary.of(snapshot), tuple(map(spec_of, snapshot.tensors)), snapshot.tree)

    def encode(self) -> bytes:
        table = [spec.to_json() for spec in self.specs]
        head = json.dumps({**self.summary.fields(), "tensors": table}, separators=(",", ":")).encode()
        if len(head) > _HEAD_BYTES_MAX:
            raise ConfigError(
                f"the snapshot has {len(table)} tensors, too many to describe in {_HEAD_BYTES_MAX} bytes",
                hint="keep large data in few tensors rather than in very many",
            )
        return _LENGTH.pack(len(head)) + head + self.tree

    @classmethod
    def decode(cls, data: bytes, *, bytes_max: int) -> TransferManifest:
        """`bytes_max` is how much the caller is ready to allocate for the tensors."""
        if not _LENGTH.size <= len(data) <= MANIFEST_BYTES_MAX:
            raise ProtocolError(f"a manifest of {len(data)} bytes")
        (length,) = _LENGTH.unpack_from(data)
        if length > min(len(data) - _LENGTH.size, _HEAD_BYTES_MAX):
            raise ProtocolError(f"a manifest of {len(data)} bytes whose head has {length}")
        head = decode_json(data[_LENGTH.size : _LENGTH.size + length])
        tree = data[_LENGTH.size + length :]
        summary, table = Summary.from_fields(head), head.get("tensors")
        if len(tree) > TREE_BYTES_MAX or not isinstance(table, list):
            raise ProtocolError(f"a manifest with a tree of {len(tree)} bytes and the table {table!r:.40}")
        if summary.nbytes > bytes_max:
            raise ProtocolError(f"a snapshot of {summary.nbytes} bytes where at most {bytes_max} are expected")
        specs = tuple(map(TensorSpec.from_json, table))
        total = sum(spec.nbytes for spec in specs)
        if total != summary.nbytes:
            raise ProtocolError(f"a snapshot of {summary.nbytes} bytes whose tensors have {total}")
        return cls(summary, specs, tree)
