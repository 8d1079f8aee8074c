"""Which name a parameter server has: its own for as long as what it confirmed to have is there, else a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.placement.server_disks import ServerDisks, slot_of


@pytest.mark.parametrize(("host", "names"), [("", ["s1", "s1.2", "s1.3"]), ("b", ["s1@b", "s1.2@b", "s1.3@b"])])
def test_a_name_lasts_as_long_as_its_directory(tmp_path: Path, host: str, names: list[str]) -> None:
    disks, place = ServerDisks(tmp_path, host), tmp_path / "servers"
    assert disks.kept(1, 0) == ""
    assert disks.begin(1, 1, 0) == names[0] and disks.kept(1, 0) == names[0]
    assert disks.kept(11, 0) == "" and ServerDisks(tmp_path, "elsewhere").kept(1, 0) == ""
    shutil.rmtree(place / names[0])
    assert disks.kept(1, 0) == ""
    assert disks.begin(1, 2, 0) == names[1]
    for path in (place / names[1]).iterdir():
        path.unlink()
    assert disks.kept(1, 0) == "", "an emptied one is gone, too"
    assert disks.begin(1, 3, 0) == names[2] and disks.kept(1, 0) == names[2]


def test_what_is_of_before_a_loss_is_not_gone_on_with(tmp_path: Path) -> None:
    disks, place = ServerDisks(tmp_path, ""), tmp_path / "servers"
    old = disks.begin(0, 1, 0)
    (place / old / "parameters%2F0").mkdir()
    assert disks.kept(0, 1) == ""
    new = disks.begin(0, 2, 1)
    assert new == "s0.2" and [path.name for path in place.iterdir()] == [new]
    assert disks.kept(0, 0) == "", "who has not heard of the loss finds nothing of after it"
    assert disks.begin(0, 3, 0) == "s0.3" and disks.kept(0, 1) == new, "nor deletes it"


def test_a_name_that_was_given_up_is_not_used_again(tmp_path: Path) -> None:
    disks, place = ServerDisks(tmp_path, "a"), tmp_path / "servers"
    disks.begin(0, 1, 0)
    assert disks.begin(0, 2, 0) == "s0.2@a" == disks.kept(0, 0)
    assert [path.name for path in place.iterdir()] == ["s0.2@a"]


def test_a_slot_is_told_whatever_the_name() -> None:
    assert slot_of("s0.12@a") == slot_of("s0@a") == ("s0", "a") and slot_of("s0") == ("s0", "")
