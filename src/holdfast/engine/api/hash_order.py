"""Says when a script that no agent has started goes through sets in an order that other processes do not share.

Workers of a run have `PYTHONHASHSEED=0`. `python train.py` has hashes of its own in every process, and when a script
has begun it is too late to change that: so it is said, if the script's text has a set or calls hash. Owns nothing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SENTENCE = (
    "holdfast: line {} of {} uses {}, whose order of strings is another in every process\n"
    "  hint: start it as PYTHONHASHSEED=0 {} {}, as `holdfast run` does, to get the same bits"
)


def say_where_order_is_chance(launcher: str = "") -> None:
    """One sentence on stderr, for processes that were not started with a fixed hash seed, by whatever but an agent."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not sys.flags.hash_randomization or path is None or not str(path).endswith(".py"):
        return
    try:
        found = first_use(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return
    if found is not None:
        name = Path(path).name
        print(SENTENCE.format(found[0], name, found[1], launcher or "python", name), file=sys.stderr)


def first_use(text: str) -> tuple[int, str] | None:
    """The first line that makes a set or takes a hash, and what it does."""
    uses = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.SetComp) or (isinstance(node, ast.Set) and not _has_only_numbers(node)):
            uses.append((node.lineno, "a set"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("set", "frozenset"):
                uses.append((node.lineno, "a set"))
            elif node.func.id == "hash":
                uses.append((node.lineno, "hash()"))
    return min(uses, default=None)


def _has_only_numbers(node: ast.Set) -> bool:
    """Their hashes are the same in every process."""
    return all(isinstance(one, ast.Constant) and isinstance(one.value, int | float) for one in node.elts)
