"""The starter that `holdfast check` puts before the user's script.

python -m holdfast.placement.bootstrap -m holdfast.script_check.rig script.py arguments…
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import holdfast
from holdfast.data.fetching import die_with_parent
from holdfast.engine.api import joining
from holdfast.engine.api.run import Run
from holdfast.placement.bootstrap import run_script
from holdfast.script_check.joining_in import CheckedPlace
from holdfast.script_check.notes import JOINER, PLACE, Notes, Task
from holdfast.script_check.recomputing import Recomputing
from holdfast.script_check.rows import freeze_rows
from holdfast.script_check.surroundings import Surroundings
from holdfast.state.optimizer import by_name


class Follower(Run):
    """The second process: one that is not the first worker, and so does not do what a script has only that one do."""

    @property
    def leader(self) -> bool:
        return False


def _put_in(name: str, instead: type) -> None:
    """Of what holdfast.join builds with."""
    assert name in vars(joining), name
    vars(joining)[name] = instead


def check_joins(task: Task) -> None:
    """Let the run that the script joins be checked."""
    join = joining.join
    notes = Notes(task.notes)
    CheckedPlace.task = task
    _put_in("WorkerPlace", CheckedPlace)
    if task.role == JOINER:
        _put_in("Run", Follower)

    @functools.wraps(join)
    def checked(model: Any, optimizer: Any, dataset: Any, **options: Any) -> Run:
        if task.role == JOINER and options.get("num_workers"):
            options |= {"num_workers": 0, "prefetch_factor": None}  # another way to fetch, of which nothing may depend
        frozen = freeze_rows(model)
        run = join(model, optimizer, dataset, **options)
        extras = dict(options.get("extras") or {})
        known = (run, *by_name(run.optimizer).values(), *extras.values(), model, optimizer, extras)
        run.engine.checker = checker = Recomputing(run, task, notes, Surroundings(run.model, known))
        CheckedPlace.arrived = staticmethod(checker.arrived)
        run.watch(lambda step, view, counted: checker.applied(step))
        notes.write("joined", tables=frozen)
        return run

    joining.join = checked
    holdfast.join = checked


def main() -> None:
    task = Task.decode(os.environ.pop(PLACE))
    die_with_parent(task.parent)  # who conducts the check may be killed, and nobody else would end a wait
    check_joins(task)
    run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
