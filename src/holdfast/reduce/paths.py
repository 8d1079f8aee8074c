"""Which way gradients travel in a view, and whether what its members bring is what they said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.config import PROCESS_GROUP
from holdfast.net.groups import BrokenGroup, Group
from holdfast.reduce.aggregators import ALONE
from holdfast.reduce.alone import Alone
from holdfast.reduce.arena import Arena
from holdfast.reduce.hosts import Hosts, by_host
from holdfast.reduce.network import GroupParties, Network
from holdfast.reduce.process_group import ProcessGroup
from holdfast.reduce.reduction import Brought, Path, ReductionTerms
from holdfast.reduce.shared_memory import SharedMemory
from holdfast.reduce.tree import Tree

BY_ITSELF = "itself"  # each worker is in a view of its own, whatever path the run's settings name


def takes_two_rounds(kind: str, *, small: bool) -> bool:
    """Whether a step has a round of Done after that of Ready. All members of a run of one kind agree on it."""
    return kind in ("hosts", PROCESS_GROUP) or (kind == "host" and not small)


def make_path(kind: str, group: Group, arena: Arena, terms: ReductionTerms) -> Path:
    """The path of a view in a run of this kind (see core/config.py), or `BY_ITSELF`. Its members are all connected."""
    if kind == BY_ITSELF:
        return Alone(group.view, group.me, arena, terms)
    if kind == "network":
        return Network(group, arena, terms)
    path = _through_memory(kind, group, arena, terms)
    return ProcessGroup(group, arena, terms, path, terms.carrying) if terms.carrying is not None else path


def _through_memory(kind: str, group: Group, arena: Arena, terms: ReductionTerms) -> Path:
    near: dict[str, Arena] = {peer: one.memory for peer, one in group.connections.items() if one.memory is not None}
    near[group.me] = arena
    if len(by_host(group.view.members)) > 1:
        return Hosts(group, near, terms)
    two_rounds = takes_two_rounds(kind, small=terms.small)
    tellers = two_rounds and terms.aggregator.shares and len(group.view.members) > 1
    parties = GroupParties(group, group.view.members, terms.interrupted) if tellers else ALONE
    return SharedMemory(group.view, group.me, near, terms, two_rounds=two_rounds, parties=parties)


def check_coverage(tree: Tree, shards: Sequence[tuple[str, tuple[int, ...]]], brought: Mapping[str, Brought]) -> None:
    """The nodes must be those of the shards that the machine counted: a peer that says otherwise is broken."""
    for member, of_member in shards:
        nodes = tuple(node for node, _ in brought[member].nodes)
        if nodes != tree.cover(of_member):
            raise BrokenGroup(member, f"it brings {nodes}, not the shards {of_member}")
