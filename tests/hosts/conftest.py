"""Hosts need namespaces and etcd; where they cannot be had, the reason is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts_harness import Land, land_of

from holdfast.agent.hosts.etcd_cluster import find_etcd
from holdfast.core.errors import ConfigError
from holdfast.testing.switchboard import why_not


@pytest.fixture(scope="session")
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture
def make_land(tmp_path: Path, possible: None) -> Iterator[Callable[..., Land]]:
    with ExitStack() as stack:
        yield lambda *hosts, six=False: stack.enter_context(land_of(tmp_path, *hosts, six=six))
