"""A state made of parts that have a state_dict, and plain values beside them. Framework-neutral.

`sync` brings all of it from rank 0 to the others, and is over only when every rank has it: what a rank is sent is kept
apart until then, so that a rank that is lost in the middle of it leaves nobody with half a state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import xxhash

from holdfast.horovod import objects
from holdfast.horovod.elastic import ObjectState as NeutralObjectState
from holdfast.horovod.torch.functions import allgather_object, broadcast_object
from holdfast.horovod.torch.handles import barrier


class ObjectState(NeutralObjectState):
    """Plain values; `allow_pickle` lets others travel, and trusts the workers of the run."""

    def __init__(self, allow_pickle: bool = False, **kwargs: Any) -> None:
        super().__init__(lambda value: broadcast_object(value, allow_pickle=allow_pickle), None, **kwargs)


class PartsState(ObjectState):
    """`parts` are kept by what their state_dict says; `plain` are values. Subclasses offer both as attributes."""

    def __init__(self, parts: Mapping[str, Any], plain: Mapping[str, Any], *, allow_pickle: bool) -> None:
        self._parts: dict[str, Any] = dict(parts)
        self._saved_parts: dict[str, Any] = {}
        self._allow_pickle = allow_pickle
        self._save_parts()
        super().__init__(allow_pickle=allow_pickle, **plain)

    def _save_parts(self) -> None:
        self._saved_parts = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def save(self) -> None:
        self._save_parts()
        super().save()

    def restore(self) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._saved_parts[name]))
        super().restore()

    def sync(self) -> None:
        now = {name: part.state_dict() for name, part in self._parts.items()}
        plain = {name: getattr(self, name) for name in self._saved_state}
        if not self._is_everybodys([now, plain]):
            state = broadcast_object([now, plain], allow_pickle=self._allow_pickle)
            barrier()  # everybody has it: only now does anybody take it over
            for name, part in self._parts.items():
                if state[0][name] is not now[name]:
                    part.load_state_dict(state[0][name])
            for name, value in state[1].items():
                setattr(self, name, value)
        self.synced()
        self.save()

    def synced(self) -> None:
        """What is to be done when the state has come, before it is saved."""

    def _is_everybodys(self, state: Any) -> bool:
        """Whether all ranks have one state already, as after a loss: then nothing needs to travel."""
        data = objects.encode(state, allow_pickle=self._allow_pickle).numpy()
        digests = allgather_object(xxhash.xxh3_128_hexdigest(data.data))
        return len(set(digests)) == 1
