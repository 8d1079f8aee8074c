"""Which accelerators of its host a worker sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError
from holdfast.core.options.declaring import option_of
from holdfast.core.options.run import AgentOptions
from holdfast.devices.visible import CUDA, VARIABLES, WORKSPACE, devices_of, variables_for


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
