"""Which accelerators of its host a worker sees, and what of a device is compared at join."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.options.declaring import option_of
from holdfast.core.options.run import AgentOptions
from holdfast.data.seeding import device_generators, know_devices, seed_everything
from holdfast.devices.found import device_of
from holdfast.devices.visible import CUDA, VARIABLES, WORKSPACE, devices_of, variables_for
from holdfast.engine.numerics import decides_bits, fingerprint


def host(tmp_path: Path, *, nvidia: int = 0, amd: tuple[int, ...] = ()) -> Path:
    """What the drivers of such a host show."""
    for number in range(nvidia):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{number:02d}:00.0").mkdir(parents=True)
    for number, units in enumerate(amd):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 4\nsimd_count {units}\n")
    return tmp_path


def test_auto_takes_what_is_there(tmp_path: Path) -> None:
    assert devices_of("auto", {}, host(tmp_path / "none")) is None
    assert devices_of("auto", {}, host(tmp_path / "three", nvidia=3)) == ("0", "1", "2")
    assert devices_of("auto", {}, host(tmp_path / "amd", amd=(0, 240, 240))) == ("0", "1")
    assert devices_of("auto", {CUDA: "4, 6"}, host(tmp_path / "given", nvidia=8)) == ("4", "6")
    assert devices_of("auto", {"ZE_AFFINITY_MASK": "1"}, host(tmp_path / "intel")) == ("1",)
    assert devices_of("auto", {CUDA: ""}, host(tmp_path / "hidden", nvidia=8)) is None


def test_so_many_or_none(tmp_path: Path) -> None:
    assert devices_of("none", {CUDA: "0,1"}, tmp_path) == ()
    assert devices_of("2", {}, tmp_path) == ("0", "1")
    assert devices_of("2", {CUDA: "5,6,7"}, tmp_path) == ("5", "6")


def test_each_worker_sees_one() -> None:
    seen = [variables_for(slot, ("4", "6"), {})[CUDA] for slot in range(3)]
    assert seen == ["4", "6", "4"]
    assert {variables_for(0, (), {})[name] for name in VARIABLES} == {""}
    assert not set(VARIABLES) & set(variables_for(0, None, {}))
    assert variables_for(0, None, {})[WORKSPACE] == ":4096:8"
    assert variables_for(0, None, {WORKSPACE: ":16:8"})[WORKSPACE] == ":16:8"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [("all", "--devices is 'all'"), ("0", "--devices is 0, but must be from 1 to 64"), ("-1", "--devices is '-1'")],
)
def test_what_is_no_number_of_devices(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        option_of(AgentOptions, "devices").parse(word)
    assert refused.value.message == sentence and refused.value.hint


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
