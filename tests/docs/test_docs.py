"""The written side keeps up with the code: the diagram, links, code, names of errors, events, keys and options."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from holdfast.core import errors, words
from holdfast.core.events import KINDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
COMMANDS = ("run", "status", "events", "logs", "rm", "top", "dashboard", "scale", "stop", "runs", "drill", "check")


def page(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def anchors(path: Path) -> frozenset[str]:
    """The names that headings get on the usual hosts."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("drawing", ["draw_phases", "draw_options"])
def test_what_is_drawn_is_that_of_the_code(drawing: str) -> None:
    done = subprocess.run(
        [sys.executable, f"scripts/{drawing}.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.relative_to(ROOT)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{path.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_the_pages_compiles(path: Path) -> None:
    for number, (indent, code) in enumerate(PYTHON.findall(path.read_text())):
        text = "\n".join(line.removeprefix(indent) for line in code.splitlines())
        compile(text, f"{path.name}, block {number}", "exec")


def test_there_are_pages_and_the_loop_is_in_the_readme() -> None:
    assert len(PAGES) > 20
    blocks = "".join(code for _, code in PYTHON.findall(page("README.md")))
    assert "holdfast.join(" in blocks and "for step in run.steps(" in blocks and "step.record(" in blocks


def test_every_error_has_its_line() -> None:
    text = page("docs/reference/errors.md")
    names = [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_event_has_its_line_and_its_fields() -> None:
    text = page("docs/reference/events.md")
    for kind, fields in KINDS.items():
        row = re.search(rf"^\| `{kind}` \|.*$", text, re.MULTILINE)
        assert row, kind
        assert [field for field in fields if f"`{field}`" not in row[0]] == [], kind


def test_every_ledger_key_has_its_line() -> None:
    text = page("docs/reference/ledger-keys.md")
    keys = [value for name, value in vars(words).items() if name.startswith("KEY_")]
    assert keys and [key for key in keys if f"| `{key}" not in text] == []


def test_every_argument_of_join_has_its_line() -> None:
    from holdfast import join

    text = page("docs/reference/python.md")
    assert [name for name in inspect.signature(join).parameters if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_its_line(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    section = page("docs/reference/cli.md").partition(f"## holdfast {command}\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z]+", done.stdout.partition("options:")[2])) - {"--help"}
    assert done.returncode == 0 and section
    assert [option for option in sorted(options) if f"`{option}" not in section] == []


def test_the_layers_of_the_architecture_are_the_linters() -> None:
    declared = page("pyproject.toml").partition("\nlayers = [")[2].partition("]")[0]
    layers = " > ".join(re.findall(r'"(.+?)"', declared.replace("holdfast.", "")))
    assert layers.count(">") > 10
    found = re.findall(r"^[a-z_ :]+(?: > [a-z_ :]+)+$", page("ARCHITECTURE.md"), re.MULTILINE)
    assert found == [layers]


def test_the_map_has_every_room_and_no_file_that_is_not_there() -> None:
    package = ROOT / "src" / "holdfast"
    the_map = page("ARCHITECTURE.md").partition("## The map")[2].partition("## Processes")[0]
    rooms = [path.parent.relative_to(package) for path in package.rglob("__init__.py") if path.parent != package]
    assert [str(room) for room in rooms if f"{room.name}/" not in the_map] == []
    there = {path.name for path in (ROOT / "src").rglob("*.py")}
    assert sorted(set(re.findall(r"\b\w+\.py\b", the_map)) - there) == []


def test_the_life_of_a_step_is_told_in_few_files() -> None:
    life = page("ARCHITECTURE.md").partition("## The life of a step\n")[2].partition("\n## ")[0]
    files = set(re.findall(r"`([\w/]+\.py)`", life))
    assert 5 <= len(files) <= 15
    assert sorted(name for name in files if not (ROOT / "src" / "holdfast" / name).exists()) == []


@cache
def members() -> dict[str, set[str]]:
    """What each class of the package has, by the class's name."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "holdfast").rglob("*.py"):
        for cls in (one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ClassDef)):
            names = found.setdefault(cls.name, set())
            for node in ast.walk(cls):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute):
                    names.add(node.attr)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
                elif isinstance(node, ast.Assign):
                    names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.parent.name != "decisions" and path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_methods_and_files_that_pages_name_are_there(path: Path) -> None:
    text = path.read_text()
    named = [(cls, name) for cls, name in re.findall(r"`([A-Z]\w+)\.(\w+)[`(]", text) if cls in members()]
    assert [f"{cls}.{name}" for cls, name in named if name not in members()[cls]] == []
    files = [name for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text) if not name.startswith("holdfast/")]
    roots = (ROOT, ROOT / "src", ROOT / "src" / "holdfast", ROOT / "examples" / "flower", path.parent)
    rooms = [one for one in (ROOT / "src" / "holdfast").rglob("*") if one.is_dir()]
    assert [name for name in files if not any((root / name).exists() for root in (*roots, *rooms))] == []


def test_what_a_mode_can_answer_is_on_the_page_that_adds_one() -> None:
    from holdfast.modes.port import Mode

    text = page("docs/how-to/add-a-mode.md").partition("\n## One that")[0]
    answers = {name for name in vars(Mode) if not name.startswith("_")} - {"words"}
    assert sorted(name for name in answers if not re.search(rf"`{name}[`(]", text)) == []
