"""What a drill suspects when it breaks after a worker came: state that did not travel, and in which lines. Pure.

Who joins is given the model, the optimizer and join's `extras`. What else a script changes while it trains, a joiner
has as it was at the start. Such lines are found by reading the script: names that were there before the loop over
steps, that the loop changes, and that `join` was not given.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SOON = 3  # steps: what differs so soon after somebody came has to do with it
LINES_MAX = 5
LINE_MAX = 80
_LOOPS = ("steps", "epochs")
_CHANGES = frozenset(
    (
        *("add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "push", "put", "remove"),
        *("accumulate", "discard", "observe", "reset", "setdefault", "step", "update", "update_parameters"),
    )
)
_GENERATORS = ("Generator", "default_rng", "Random", "RandomState")
_CLOCKS = ("time", "monotonic", "perf_counter", "now", "today", "urandom", "getpid")


@dataclass(frozen=True)
class Came:
    """A worker that joined, or a run that resumed (worker ""), at `step`."""

    worker: str
    step: int


def who_came_before(step: int, differ: Sequence[str], events: Sequence[Mapping[str, Any]]) -> Came | None:
    """Whose coming goes before the first difference: one of those that differ, else whoever came just then."""
    joined = [Came(str(one["who"]), int(one["step"])) for one in events if one["kind"] == "joined"]
    resumed = [Came("", int(one["step"])) for one in events if one["kind"] == "resumed"]
    theirs = [came for came in joined if came.worker in differ and came.step <= step]
    just_then = [came for came in (*joined, *resumed) if step - SOON <= came.step <= step]
    return max(theirs or just_then, key=lambda came: came.step, default=None)


def sentence(came: Came, step: int, lines: Sequence[str]) -> str:
    """What is suspected, and where to look."""
    later = step - came.step
    when = "in the first step" if not later else f"{later} step{'s' * (later > 1)}"
    who = f"{came.worker} joined" if came.worker else "the run resumed from a checkpoint"
    text = (
        f"that is {when} after {who} at step {came.step}, so state that changes during training did not travel: it has "
        "to be in the model, in the optimizer or in join's extras"
    )
    return f"{text}; look at {', '.join(lines)}" if lines else text


def lines_to_look_at(source: str, name: str) -> list[str]:
    """`train.py:31 (scale *= 0.99)`, for each line of the script that may change state which does not travel."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    script = _Script(tree)
    written = source.splitlines()
    numbers = sorted({number for loop in script.loops for number in script.changes(loop)})
    found = []
    for number in numbers[:LINES_MAX]:
        text = written[number - 1].strip()
        found.append(f"{name}:{number} ({text if len(text) <= LINE_MAX else text[:LINE_MAX] + '…'})")
    return found


class _Script:
    """What a script's names are."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        joins = [node for node in nodes if isinstance(node, ast.Call) and _called(node) == "join"]
        self.loops = [
            node
            for node in nodes
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _called(node.iter) in _LOOPS
        ]
        inside = {id(node) for loop in self.loops for node in ast.walk(loop)}
        outside = [node for node in nodes if id(node) not in inside]
        self._known = {node.id for join in joins for node in ast.walk(join) if isinstance(node, ast.Name)}
        self._before = set(_assigned(outside))
        self._before |= {node.arg for node in outside if isinstance(node, ast.arg)}
        self._generators: set[str] = set()
        for node in outside:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                if _called(node.value) == "join":
                    self._known |= set(_assigned([node]))
                if any(isinstance(one, ast.Call) and _called(one) in _GENERATORS for one in ast.walk(node.value)):
                    self._generators |= set(_assigned([node]))
        for node in nodes:  # modules and functions are the same everywhere
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}

    def changes(self, loop: ast.For) -> Iterator[int]:
        for node in (inner for statement in loop.body for inner in ast.walk(statement)):
            if isinstance(node, ast.AugAssign | ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(self._is_kept(target) for target in targets):
                    yield node.lineno
            elif isinstance(node, ast.Call):
                function, name = node.func, _called(node)
                changes = isinstance(function, ast.Attribute) and name in _CHANGES and self._is_kept(function.value)
                if changes or (name in _CLOCKS and not node.args):
                    yield node.lineno
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self._generators:
                yield node.lineno

    def _is_kept(self, target: ast.expr) -> bool:
        """Whether it is, or is in, something from before the loop that join was not given."""
        if isinstance(target, ast.Tuple | ast.List):
            return any(self._is_kept(one) for one in target.elts)
        while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
            target = target.value
        return isinstance(target, ast.Name) and target.id in self._before and target.id not in self._known


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _assigned(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
