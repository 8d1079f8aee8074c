"""House rules that a linter does not know: sizes a person can hold in mind, whole words, no pickle, no leftovers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "holdfast").rglob("*.py"))
FILE_LINES_MAX = 480  # about 400 is the aim; the machine and the agent are the largest rooms
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 10
JOINING = "joining.py:join"  # one call with every argument of the library, most of it the signature
PICKLES = {
    "data/by_value.py",  # from a worker's own loader processes, as everything that torch's queue brings from them
    "engine/ranks/link.py",  # between the ranks of a group, which have forked each other
    "horovod/objects.py",  # broadcast_object(..., allow_pickle=True): at a script's request, from its own run
}
CONVERSIONS = {("exporting.py", "save"), ("importing.py", "load")}  # other programs' files, at a person's request
MORE_FIELDS = {  # of a dataclass, without which it cannot be made
    ("agent/agent.py", "Parts"): "the parts of an agent, by name: agent/starting.py builds them",
    ("byzantine/privacy/client.py", "KeptSecrets"): "written to a client's memory and read back, never called by hand",
    ("placement/server_environment.py", "ServerEnvironment"): "one environment variable each",
}
IMPORTS_MAX = 20  # modules of our own
MORE_IMPORTS = {  # a file that puts parts together names each of them once; everything else knows few
    "agent/agent.py": "its loop hands each message to the part that it is for",
    "agent/starting.py": "it builds every part of an agent and hands each what it needs",
    "cli/main.py": "it names the module of every command, and imports the one that is called",
    "engine/api/joining.py": "holdfast.join checks every argument and puts the run together from them",
    "engine/api/run.py": "the user's run: each of its methods is one call of another part",
    "engine/building.py": "it builds every part of a worker",
    "engine/place.py": "it opens every line of a worker to its run, and its places for checkpoints",
    "engine/transfer/checkpointing.py": "it brings storage, hosts' memory, the ledger and the saver together",
    "horovod/world/lines.py": "it opens every line that a rank has to its run",
    "engine/worker.py": "it performs every effect of the machine with the part that can",
}
NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|common|misc)($|_)")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_file_is_in_order(path: Path) -> None:
    text = path.read_text()
    module = parse(path)
    assert ast.get_docstring(module), "a module's docstring says its role"
    assert text.count("\n") <= FILE_LINES_MAX, "this room is crowded: rebuild it"
    assert not NAMES.search(path.stem), "a name from the vocabulary, please"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = FUNCTION_LINES_MAX + (20 if f"{path.name}:{node.name}" == JOINING else 0)
            assert lines <= limit, f"{node.name} has {lines} lines"
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            few = len(set(given) - {"self", "cls"}) <= PARAMETERS_MAX or f"{path.name}:{node.name}" == JOINING
            assert few, f"{node.name} takes {len(given)} parameters: give it settings and ports"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            pickles = {"pickle", "cPickle", "dill", "marshal", "shelve"} & {name.split(".")[0] for name in names}
            assert not pickles or str(path.relative_to(ROOT / "src" / "holdfast")) in PICKLES
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            at = (path.name, node.attr)
            assert node.attr not in ("load", "save") or at in CONVERSIONS, "nothing is unpickled"


def names_of_modes() -> re.Pattern[str]:
    """The class of each mode, its package, its adjective, and a word that only one of them has."""
    from holdfast import _HOMES

    homes = {home: name for name, home in _HOMES.items() if home.startswith("holdfast.modes.")}
    packages = [path.parent.name for path in (ROOT / "src" / "holdfast" / "modes").glob("*/__init__.py")]
    assert {f"holdfast.modes.{name}" for name in packages} == homes.keys(), "a mode has a package and a public name"
    words = [*homes.values(), r"[Ee]lastic", "ELASTIC", r"[Qq]uorum"]
    words += [rf"modes[./]{name}" for name in packages] + [rf"{name} mode" for name in (*packages, "async")]
    return re.compile(rf"\b({'|'.join(words)})\b")


def test_no_file_outside_of_modes_names_a_mode() -> None:
    """What a mode does otherwise is behind modes/port.py. The public names are the one place that lists modes.

    Horovod has a word of its own in common with one of them.
    """
    package, pattern = ROOT / "src" / "holdfast", names_of_modes()
    rooms = {package / "modes", package / "horovod"}
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".js", ".html", ".css", ".proto", ".c")]
    outside = [path for path in files if not rooms & {*path.parents} and path != package / "__init__.py"]
    named = [str(path.relative_to(package)) for path in outside if pattern.search(path.read_text())]
    assert not named


@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(mode, Elastic):",
        "if mode.words().startswith('Exact('):",
        "from holdfast.modes.asynchronous.pacing import Pacing",
        "mode=holdfast.Async()",
        "# in the exact mode every step is whole",
        "quorum = settings.quorum",
    ],
)
def test_a_line_that_names_a_mode_is_found(line: str) -> None:
    assert names_of_modes().search(line)


def test_what_a_dataclass_must_be_given_is_little() -> None:
    package, many = ROOT / "src" / "holdfast", set()
    for path in SOURCES:
        classes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
        for cls in (one for one in classes if any("dataclass" in ast.unparse(mark) for mark in one.decorator_list)):
            needed = [node for node in cls.body if isinstance(node, ast.AnnAssign) and node.value is None]
            needed = [node for node in needed if "ClassVar" not in ast.unparse(node.annotation)]
            if len(needed) > PARAMETERS_MAX:
                many.add((str(path.relative_to(package)), cls.name))
    assert many == MORE_FIELDS.keys()


def test_a_file_knows_few_others() -> None:
    package = ROOT / "src" / "holdfast"
    counted = {str(path.relative_to(package)): len(own_imports(path)) for path in SOURCES}
    many = {name: count for name, count in counted.items() if count > IMPORTS_MAX}
    assert many.keys() <= MORE_IMPORTS.keys(), f"a file that knows so many others does too much: {many}"
    assert MORE_IMPORTS.keys() <= many.keys(), "an exception that is none any more"


def own_imports(path: Path) -> set[str]:
    """The modules of the package that this file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("holdfast.")}
        elif isinstance(node, ast.ImportFrom) and (module := node.module or "").split(".")[0] == "holdfast":
            room = ROOT / "src" / Path(*module.split("."))
            are_modules = {alias.name: (room / alias.name).with_suffix(".py").exists() for alias in node.names}
            found |= {f"{module}.{name}" if is_module else module for name, is_module in are_modules.items()}
    return found


def test_what_is_imported_from_torchs_own_files_is_data() -> None:
    """The one torch.load, for `holdfast checkpoint import`, builds tensors and plain values and nothing else."""
    module = parse(ROOT / "src" / "holdfast" / "checkpoint" / "converting" / "importing.py")
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert len(calls) == 1
    assert ("weights_only", "True") in {(word.arg, ast.unparse(word.value)) for word in calls[0].keywords}


def test_the_public_names() -> None:
    import holdfast

    errors, classes = (
        {"ConfigError", "Evicted", "HoldfastError", "Stopped"},
        {"Async", "Checkpoints", "Elastic", "EmbeddingTable", "Exact", "Group", "Run", "Step"},
    )
    expected = errors | classes | {"__version__", "clip_grad_norm_", "group", "join", "launch"}
    assert set(holdfast.__all__) == expected
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    with pytest.raises(AttributeError):
        holdfast.nothing  # noqa: B018


def test_the_command_line_starts_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, holdfast.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
