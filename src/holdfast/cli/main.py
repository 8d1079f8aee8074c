"""The command line: `holdfast run`, `status`, `events`, `top`, `dashboard`, `scale`, `stop`, `runs`, `checkpoint`,
`ledger`, `drill`, `keys`.

Starts without torch.

Exit codes: 0 finished or done; 2 bad input, with one sentence and a hint; 130 and 143 stopped by Ctrl-C or SIGTERM;
otherwise the script's own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from holdfast.cli.checkpoint import add_arguments as add_checkpoint_arguments
from holdfast.cli.dashboard import add_dashboard_arguments, add_dashboard_flag, beside, split_port
from holdfast.cli.drill import add_arguments as add_drill_arguments
from holdfast.cli.drill import split as split_drill
from holdfast.cli.events import add_arguments as add_events_arguments
from holdfast.cli.ledger import add_arguments as add_ledger_arguments
from holdfast.cli.saving import add_checkpoint_flags, checkpoint_settings
from holdfast.cli.top import add_arguments as add_top_arguments
from holdfast.core.errors import EXIT_BAD_INPUT, ConfigError, HoldfastError
from holdfast.launch.environment import PATHS, STARTS, WARM


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence with a hint, as every other error does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see `{self.prog} --help`")


def entry() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    try:
        arguments, words = split_drill(arguments)
        options = _parser().parse_args(arguments)
        if words:
            options.words = words
        return int(options.command(options))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What waits in the stream's buffer would raise once more when the interpreter ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="holdfast", description="Training that goes on, exactly, while the machines under it fail.")
    parser.add_argument("--version", action="version", version=f"holdfast {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_run(commands.add_parser("run", help="train a script with several workers on this host"))

    status = _with_run(commands.add_parser("status", help="how a run is doing"))
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(command=_status)

    add_events_arguments(_with_run(commands.add_parser("events", help="what happened in a run, in order")))
    add_top_arguments(_with_run(commands.add_parser("top", help="watch a run in the terminal")))
    add_dashboard_arguments(_with_run(commands.add_parser("dashboard", help="show a run in the browser")))

    scale = _with_run(commands.add_parser("scale", help="change the number of workers of a run"))
    scale.add_argument("workers", type=int, metavar="N")
    scale.set_defaults(command=_scale)

    stop = _with_run(commands.add_parser("stop", help="finish the step and leave in order"))
    stop.set_defaults(command=_stop)

    runs = commands.add_parser("runs", help="list the runs of this host")
    _add_directory(runs)
    runs.set_defaults(command=_runs)

    add_checkpoint_arguments(
        commands.add_parser("checkpoint", help="list, check, convert and delete checkpoints"), _Parser
    )
    add_ledger_arguments(commands.add_parser("ledger", help="an etcd for runs on several hosts"), _Parser)
    add_drill_arguments(commands.add_parser("drill", help="break a training on purpose, and prove what came of it"))
    _add_keys(commands.add_parser("keys", help="make the keys of a run on several hosts"))
    return parser


def _add_keys(keys: argparse.ArgumentParser) -> None:
    actions = keys.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    for name, help, command in (
        ("create", "make a new set in DIR", _keys_create),
        ("show", "check the set in DIR; print its fingerprint and expiry", _keys_show),
    ):
        action = actions.add_parser(name, help=help)
        action.add_argument("directory", metavar="DIR")
        action.set_defaults(command=command)


def _add_run(run: argparse.ArgumentParser) -> None:
    run.usage = (
        "holdfast run --workers N [options] script.py [arguments]\n"
        "       holdfast run --workers N [options] -m module [arguments]"
    )
    run.description = "Train a script with N workers. The same --run name again takes over a run whose agent died."
    run.add_argument("--workers", type=int, required=True, metavar="N", help="how many workers train")
    run.add_argument("--spares", type=int, default=0, metavar="K", help="workers that wait to replace others")
    run.add_argument(
        "--replace-slow",
        type=float,
        default=0.3,
        metavar="F",
        help="replace a worker that stays below this fraction of the usual speed by a spare (default: 0.3; 0: never)",
    )
    run.add_argument("--run", metavar="NAME", help="the run's name (default: the script's and the time)")
    run.add_argument("--restarts", type=int, default=100, metavar="R", help="replacements at most (default: 100)")
    run.add_argument("--threads", type=int, default=1, metavar="T", help="compute threads of each (default: 1)")
    run.add_argument("--path", choices=PATHS, default="auto", help="how gradients travel (default: auto)")
    run.add_argument("--listen", default="", metavar="HOST[:FIRST-LAST]", help="listen on TCP, on these ports")
    run.add_argument("--ledger", default="", metavar="URL", help="etcd://A:2379,B:2379: train on several hosts")
    run.add_argument("--host", default="", metavar="NAME", help="this host's name in the run (default: its own)")
    run.add_argument("--keys", default="", metavar="DIR", help="the run's keys, made by `holdfast keys create`")
    run.add_argument("--advertise", default="", metavar="HOST", help="where other hosts reach this one's workers")
    run.add_argument("--outage", type=float, default=300.0, metavar="S", help="train on so long without the ledger")
    add_checkpoint_flags(run)
    run.add_argument("--lease", type=float, default=2.0, metavar="S", help="seconds until a silent worker is hung")
    run.add_argument("--stuck-after", default="5s", metavar="T", help="a shard without a move is hung (or: none)")
    run.add_argument("--hang-after", default="2min", metavar="T", help="so is anything else (2min; or: none)")
    run.add_argument(
        "--audit", type=float, default=0.0, metavar="F", help="let two workers compute this part of shards"
    )
    run.add_argument("--late-after", default="0.5s", metavar="T", help="go on without who is late (or: none)")
    run.add_argument("--start", choices=STARTS, default=WARM, help="warm: import once, fork workers (default: warm)")
    run.add_argument("--audit-every", type=int, default=100, metavar="N", help="steps to compare workers' states in")
    run.add_argument("--strikes", type=int, default=3, metavar="N", help="times a slot's worker may be found wrong")
    run.add_argument(
        "--metrics", nargs="?", const="127.0.0.1:9464", metavar="ADDR:PORT", help="serve /metrics for Prometheus"
    )
    run.add_argument("--tensorboard", metavar="DIR", help="write the run's curves there, for TensorBoard")
    add_dashboard_flag(run)
    _add_directory(run)
    # Everything from the script on is the script's own, whatever it looks like.
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module")
    run.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    run.set_defaults(command=_run)


def _with_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("run", metavar="RUN")
    _add_directory(parser)
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", metavar="DIR", help="where runs are kept (default: $HOLDFAST_DIR or ~/.holdfast)")


def _version() -> str:
    try:
        return metadata.version("holdfast")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _run(options: argparse.Namespace) -> int:
    from holdfast.launch.agent import run_agent
    from holdfast.launch.directory import RunDirectory, fresh_name, home_directory
    from holdfast.launch.metrics import metrics_beside, split_address
    from holdfast.launch.patience import LATE_S_MIN, parse_patience
    from holdfast.launch.settings import RunSettings, host_name
    from holdfast.launch.tensorboard import curves_beside

    if options.ledger and options.run is None:
        raise ConfigError(
            "a run on several hosts needs a name that all of them give", hint="add --run NAME, the same on every host"
        )
    module = options.module is not None
    words = list(options.module if module else options.script)
    numbers_at = split_address(options.metrics, words)
    port = split_port(options, words)
    if words and words[0] == "--":
        del words[0]
    if not words:
        raise ConfigError("there is nothing to run", hint="name a script: holdfast run --workers 2 train.py")
    if words[0].startswith("-"):
        raise ConfigError(f"unknown option {words[0]}", hint="see `holdfast run --help`")
    home = home_directory(options.dir)
    settings = RunSettings(
        name="unnamed" if options.run is None else options.run,
        script=words[0],
        arguments=tuple(words[1:]),
        module=module,
        workers=options.workers,
        spares=options.spares,
        restarts=options.restarts,
        threads=options.threads,
        path=options.path,
        listen=options.listen,
        lease_s=options.lease,
        ledger=options.ledger,
        host=options.host or (host_name() if options.ledger else ""),
        keys=str(Path(options.keys).expanduser().resolve()) if options.keys else "",
        advertise=options.advertise,
        outage_s=options.outage,
        replace_slow=options.replace_slow,
        checkpoint=checkpoint_settings(options),
        stuck_after_s=parse_patience("--stuck-after", options.stuck_after),
        hang_after_s=parse_patience("--hang-after", options.hang_after),
        late_after_s=parse_patience("--late-after", options.late_after, least_s=LATE_S_MIN),
        audit=options.audit,
        audit_every=options.audit_every,
        strikes=options.strikes,
        start=options.start,
    )
    settings.validate()
    if options.run is None:
        settings = replace(settings, name=fresh_name(home, settings.script, now=time.time()))
    directory = RunDirectory(home, settings.name, settings.host)
    curves = curves_beside(directory, options.tensorboard)
    with curves, metrics_beside(directory, numbers_at), beside(home, settings.name, settings.host, port):
        return run_agent(settings, home)


def _keys_create(options: argparse.Namespace) -> int:
    from holdfast.cli.keys import create

    return create(options.directory)


def _keys_show(options: argparse.Namespace) -> int:
    from holdfast.cli.keys import show

    return show(options.directory)


def _status(options: argparse.Namespace) -> int:
    from holdfast.cli.status import show_status

    return show_status(options.run, options.dir, as_json=options.json)


def _runs(options: argparse.Namespace) -> int:
    from holdfast.cli.status import show_runs

    return show_runs(options.dir)


def _scale(options: argparse.Namespace) -> int:
    from holdfast.cli.control import scale

    return scale(options.run, options.dir, options.workers)


def _stop(options: argparse.Namespace) -> int:
    from holdfast.cli.control import stop

    return stop(options.run, options.dir)
