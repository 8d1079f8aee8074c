"""`holdfast drill`: break a training on purpose, and prove what came of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.run_options import add_option
from holdfast.cli.script_words import tell_misplaced
from holdfast.core.errors import ConfigError
from holdfast.core.options.declaring import option_of
from holdfast.core.options.run import AgentOptions, CheckpointOptions, WorkerOptions

USAGE = (
    "holdfast drill [PLAN.toml] [options] -- script.py [arguments]\n"
    "       holdfast drill [PLAN.toml] [options] -- -m module [arguments]\n"
    "       holdfast drill --list"
)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is the drill's own, and the script with its arguments, which may look like anything."""
    words = list(arguments)
    if words[:1] != ["drill"] or "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def add_arguments(drill: argparse.ArgumentParser) -> None:
    drill.usage = USAGE
    drill.description = (
        "Run a script quietly and then with faults from a seed, and compare: the weights, every step, every sample. "
        "Exit code 0 only if the promises held."
    )
    drill.add_argument("plan", nargs="?", metavar="PLAN.toml", help="the options below, by their names; flags beat it")
    drill.add_argument("--list", action="store_true", help="explain every fault")
    drill.add_argument("--show", action="store_true", help="print the schedule of faults, and do nothing")
    add_option(drill, option_of(AgentOptions, "workers"), usual="4")
    add_option(drill, option_of(AgentOptions, "spares"), usual="2")
    add_option(drill, option_of(WorkerOptions, "ranks"), usual="1")
    drill.add_argument("--hosts", type=int, metavar="N", help="in network namespaces (default: 1; --partition: 2)")
    drill.add_argument("--for", metavar="T", help="how long faults are injected (default: 60s)")
    drill.add_argument("--seed", type=int, metavar="S", help="which faults come when (default: 0)")
    drill.add_argument("--kill-every", metavar="T", help="kill a worker about once in T")
    drill.add_argument("--servers", type=int, metavar="N", help="parameter servers, for a script that trains on them")
    drill.add_argument("--kill-servers-every", metavar="T", help="kill a parameter server about once in T")
    drill.add_argument("--stop", type=int, metavar="N", help="stop N workers for good")
    drill.add_argument("--slow", action="append", metavar="W:Fx", help="1:5x: worker 1 is 5 times slower")
    drill.add_argument("--partition", metavar="T", help="cut one host off for the time T")
    drill.add_argument("--ledger-down", metavar="T", help="take the ledger away for the time T")
    drill.add_argument("--storage-down", metavar="T", help="take the place of the checkpoints away for T")
    drill.add_argument("--disk-full", nargs="?", const=True, metavar="T", help="no room for checkpoints (default: 10s)")
    drill.add_argument("--corrupt", metavar="WHAT", help="flip a bit: of a gradient, a parameter or the optimizer")
    add_option(drill, option_of(WorkerOptions, "path"))
    add_option(drill, option_of(CheckpointOptions, "every"), usual="5s")
    add_option(drill, option_of(CheckpointOptions, "keep_best"))
    drill.add_argument("--goodput-min", type=float, default=0.0, metavar="F", help="less goodput counts as broken")
    drill.add_argument("--report", default="drill.html", metavar="PATH", help="the report (default: drill.html)")
    drill.add_argument("--json", metavar="PATH", help="the same for programs")
    drill.add_argument("--keep", action="store_true", help="keep the directory with the runs")
    drill.set_defaults(command=_drill, words=[], parser=drill)


def _drill(options: argparse.Namespace) -> int:
    from holdfast.drills.catalogue import listing
    from holdfast.drills.plan import option_names, parse_plan, read_plan
    from holdfast.drills.schedule import draw

    if options.list:
        print(listing())
        return 0
    words: list[str] = options.words
    module = words[:1] == ["-m"]
    tell_misplaced(words[1:] if module else words, options.parser, module=module, before="-- ")
    flags = {name: getattr(options, name.replace("-", "_")) for name in option_names()}
    given = read_plan(Path(options.plan)) if options.plan else {}
    plan = parse_plan({**given, **{name: value for name, value in flags.items() if value is not None}})
    if options.show:
        for planned in draw(plan):
            print(f"{planned.at_s:8.1f} s  {planned.sentence()}")
        return 0
    return _conduct(options, plan)


def _conduct(options: argparse.Namespace, plan: Any) -> int:
    from holdfast.agent.settings import RunSettings
    from holdfast.checkpoint.settings import CheckpointSettings
    from holdfast.drills.conduct import DrillRequest, conduct

    words: list[str] = options.words
    if words[:1] == [] or words == ["-m"]:
        raise ConfigError("there is nothing to drill", hint="name the script after --: holdfast drill … -- train.py")
    module = words[0] == "-m"
    saving = CheckpointSettings(every=plan.save_every, keep_best=plan.keep_best)
    script = words[1] if module else words[0]
    of_plan: dict[str, Any] = {"workers": plan.workers, "ranks": plan.ranks, "path": plan.path, "checkpoint": saving}
    RunSettings(name="drill", script=script, module=module, **of_plan).validate()
    if plan.servers:
        from holdfast.drills.server_drill import conduct_servers

        return conduct_servers(plan, words, Path(options.json) if options.json else None)
    if not 0 <= options.goodput_min <= 1:
        raise ConfigError(f"--goodput-min is {options.goodput_min:g}", hint="give a fraction from 0 to 1")
    return conduct(
        DrillRequest(
            plan=plan,
            script=tuple(words),
            report=Path(options.report),
            json=Path(options.json) if options.json else None,
            keep=options.keep,
            goodput_min=options.goodput_min,
        )
    )
