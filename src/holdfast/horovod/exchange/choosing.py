"""Which carrier a world gets: shared memory where all its members are on one host, else connections."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.words import View
from holdfast.horovod.exchange.arena import Arena
from holdfast.horovod.exchange.carrier import Carrier
from holdfast.horovod.exchange.network import Network
from holdfast.horovod.exchange.shared_memory import SharedMemory
from holdfast.net.groups import Group


def choose_carrier(
    view: View,
    me: str,
    group: Group,
    arena: Arena | None,
    *,
    wake: Callable[[], None],
    sort_mail: Callable[[], None],
) -> Carrier:
    """All members come to the same: either each has the memory of all others, or none is asked for any."""
    near = all(connection.memory is not None for connection in group.connections.values())
    if arena is not None and near:
        return SharedMemory(view, me, arena, group, wake=wake, sort_mail=sort_mail)
    return Network(view, me, group, wake=wake, sort_mail=sort_mail)
