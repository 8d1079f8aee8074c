"""Ray itself, imported when it is needed. Nothing else of ours imports it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from holdfast.core.errors import ConfigError


def find_ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is not installed", hint="pip install 'holdfast[ray]'") from error


def node_address() -> str:
    """Of this node, as other nodes reach it."""
    return str(import_module("ray.util").get_node_ip_address())


def nodes_that_go() -> set[str]:
    """The ids of the nodes that Ray was told will be taken away: spot machines with a notice, and drained ones.

    Ray offers it to its own libraries only, so it may not be where it was.
    """
    try:
        return set(import_module("ray._private.state").state.get_draining_nodes())
    except Exception:  # gone from there, or Ray's head does not answer: then there is no notice
        return set()
