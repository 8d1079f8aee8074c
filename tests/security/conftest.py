"""One run for each layout, on which all attacks of this room are made while it trains."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from siege import Besieged, besieged

from holdfast.agent.hosts.etcd_member import find_etcd
from holdfast.core.errors import ConfigError


@pytest.fixture(scope="module", params=["plain", "tls"])
def run(request: pytest.FixtureRequest) -> Iterator[Besieged]:
    if request.param == "tls":
        try:
            find_etcd()
        except ConfigError as error:
            pytest.skip(error.message)
    home = Path(tempfile.mkdtemp(prefix="hf-siege-"))  # short: sockets have their paths in it
    try:
        with besieged(home, request.param) as run:
            yield run
    finally:
        shutil.rmtree(home, ignore_errors=True)
