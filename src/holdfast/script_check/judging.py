"""What two processes of a check wrote down, compared: the first that differs, and what is likely behind it. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.drills.suspicion import lines_to_look_at
from holdfast.membership.suspecting import (
    BACKWARD_INSIDE,
    EVERYWHERE,
    NOT_TRAVELLED,
    SAME_BITS,
    Details,
    advice,
    differing,
)
from holdfast.script_check.notes import (
    AGAIN,
    BATCH,
    FETCH,
    JOIN,
    MEAN,
    ORDER,
    RESTORE,
    SHARD,
    STATE,
    Found,
    Noted,
    Words,
)

AROUND_MAX = 3
LINES_MAX = 5
BEGAN, CAME = "the process that began", "the one that joined"
IN_A_MODULE = "make it a buffer with register_buffer, so that it travels with the model, or put it into join's extras"
DATASET = (
    "a sample must be the same whenever it is fetched: in the dataset and collate_fn draw from torch's, NumPy's or "
    "Python's own generators, which are seeded for each shard, and keep nothing from one sample to the next"
)
SAME_DATA = (
    "every process must build the same dataset, and give the same sample for the same number: seed before what is "
    "drawn at random, such as with torch.manual_seed, and sort the names of files"
)
OURS = "this is a mistake in Holdfast and not in the script: please report it with the script"
IN_A_SHARD = (
    "only the worker that computes the shard does this: change parameters and the form of gradients after the loop "
    "over the shards, on every worker"
)
LEAKS = (
    "a shard must not depend on the one that was computed before it: look for what one leaves behind for the next, in "
    "a variable, an attribute or a cache; what the model learns from batches belongs into buffers"
)
_CLOCKS = {
    *("time.time", "time.time_ns", "time.monotonic", "time.perf_counter", "time.process_time", "datetime.now"),
    *("datetime.datetime.now", "perf_counter", "monotonic", "os.urandom", "os.getpid", "uuid.uuid4"),
}
_GENERATORS = {"Generator", "default_rng", "RandomState", "Random", "SystemRandom"}


@dataclass(frozen=True)
class CheckVerdict:
    """`found`: what differs; None: nothing does."""

    shards: int
    steps: int
    checks: tuple[str, ...]
    found: Found | None = None
    sentence: str = ""
    around: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    hint: str = ""
    left_out: str = ""  # what was not checked, and why
    tables: tuple[str, ...] = ()  # whose rows were left as they are

    def text(self) -> str:
        if self.found is None:
            steps = f"{self.steps} step{'s' * (self.steps != 1)}"
            said = f"exact in {self.shards} shards of {steps}: {', '.join(self.checks)}"
            said = f"{said} ({self.left_out})" if self.left_out else said
            return f"{said}; {_of_tables(self.tables)}" if self.tables else said
        parts = [f"not exact: {self.sentence}"]
        if self.around:
            parts.append(f"  what else differs: {', '.join(self.around)}")
        if self.lines:
            parts.append(f"  look at {', '.join(self.lines)}")
        return "\n".join([*parts, f"  hint: {self.hint}"])


def _of_tables(names: Sequence[str]) -> str:
    """What a script with tables is told: the dense part was compared, and rows are another matter."""
    whose = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"that is the dense part, with the rows of {whose} left as they are: rows that several workers train depend on "
        "whose update comes first, so they are not exact by design (docs/how-to/embedding-tables.md)"
    )


@dataclass(frozen=True)
class Script:
    """Its text, to name lines of it."""

    name: str = ""
    source: str = ""

    def lines(self, names: Sequence[str] = ()) -> tuple[str, ...]:
        """Lines that may be behind a difference; if there are some, those with one of the names."""
        found = [*lines_to_look_at(self.source, self.name), *_told(self.source, self.name, _clocks_and_generators)]
        changed = _told(self.source, self.name, lambda tree: _changes_of(tree, names))
        named = [line for line in found if any(name in line.partition("(")[2] for name in names)]
        chosen = dict.fromkeys([*changed, *named] or [*found, *_told(self.source, self.name, _sets)])
        return tuple(sorted(chosen, key=lambda line: int(line.partition(" ")[0].rpartition(":")[2]))[:LINES_MAX])


def judge(first: Noted, joiner: Noted, script: Script) -> CheckVerdict:
    if first.found is not None:
        return _of_the_first(first, first.found, script)
    common = sorted(first.shards.keys() & joiner.shards.keys())
    found = _difference(first, joiner)
    checks = (FETCH, ORDER, RESTORE, *([JOIN] if common else []))
    shards = max((len(shards) for shards in first.shards.values()), default=0) * first.steps
    if found is None:
        return CheckVerdict(shards, first.steps, checks, tables=first.tables)
    around, names = _suspects(first, joiner, found.step)
    when = f"{'in' if found.shard >= 0 else 'after'} {_place(found)}"
    sentence = f"{found.what}{_and_more(found)} {when} differs in a process that joined the run: {found.clue}"
    return CheckVerdict(
        shards,
        first.steps,
        checks,
        found,
        sentence,
        tuple(around[:AROUND_MAX]),
        script.lines(names),
        _hint(found, around, first, joiner),
    )


def _of_the_first(first: Noted, found: Found, script: Script) -> CheckVerdict:
    where = f"{found.what}{_and_more(found)} of {_place(found)}"
    lines: tuple[str, ...] = ()
    hint, sentence = SAME_BITS, ""
    if found.check == FETCH and found.clue == "values":
        sentence, hint = f"{where} has other values when it is fetched again", DATASET
    elif found.check == FETCH:
        sentence, hint = f"{where} lies elsewhere in memory when it is fetched another way ({found.clue})", OURS
    elif found.check == SHARD:
        did = f"has the form that the shard gave it ({found.clue})" if found.clue else "was changed"
        sentence, hint = f"{found.what} {did} while the shards of step {found.step} were computed", IN_A_SHARD
    elif found.check == MEAN:
        sentence, hint = f"{where} is not the mean of what the shards have made of it", OURS
    elif found.check == ORDER:
        sentence, hint = f"{where} is another when the shards are computed in another order", LEAKS
    elif found.check == RESTORE and found.what == STATE:
        sentence = f"the state after {found.step} steps cannot be put back where it was captured: {found.clue}"
        hint = NOT_TRAVELLED
    elif found.check == RESTORE and found.shard < 0:
        sentence = f"{found.what}{_and_more(found)} is another after the state was captured and restored ({found.clue})"
        hint = NOT_TRAVELLED
    elif found.check == RESTORE:
        sentence, hint = f"{where} is another after the state was captured and restored", NOT_TRAVELLED
    else:
        sentence = f"{where} is another when the shard is computed again"
        sentence += f"; {found.clue}" if found.clue else ""
    if hint != OURS:
        names = [_last_name(name) for name in found.around]
        lines = script.lines(names)
    checks = (found.check,)
    return CheckVerdict(0, first.steps, checks, found, sentence, found.around[:AROUND_MAX], lines, hint)


def _difference(first: Noted, joiner: Noted) -> Found | None:
    """In the order in which things happen: the state that came, the shards of a step, the state after it."""
    for step in sorted(joiner.states):
        if step - 1 in joiner.shards and (found := _shard_difference(first, joiner, step - 1)) is not None:
            return found
        if step not in first.states:
            continue
        details = {BEGAN: Details(first.states[step]), CAME: Details(joiner.states[step])}
        differs = differing(details)
        if differs:
            words = differs[0].words((BEGAN, CAME)).removeprefix(differs[0].entry.name).strip(" ()")
            return Found(JOIN, differs[0].entry.name, step - 1, more=len(differs) - 1, clue=words)
    return None


def _shard_difference(first: Noted, joiner: Noted, step: int) -> Found | None:
    mine, theirs = first.shards.get(step, {}), joiner.shards[step]
    for shard in sorted(mine.keys() & theirs.keys()):
        one, other = mine[shard], theirs[shard]
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            clue = "the same shard of the same step gave other bits there"
            if names[0] == BATCH:
                return Found(JOIN, BATCH, step, shard, clue="it has other values there")
            return Found(JOIN, names[0], step, shard, more=len(names) - 1, clue=clue)
    return None


def _suspects(first: Noted, joiner: Noted, step: int) -> tuple[list[str], list[str]]:
    """What the script keeps and is another in the second process: first what stayed there as it was at the start."""
    step += step not in joiner.around  # the state differed when it came
    mine, theirs = first.around.get(step, {}), joiner.around.get(step, {})
    start: Words = first.around[min(first.around)] if first.around else {}
    differ = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    differ.sort(key=lambda name: (theirs[name] != start.get(name), mine[name] == start.get(name)))
    words = [f"{name} ({mine[name]} in {BEGAN}, {theirs[name]} in {CAME})" for name in differ]
    if not differ and first.generators.get(step) != joiner.generators.get(step):
        words = [f"the random generators before the shards of step {step}"]
    return words, [_last_name(name) for name in differ]


def _hint(found: Found, around: Sequence[str], first: Noted, joiner: Noted) -> str:
    if found.what == BATCH:
        return SAME_DATA
    if any("of the module" in name or "of the model" in name for name in around[:1]):
        return IN_A_MODULE
    if found.shard >= 0:
        return NOT_TRAVELLED if around else f"{NOT_TRAVELLED}; {SAME_BITS}"
    step = found.step + 1
    details = {BEGAN: Details(first.states[step]), CAME: Details(joiner.states[step], came=step)}
    said = advice(differing(details), details, step)
    return said if said != EVERYWHERE else f"{NOT_TRAVELLED}; {EVERYWHERE}; {BACKWARD_INSIDE}"


def _last_name(name: str) -> str:
    """`temperature`, of `the attribute temperature of the module head`."""
    words = name.split(" ")
    for kind in ("attribute", "variable"):
        if kind in words[:3]:
            return words[words.index(kind) + 1]
    return name


def _place(found: Found) -> str:
    return f"shard {found.shard} of step {found.step}" if found.shard >= 0 else f"step {found.step}"


def _and_more(found: Found) -> str:
    return f" (and {found.more} more)" if found.more else ""


def _told(source: str, name: str, numbers_in: Callable[[ast.Module], Iterator[int]]) -> list[str]:
    """`train.py:12 (scale = time.time())`, for each of the lines."""
    try:
        numbers = sorted(set(numbers_in(ast.parse(source))))
    except (SyntaxError, ValueError):
        return []
    written = source.splitlines()
    return [f"{name}:{number} ({written[number - 1].strip()[:80]})" for number in numbers]


def _clocks_and_generators(tree: ast.Module) -> Iterator[int]:
    """Where a script reads a clock or makes a generator of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in _CLOCKS or called.rpartition(".")[2] in _GENERATORS:
                yield node.lineno


def _sets(tree: ast.Module) -> Iterator[int]:
    """Where a set is made: one of objects has another order in every process."""
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Set | ast.SetComp) or called in ("set", "frozenset", "hash", "id"):
            yield node.lineno  # type: ignore[attr-defined]


def _changes_of(tree: ast.Module, names: Sequence[str]) -> Iterator[int]:
    """Where something of such a name is changed, or an attribute of anything but `self` is set."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = [node.target] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Assign):
            targets = [one for one in node.targets if isinstance(one, ast.Attribute) and not _is_of_self(one)]
        if any(_is_named(target, names) for target in targets):
            yield node.lineno  # type: ignore[attr-defined]


def _is_of_self(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def _is_named(target: ast.expr, names: Sequence[str]) -> bool:
    if isinstance(target, ast.Subscript):
        return _is_named(target.value, names)
    return (isinstance(target, ast.Attribute) and target.attr in names) or (
        isinstance(target, ast.Name) and target.id in names
    )


__all__ = ["AGAIN", "CheckVerdict", "Script", "judge"]
