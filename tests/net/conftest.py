"""Keys are made once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.trust.keys import Keys, create_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(Path(tmp_path_factory.mktemp("run")) / "keys")


@pytest.fixture(scope="session")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(Path(tmp_path_factory.mktemp("other")) / "keys")
