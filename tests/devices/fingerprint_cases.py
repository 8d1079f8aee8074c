"""What of a device is compared at join, and that its generator is seeded with the others."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.data.seeding import device_generators, know_devices, seed_everything
from holdfast.devices.found import device_of
from holdfast.devices.visible import WORKSPACE
from holdfast.engine.numerics import decides_bits, fingerprint


def test_a_model_is_on_one_device(device: torch.device) -> None:
    here, there = torch.ones(2), torch.ones(2, device=device)
    assert device_of([here]) is None and device_of([there, there]) == device
    with pytest.raises(ConfigError, match="are on cpu and simulated:0"):
        device_of([here, there])


def test_what_decides_bits_is_in_the_fingerprint(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = fingerprint(device)
    assert mine == fingerprint(device) != fingerprint()
    said = decides_bits(device)
    assert said["name"] == "simulated" and said["capability"] == "(1, 0)"
    module = torch.get_device_module(device)
    for name, value in (("get_device_name", "another"), ("get_device_capability", (9, 0))):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda device=None, value=value: value)
            assert fingerprint(device) != mine
    with monkeypatch.context() as patched:
        patched.setenv(WORKSPACE, ":16:8")
        assert fingerprint(device) != mine
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = not before
        assert fingerprint(device) != mine
    finally:
        torch.backends.cudnn.benchmark = before


def test_its_generator_is_seeded_and_put_back(device: torch.device) -> None:
    know_devices()
    seed_everything(7)
    back = device_generators()
    first = torch.randn(4, device=device).cpu()
    for put_back in back:
        put_back()
    assert torch.equal(torch.randn(4, device=device).cpu(), first)
    seed_everything(7)
    assert torch.equal(torch.randn(4, device=device).cpu(), first)
