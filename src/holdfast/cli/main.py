"""The command line: `holdfast run`, `check`, `status`, `events`, `logs`, `top`, `dashboard`, `scale`, `stop`, `runs`,
`rm`, `checkpoint`, `ledger`, `drill`, `federate`, `kubernetes`, `keys`, `horovodrun`.

Starts without torch.

Exit codes: 0 finished or done; 2 bad input, with one sentence and a hint; 130 and 143 stopped by Ctrl-C or SIGTERM;
otherwise the script's own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.check import add_arguments as add_check_arguments
from holdfast.cli.checkpoint import add_arguments as add_checkpoint_arguments
from holdfast.cli.dashboard import add_dashboard_arguments
from holdfast.cli.drill import add_arguments as add_drill_arguments
from holdfast.cli.drill import split as split_drill
from holdfast.cli.entering import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, drop_output
from holdfast.cli.entering import entry as entry
from holdfast.cli.events import add_arguments as add_events_arguments
from holdfast.cli.federate import add_arguments as add_federate_arguments
from holdfast.cli.federate_verify import add_arguments as add_federate_verify_arguments
from holdfast.cli.horovodrun import add_arguments as add_horovodrun_arguments
from holdfast.cli.kubernetes import add_arguments as add_kubernetes_arguments
from holdfast.cli.kubernetes import start_of
from holdfast.cli.ledger import add_arguments as add_ledger_arguments
from holdfast.cli.logs import add_arguments as add_logs_arguments
from holdfast.cli.parser import Parser
from holdfast.cli.remove import add_arguments as add_remove_arguments
from holdfast.cli.run_options import add_option, add_run_options, given_words
from holdfast.cli.runs import add_arguments as add_runs_arguments
from holdfast.cli.script_words import check_workers_given, script_of, tell_misplaced
from holdfast.cli.top import add_arguments as add_top_arguments
from holdfast.core.errors import EXIT_BAD_INPUT, ConfigError, HoldfastError
from holdfast.core.options.run import DIRECTORY

if TYPE_CHECKING:
    from holdfast.agent.settings import RunSettings
    from holdfast.dashboard.metrics_server import MetricsServer
    from holdfast.dashboard.server import Dashboard
    from holdfast.integrations.kubernetes.progress import KubeflowProgress
    from holdfast.observe.tensorboard import Curves
    from holdfast.placement.directory import RunDirectory

    Beside = Curves | MetricsServer | Dashboard | KubeflowProgress


def main(arguments: Sequence[str]) -> int:
    try:
        options = _parsed(arguments)
        if options is None:
            return 0
        return int(options.command(options))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # of no argument that anybody thought of: still no reason for a traceback
        where = f" {error.filename}" if error.filename is not None else ""
        print(f"holdfast: the system refused it: {error.strerror or error}{where}", file=sys.stderr)
        return 1


def _parsed(arguments: Sequence[str]) -> argparse.Namespace | None:
    """None: what was asked for, help or the version, is printed."""
    if (found := start_of(arguments)) is not None:
        return found
    arguments, words = split_drill(arguments)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit:
        return None
    if words:
        options.words = words
    return options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="holdfast", description="Training that goes on, exactly, while the machines under it fail.")
    parser.add_argument("--version", action="version", version=f"holdfast {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_run(commands.add_parser("run", help="train a script with several workers on this host"))
    add_check_arguments(commands.add_parser("check", help="find out in seconds whether a script is exact"))

    status = _with_run(commands.add_parser("status", help="how a run is doing"))
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(command=_lazily("status.show_status"))

    add_events_arguments(_with_run(commands.add_parser("events", help="what happened in a run, in order")))
    add_logs_arguments(_with_run(commands.add_parser("logs", help="what the workers of a run printed")))
    add_top_arguments(_with_run(commands.add_parser("top", help="watch a run in the terminal")))
    add_dashboard_arguments(_with_run(commands.add_parser("dashboard", help="show a run in the browser")))

    scale = _with_run(commands.add_parser("scale", help="change the number of workers of a run"))
    scale.add_argument("workers", type=int, metavar="N")
    scale.set_defaults(command=_lazily("control.scale"))

    stop = _with_run(commands.add_parser("stop", help="finish the step and leave in order"))
    stop.set_defaults(command=_lazily("control.stop"))

    give_up = _with_run(commands.add_parser("give-up", help="wait no more for hosts that are gone for good"))
    give_up.add_argument("hosts", nargs="+", metavar="HOST")
    give_up.set_defaults(command=_lazily("control.give_up"))

    runs = commands.add_parser("runs", help="list the runs of this host: state, dates, size")
    _add_directory(runs)
    add_runs_arguments(runs)
    remove = commands.add_parser("rm", help="delete runs that are over")
    add_remove_arguments(remove)
    _add_directory(remove)

    add_checkpoint_arguments(
        commands.add_parser("checkpoint", help="list, check, convert and delete checkpoints"), Parser
    )
    add_ledger_arguments(commands.add_parser("ledger", help="an etcd for runs on several hosts"), Parser)
    add_drill_arguments(commands.add_parser("drill", help="break a training on purpose, and prove what came of it"))
    _add_federate(
        commands.add_parser("federate", help="simulate federated learning with hostile clients, rule by attack")
    )
    add_kubernetes_arguments(commands.add_parser("kubernetes", help="manifests of a run on Kubernetes"), Parser)
    _add_keys(commands.add_parser("keys", help="make the keys of a run on several hosts"))
    horovodrun = commands.add_parser("horovodrun", help="start a script that was written for horovodrun")
    add_horovodrun_arguments(horovodrun)
    horovodrun.set_defaults(command=_lazily("horovodrun.start"))
    return parser


def _lazily(where: str) -> Callable[[argparse.Namespace], int]:
    """A command by its module and function, imported when it is called: the others start without it."""
    module, _, name = where.partition(".")
    return lambda options: int(getattr(import_module(f"holdfast.cli.{module}"), name)(options))


def _add_keys(keys: argparse.ArgumentParser) -> None:
    actions = keys.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    for name, help, command in (
        ("create", "make a new set in DIR", "keys.create"),
        ("show", "check the set in DIR; print its fingerprint and expiry", "keys.show"),
    ):
        action = actions.add_parser(name, help=help)
        action.add_argument("directory", metavar="DIR")
        action.set_defaults(command=_lazily(command))


def _add_federate(federate: argparse.ArgumentParser) -> None:
    add_federate_arguments(federate)
    actions = federate.add_subparsers(metavar="verify", parser_class=Parser)
    add_federate_verify_arguments(actions.add_parser("verify", help="verify a chain of rounds by its signatures"))


def _add_run(run: argparse.ArgumentParser) -> None:
    run.usage = (
        "holdfast run --workers N [options] script.py [arguments]\n"
        "       holdfast run --workers N [options] -m module [arguments]\n"
        "       holdfast run --servers N --ledger URL --keys DIR --run NAME [options]"
    )
    run.description = "Train a script with N workers. The same --run name again takes over a run whose agent died."
    add_run_options(run)
    # Everything from the script on is the script's own, whatever it looks like.
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module")
    run.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    run.set_defaults(command=_run, parser=run)


def _with_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("run", metavar="RUN")
    _add_directory(parser)
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    add_option(parser, DIRECTORY)


def _version() -> str:
    try:
        return metadata.version("holdfast")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _run(options: argparse.Namespace) -> int:
    from holdfast.placement import horovod_names
    from holdfast.placement.directory import home_directory

    words, module = script_of(options)
    if module and words and options.horovod:
        words[0] = horovod_names.ours(words[0])
    if not words and options.servers is not None and options.workers in (None, "0"):
        options.workers = "0"  # this host only serves: its servers need no script
    elif not words:
        raise ConfigError("there is nothing to run", hint="name a script: holdfast run --workers 2 train.py")
    check_workers_given(options.workers, words, options.parser)
    tell_misplaced(words, options.parser, module=module)
    if options.ledger and options.ledger != "slurm" and options.run is None:
        raise ConfigError(
            "a run on several hosts needs a name that all of them give", hint="add --run NAME, the same on every host"
        )
    with ExitStack() as around:
        home = home_directory(options.dir)
        if options.ledger == "slurm":
            _serve_in_job(options, home, around)
        return _run_here(options, words, module, home)


def _serve_in_job(options: argparse.Namespace, home: Path, around: ExitStack) -> None:
    """The first nodes of the Slurm job serve the ledger; the run and this host are called as Slurm calls them."""
    from holdfast.integrations.slurm.first_nodes import FirstNodes
    from holdfast.integrations.slurm.step import SlurmStep, run_name
    from holdfast.placement.naming import check_name

    step = SlurmStep.read(os.environ)
    options.run = options.run or run_name(step)
    check_name(options.run)
    options.host = options.host or step.name
    nodes = FirstNodes(step, home, options.run)
    around.callback(nodes.close)
    nodes.start(os.environ)
    options.ledger = nodes.url


def _run_here(options: argparse.Namespace, words: list[str], module: bool, home: Path) -> int:
    from holdfast.agent.settings import RunSettings
    from holdfast.agent.starting import run_agent
    from holdfast.checkpoint.settings import CheckpointSettings
    from holdfast.core.options.declaring import parse_options
    from holdfast.placement.directory import RunDirectory, fresh_name

    given = given_words(options)
    saving = parse_options(CheckpointSettings, given)
    settings = RunSettings(
        script=words[0] if words else "",
        arguments=tuple(words[1:]),
        module=module,
        checkpoint=CheckpointSettings(**saving, given=tuple(saving)).at_home(),
        **{"name": "unnamed", **parse_options(RunSettings, given)},
    ).at_home()
    settings.validate()
    if options.run is None:
        settings = replace(settings, name=fresh_name(home, settings.script, now=time.time()))
    directory = RunDirectory(home, settings.name, settings.host)
    with ExitStack() as beside:
        for part in _shown_beside(settings, directory):
            beside.callback(part.close)
        return run_agent(settings, home)


def _shown_beside(settings: RunSettings, directory: RunDirectory) -> Iterator[Beside]:
    """What shows the run for as long as its agent runs. A port that is taken is said before anything is started."""
    if settings.tensorboard:
        from holdfast.observe.tensorboard import Curves

        yield Curves(directory.events, Path(settings.tensorboard).expanduser())
    if settings.metrics:
        from holdfast.core.options.kinds import split_address
        from holdfast.dashboard.metrics_server import MetricsServer

        server = MetricsServer(directory, *split_address(settings.metrics, "--metrics"))
        print(f"holdfast | metrics: {server.url}", flush=True)
        yield server
    if settings.dashboard is not None:
        from holdfast.dashboard.server import Dashboard

        page = Dashboard(directory, settings.dashboard)
        print(f"holdfast | dashboard: {page.url}", flush=True)
        yield page
    from holdfast.integrations.kubernetes.progress import KubeflowProgress, is_wanted

    if is_wanted(os.environ):
        yield KubeflowProgress(directory, os.environ)
