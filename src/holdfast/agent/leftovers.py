"""What a run leaves in this host's memory when its agent ends."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.host_memory.place import MEMORY_ONLY, kept_steps, remove_memory
from holdfast.core.errors import LedgerError, ProtocolError
from holdfast.core.words import KEY_CHECKPOINT, decode_json, decode_whole, encode_json
from holdfast.ledger.port import Ledger


def forget_memory(memory: Path, ledger: Ledger, *, finished: bool) -> None:
    """Whoever has finished needs no snapshot in memory; whoever may go on does, unless storage has it."""
    kept = kept_steps(memory)
    if finished:
        remove_memory(memory)
    elif kept:
        with suppress(LedgerError, ProtocolError):
            entry = ledger.get(KEY_CHECKPOINT)
            saved = decode_json(entry.value) if entry is not None else {"uri": MEMORY_ONLY}
            if saved.get("uri") != MEMORY_ONLY and decode_whole(encode_json(saved), "step") >= kept[0]:
                remove_memory(memory)
