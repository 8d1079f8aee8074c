"""Hints name what exists: every option, command and extra in a string of the source, and settings in words."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast.cli.main import _parser
from holdfast.core.config import RunConfig
from holdfast.core.setting_words import setting_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for path in sorted((ROOT / "src" / "holdfast").rglob("*.py")) if "testing" not in path.parts]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
COMMAND = re.compile(r"`holdfast ((?:[a-z][a-z-]* ?)+)")
EXTRA = re.compile(r"holdfast\[([a-z0-9,]+)\]")
OTHERS = {  # options of other programs, and what people type for ours
    "cli/parser.py": "*",
    "agent/hosts/etcd_member.py": "*",
    "agent/hosts/etcd_cluster.py": "*",
    "drills/ground.py": "*",
    "agent/workers/stacks.py": "*",
    "drills/report.py": "*",  # colours of the page
    "drills/plots.py": "*",
    "integrations/variables/one_thread.py": "*",  # XLA's
    "integrations/kubernetes/manifest.py": "*",  # etcd's and kubectl's
    "integrations/kubernetes/containerfile.py": "*",
    "integrations/slurm/step.py": "*",  # srun's
    "horovod/meeting_place.py": "*",  # of the process that starts a data service, as Horovod has them
    "horovod/tensorflow/data/compute_worker.py": "*",
    "placement/ledger_served.py": "*",  # of a process that no person starts
}


@cache
def parsers() -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """By the words of the command: (), (run,), (checkpoint, ls), …"""

    def walk(
        words: tuple[str, ...], parser: argparse.ArgumentParser
    ) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
        yield words, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    yield from walk((*words, name), child)

    return dict(walk((), _parser()))


@cache
def options() -> frozenset[str]:
    return frozenset(option for parser in parsers().values() for option in parser._option_string_actions)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a file but docstrings, with what an f-string leaves open as a space."""
    module = ast.parse(path.read_text())
    passed = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                passed.add(id(first.value))
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else " " for part in node.values]
            passed.update(map(id, node.values))
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.lineno, node.value


def unknown_commands(text: str) -> Iterator[str]:
    for words in COMMAND.findall(text):
        known: tuple[str, ...] = ()
        for word in words.split():
            if (*known, word) in parsers():
                known = (*known, word)
            elif len(known) < 1 or any(len(other) > len(known) and other[: len(known)] == known for other in parsers()):
                yield f"holdfast {words}"
                break
            else:
                break  # a RUN, or whatever else it takes


def test_every_option_and_command_in_a_string_exists() -> None:
    wrong = []
    for path in SOURCES:
        name = str(path.relative_to(ROOT / "src" / "holdfast"))
        for line, text in strings(path):
            if OTHERS.get(name) != "*":
                wrong += [f"{name}:{line}: {option}" for option in OPTION.findall(text) if option not in options()]
            wrong += [f"{name}:{line}: {command}" for command in unknown_commands(text)]
    assert wrong == []


def test_the_walk_finds_what_is_wrong(tmp_path: Path) -> None:
    """Or the test above would pass whatever the source says."""
    source = tmp_path / "x.py"
    source.write_text('"""--not-looked-at"""\nhint = f"add --frobnicate {1} or `holdfast fly {2}`" "--workers"\n')
    found = [text for _, text in strings(source)]
    assert [option for text in found for option in OPTION.findall(text)] == ["--frobnicate", "--workers"]
    assert [command for text in found for command in unknown_commands(text)] == ["holdfast fly "]
    assert list(unknown_commands("`holdfast checkpoint ls` `holdfast status r` `holdfast checkpoint fly x`")) == [
        "holdfast checkpoint fly x"
    ]


def test_options_and_values_in_hints_are_of_the_same_command() -> None:
    """`holdfast rm --checkpoints`: an option that a named command has not is as bad as one that nobody has."""
    wrong = []
    for path in SOURCES:
        for line, text in strings(path):
            for words, rest in re.findall(r"`holdfast ((?:[a-z][a-z-]* )*)([^`]*)`", text):
                known = tuple(words.split())
                while known and known not in parsers():
                    known = known[:-1]
                taken = parsers()[known]._option_string_actions
                if known and known[0] not in ("run", "drill"):  # which take a script's words
                    wrong += [f"{path.name}:{line}: {option}" for option in OPTION.findall(rest) if option not in taken]
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_extra_and_command_in_the_pages_exists(path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = path.read_text()
    named = {extra for found in EXTRA.findall(text) for extra in found.split(",")}
    assert sorted(named - extras.keys()) == []
    assert list(unknown_commands(re.sub(r"`holdfast [a-z]+ …", "", text))) == []


def test_every_extra_has_its_line_in_the_installation_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert [extra for extra in extras if f"| `holdfast[{extra}]` |" not in text] == []


def test_every_extra_in_a_string_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in SOURCES:
        for line, text in strings(path):
            for found in EXTRA.findall(text):
                assert set(found.split(",")) <= extras.keys(), f"{path.name}:{line}"


def test_settings_are_told_in_words() -> None:
    """`this worker has length=1437` is nothing that anybody wrote."""
    config = RunConfig(batch_size=16, shards=2, length=1437, parameters=80)
    with pytest.raises(
        ValueError, match="this worker has a dataset of 1437 samples, but the run has a dataset of 8 samples"
    ):
        config.check_same(RunConfig(batch_size=16, shards=2, length=8, parameters=80).encode())
    assert setting_words("batch_size", 16) == "batch_size=16"  # as it stands in the script
    assert setting_words("threads", 2) == "threads=2"
    assert setting_words("checkpoint", "") == "no checkpoints"
    for name in ("length", "parameters", "order_seed", "path", "outage_s", "checkpoint", "audit", "audit_every"):
        assert "=" not in setting_words(name, getattr(config, name))
