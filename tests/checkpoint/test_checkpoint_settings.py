"""Who says how checkpoints are kept: what the command was given holds, then the script, then what is usual."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.settings import Checkpoints, CheckpointSettings
from holdfast.core.errors import ConfigError

USUAL = CheckpointSettings(uri="/runs/mine/checkpoints", own=True)  # what workers of a plain `holdfast run` are told


def test_a_script_says_what_the_command_does_not() -> None:
    said = Checkpoints.of(Checkpoints("/script", every=500, keep=7))
    found = USUAL.with_script(said)
    assert (found.uri, found.own, found.every, found.keep) == ("/script", False, "500", 7)
    assert USUAL.against_script(said) == ""
    assert USUAL.with_script(None) == USUAL and USUAL.against_script(None) == ""
    assert CheckpointSettings().with_script(Checkpoints.of(Path("/script"))).uri == "/script"


def test_what_the_command_was_given_holds_also_if_it_is_the_usual() -> None:
    told = CheckpointSettings(uri="/command", keep=3, given=("uri", "keep"))
    said = Checkpoints.of(Checkpoints("/script", every="10min", keep=7))
    found = told.with_script(said)
    assert (found.uri, found.every, found.keep) == ("/command", "10min", 3)
    assert told.against_script(said).endswith("--checkpoint /command, not /script; --keep 3, not 7")
    assert told.against_script(Checkpoints.of(Checkpoints("/command", keep=3))) == ""


def test_nowhere_is_a_place_too() -> None:
    nowhere = CheckpointSettings(uri="none", given=("uri",)).placed(Path("/runs/mine"), alone=True)
    assert nowhere.with_script(Checkpoints.of("/script")).uri == ""
    assert nowhere.against_script(Checkpoints.of("/script")).endswith("--checkpoint none, not /script")
    assert nowhere.against_script(Checkpoints.of("none")) == ""
    assert USUAL.with_script(Checkpoints.of("none")).uri == ""


def test_what_was_given_survives_the_way_to_a_worker_and_into_the_command() -> None:
    told = CheckpointSettings(keep=3, every="500", given=("every", "keep"))
    assert CheckpointSettings.decode(told.encode()) == told
    assert told.words() == ["--save-every", "500", "--keep", "3"]
    assert CheckpointSettings(keep=4).words() == ["--keep", "4"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "checkpoint is an int, not a place"),
        (b"/place", "checkpoint is a bytes, not a place"),
        (Checkpoints("/place", keep=0), "keep is 0, but must be from 1 to 1000000"),
        (Checkpoints("/place", keep=2.0), "keep is 2.0, which is not a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_place(given: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Checkpoints.of(given)  # type: ignore[arg-type]
    assert refused.value.message == sentence and refused.value.hint
