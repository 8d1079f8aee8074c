"""`holdfast keys`: what it makes, what it says, and what it never says."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.trust.keys import PRIVATE_KEY, SECRET, load_keys


def said_nothing_secret(directory: Path, text: str) -> bool:
    secrets = [(directory / SECRET).read_text().strip(), *(directory / PRIVATE_KEY).read_text().splitlines()[1:-1]]
    return all(secret not in text for secret in secrets)


def test_create_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "a run's keys"
    assert main(["keys", "create", str(directory)]) == 0
    created = capsys.readouterr().out
    assert main(["keys", "show", str(directory)]) == 0
    shown = capsys.readouterr().out
    for text in (created, shown):
        assert load_keys(directory).fingerprint in text
        assert "valid until  20" in text
        assert said_nothing_secret(directory, text)
    assert f"scp -rp '{tmp_path}/a run'\"'\"'s keys' HOST:{tmp_path}/" in created
    assert f"--keys '{tmp_path}/a run'\"'\"'s keys'" in created


def test_refusals_have_one_sentence_a_hint_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    assert main(["keys", "create", str(directory)]) == 0
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    for arguments in (
        ["create", str(directory)],
        ["create", str(tmp_path / "file" / "keys")],
        ["show", str(tmp_path / "none")],
        ["show", str(tmp_path / "file")],
        ["create"],
        ["forge", str(directory)],
        [],
    ):
        assert main(["keys", *arguments]) == 2
        sentence, hint = capsys.readouterr().err.splitlines()
        assert sentence.startswith("holdfast: ") and hint.startswith("  hint: ")
