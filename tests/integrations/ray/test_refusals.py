"""What a launch on Ray refuses before it touches a cluster."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import holdfast.integrations.ray as on_ray
from holdfast.core.errors import ConfigError
from tests.launching import training


def test_a_missing_ray_is_told_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed") as caught:
        on_ray.launch(training.train, workers=2)
    assert caught.value.hint == "pip install 'holdfast[ray]'"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "the number of workers is 0"),
        ({"workers": 2, "kwargs": {"steps": object()}}, "is a object, which cannot travel"),
        ({"workers": 2, "spares": 1}, "launch on Ray has no argument spares"),
        ({"workers": 2, "path": "network"}, "launch on Ray has no argument path"),
        ({"workers": 2, "lease": "soon"}, "--lease"),
        ({"workers": 2, "ledger": "etcd://a:2379"}, "ledger= and keys= go together"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.integrations.ray.launching.find_ray", lambda: None)
    with pytest.raises(ConfigError, match=said):
        on_ray.launch(training.train, **options)
