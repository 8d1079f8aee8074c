"""Options are declared once: a value survives the way over a word, and what is wrong is named."""

from __future__ import annotations

import inspect
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.settings import RunSettings, describe
from holdfast.cli.main import main
from holdfast.core.config import RunConfig
from holdfast.core.durations import parse_duration, spell_duration
from holdfast.core.errors import ConfigError
from holdfast.core.options.declaring import Option, option_of, options_of, parse_options
from holdfast.core.options.kinds import ON, Duration, Fraction, Switch, Whole
from holdfast.core.options.run import GROUPS, RUN_OPTIONS, WorkerOptions
from holdfast.detection.progress import Limits
from holdfast.engine.api.joining import join
from holdfast.engine.transfer.checkpointing import _NO_BITS
from holdfast.placement.environment import WorkerEnvironment

DECLARED = [option for settings in RUN_OPTIONS for option in options_of(settings)]
OTHERS: dict[str, Any] = {  # a value that is not the default
    "--run": "first",
    "--start": "cold",
    "--path": "network",
    "--durable": "disk",
    "--numerics": "warn",
    "--rebalance": "off",
    "--metrics": "127.0.0.1:9000",
    "--dashboard": 0,
    "--tensorboard": "curves",
    "--ledger": "etcd://127.0.0.1:2379",
    "--keys": "/keys",
    "--host": "alpha",
    "--listen": "127.0.0.1:7000-7100",
    "--advertise": "10.0.0.1",
    "--checkpoint": "/somewhere",
    "--save-every": "500",
    "--keep-best": "loss:min",
    "--memory": "plain",
    "--horovod": "on",
    "--devices": "2",
}


def another(option: Option) -> Any:
    if option.flag in OTHERS:
        return OTHERS[option.flag]
    assert isinstance(option.kind, Whole | Fraction | Duration)
    return option.kind.high if isinstance(option.kind, Whole) else option.kind.low * 2 or option.kind.high


def test_each_has_one_flag_one_name_and_a_group() -> None:
    assert len({option.flag for option in DECLARED}) == len({option.setting for option in DECLARED}) == len(DECLARED)
    for option in DECLARED:
        assert option.group in GROUPS and option.help and not option.help.endswith(".")
        assert option.metavar or option.flag in (
            "--start",
            "--path",
            "--numerics",
            "--durable",
            "--horovod",
            "--rebalance",
        )


@pytest.mark.parametrize("option", DECLARED, ids=lambda option: option.flag)
def test_a_value_survives_the_way_over_a_word(option: Option) -> None:
    value = another(option)
    option.check(value)
    flag, *word = option.words(value)
    assert flag == option.flag and option.parse(word[0] if word else ON) == value
    assert bool(word) != isinstance(option.kind, Switch)
    assert option.words(option.default) == []


@given(st.floats(0.001, 9e8))
def test_durations_are_read_as_they_are_written(seconds: float) -> None:
    rounded = round(seconds, 3)
    assert parse_duration("", spell_duration(rounded)) == pytest.approx(rounded, abs=1e-9)


@pytest.mark.parametrize(
    ("setting", "word", "sentence"),
    [
        ("audit_every", "2.0", "--audit-every is '2.0', which is not a whole number"),
        ("audit_every", "-1", "--audit-every is -1, but must be from 0 to 1000000"),
        ("audit", "half", "--audit is 'half', which is not a number"),
        ("audit", "nan", "--audit is nan, but must be from 0 to 1"),
        ("lease_s", "none", "--lease is 'none', which is not a time"),
        ("lease_s", "100ms", "--lease is 0.1 s, but must be from 0.2s to 1h"),
        ("late_after_s", "0", "--late-after is 0 s, but must be from 0.1s to 7d"),
        ("path", "pigeon", "--path is 'pigeon'"),
    ],
)
def test_what_is_wrong_is_named(setting: str, word: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        option_of(WorkerOptions, setting).parse(word)
    assert refused.value.message == sentence and refused.value.hint


def test_the_command_that_takes_a_run_over_gives_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is declared is in it, and the command line reads it back."""
    script = tmp_path / "train.py"
    script.write_text("")
    given = {option.flag: option.kind.spell(another(option)) for option in DECLARED}
    apart = ("--ledger", "--host", "--advertise", "--keys", "--ranks")  # they need hosts, or go with few others
    plain = [flag for flag in given if flag not in (*apart, "--workers", "--spares")]  # the spares must leave room
    switches = [option.flag for option in DECLARED if isinstance(option.kind, Switch)]
    words = [word for flag in plain for word in ((flag,) if flag in switches else (flag, given[flag]))]
    started: list[RunSettings] = []
    monkeypatch.setattr("holdfast.agent.starting.run_agent", lambda settings, home: started.append(settings) or 0)
    monkeypatch.setattr("holdfast.cli.main._shown_beside", lambda *_: ())
    options = ["--workers", "3", "--spares", "2", "--dir", str(tmp_path)]
    assert main(["run", *options, *words, str(script), "--epochs", "3"]) == 0
    assert main(["run", "--workers", "2", "--ranks", "4", "--dir", str(tmp_path), str(script)]) == 0
    for settings in tuple(started):
        command = describe(settings, tmp_path, tmp_path)["command"]
        assert main(shlex.split(command)[1:]) == 0
    assert started[:2] == started[2:] and started[1].ranks == 4
    for option in DECLARED:
        settings = started[0].checkpoint if hasattr(started[0].checkpoint, option.setting) else started[0]
        assert option.flag in apart or getattr(settings, option.setting) != option.default


def test_a_worker_is_told_every_option_of_its_own() -> None:
    options = {option.setting: another(option) for option in options_of(WorkerOptions)}
    told = WorkerEnvironment(run_dir=Path("/r"), worker="w0.1", socket_dir=Path("/s"), checkpoint="{}", **options)
    assert WorkerEnvironment.from_variables(told.to_variables()) == told
    for name in told.to_variables():
        if name != "HOLDFAST_RUN_DIR":
            with pytest.raises(ConfigError, match=name):
                WorkerEnvironment.from_variables({key: v for key, v in told.to_variables().items() if key != name})
    assert WorkerEnvironment.from_variables({}) is None


def test_no_option_decides_bits_and_no_argument_is_an_option() -> None:
    """What decides numbers is an argument of join, what is operation an option: each is in one place."""
    arguments = set(inspect.signature(join).parameters)
    for option in DECLARED:
        assert option.setting not in {one.name for one in fields(RunConfig)} - set(_NO_BITS), option.flag
        assert option.setting not in arguments, option.flag


def test_the_usual_patience_is_the_detectors() -> None:
    usual = RunSettings(workers=1, script="train.py")
    assert (usual.stuck_after_s, usual.hang_after_s) == (Limits().stuck_s, Limits().hang_s)


def test_what_several_options_must_be_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    settings = RunSettings(name="r", workers=1000, script=str(tmp_path / "train.py"))
    settings.validate()
    with pytest.raises(ConfigError, match="--spares is 25, but must be from 0 to 24"):
        replace(settings, spares=25).validate()
    with pytest.raises(ConfigError, match="--listen is for the network path"):
        replace(settings, listen="127.0.0.1", path="shared-memory").validate()
    assert parse_options(WorkerOptions, {"--audit-every": "3", "--keep": "5"}) == {"audit_every": 3}
