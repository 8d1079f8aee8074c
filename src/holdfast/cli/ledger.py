"""`holdfast ledger start`, `stop`, `status`, `runs`, `forget`: an etcd to try things out with, and a look into any."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError
from holdfast.events.telling import count

if TYPE_CHECKING:
    from holdfast.agent.hosts.etcd_cluster import EtcdCluster
    from holdfast.ledger.etcd.members import EtcdStatus, MemberStatus
    from holdfast.ledger.etcd.runs import RunFound

URL = "HOLDFAST_LEDGER"
MEMBERS = 3
_LOOK_S = 0.5
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CARELESS = ("3.5.0", "3.5.1", "3.5.2")  # can lose consistency when they are killed


def add_arguments(ledger: argparse.ArgumentParser, parser_class: Any) -> None:
    ledger.description = "etcd, which keeps the membership of runs on several hosts."
    actions = ledger.add_subparsers(metavar="ACTION", required=True, parser_class=parser_class)

    start = actions.add_parser("start", help="a ready etcd on this host, for trying things out")
    start.add_argument("--members", type=int, metavar="N", help=f"how many (default: {MEMBERS}, or as it was)")
    start.add_argument("--background", action="store_true", help="leave it running, until `holdfast ledger stop`")
    start.set_defaults(command=lambda options: start_members(options.dir, options.members, options.background))
    stop = actions.add_parser("stop", help="end what `start` left running; its data stays")
    stop.set_defaults(command=lambda options: stop_members(options.dir))

    status = actions.add_parser("status", help="how the members are doing")
    status.set_defaults(command=lambda options: show_status(_url(options)))
    runs = actions.add_parser("runs", help="list the runs that it holds")
    runs.set_defaults(command=lambda options: show_runs(_url(options)))
    forget = actions.add_parser("forget", help="delete what it holds of a run in which nobody takes part")
    forget.add_argument("run", metavar="RUN")
    forget.set_defaults(command=lambda options: forget_run(_url(options), options.run))

    for action in (start, stop, status, runs, forget):
        action.add_argument("--dir", metavar="DIR", help="keep it in DIR/etcd (default: $HOLDFAST_DIR or ~/.holdfast)")
    for action in (status, runs, forget):
        action.add_argument("--ledger", metavar="URL", help=f"etcd://A:2379,B:2379 (default: ${URL}, or that of start)")


def _place(home: str | None) -> Path:
    from holdfast.placement.directory import home_directory

    return home_directory(home) / "etcd"


def _url(options: argparse.Namespace) -> str:
    from holdfast.agent.hosts.etcd_cluster import read_record

    chosen = options.ledger or os.environ.get(URL)
    if not chosen:
        record = read_record(_place(options.dir))
        if record is None:
            raise ConfigError(
                "it is not said which ledger", hint=f"give its --ledger URL or set ${URL}; `holdfast ledger start`"
            )
        chosen = record["url"]
    return str(chosen)


# -- an etcd on this host


def start_members(home: str | None, members: int | None, background: bool) -> int:
    from holdfast.agent.hosts.etcd_cluster import EtcdCluster, adopt

    directory = _place(home)
    with _locked(directory):
        cluster = adopt(directory)
        living = [member for member in cluster.members if member.alive] if cluster else []
        if cluster is not None and living and (not background or len(living) == len(cluster.members)):
            raise ConfigError(
                f"a ledger already runs there: {cluster.url}",
                hint="end it with `holdfast ledger stop`, or start another in another --dir",
            )
        if not living:
            known = len(cluster.members) if cluster else MEMBERS
            cluster = EtcdCluster(directory, known if members is None else members, tied=not background)
        elif cluster is not None and members not in (None, len(cluster.members)):
            raise ConfigError(
                f"the cluster in {directory} has {len(cluster.members)} members, not {members}",
                hint="leave the number out, or choose another --dir",
            )
        assert cluster is not None
        cluster.start()
        if not background:
            signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # after the members were started, who would inherit it
        print(f"a ledger of {len(cluster.members)} on this host; its data is in {directory}")
        print(f"  --ledger {cluster.url}")
        print("end it with `holdfast ledger stop`" if background else "Ctrl-C ends it", flush=True)
        return 0 if background else _attend(cluster)


def _attend(cluster: EtcdCluster) -> int:
    """Until a signal comes, which must be blocked, or nothing is left to attend to."""
    living = list(cluster.members)
    try:
        while living:
            ending = signal.sigtimedwait(_ENDINGS, _LOOK_S)
            if ending is not None:
                print("\nended; its data stays", flush=True)
                return 128 + ending.si_signo
            for member in [member for member in living if not member.alive]:
                living.remove(member)
                print(f"{member.plan.name} ended; {len(living)} of {len(cluster.members)} are left", flush=True)
        return 1
    finally:
        cluster.stop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)


def stop_members(home: str | None) -> int:
    from holdfast.agent.hosts.etcd_cluster import adopt

    directory = _place(home)
    cluster = adopt(directory)
    living = sum(member.alive for member in cluster.members) if cluster else 0
    if cluster is None or not living:
        raise ConfigError(f"no ledger runs in {directory}", hint="give the --dir that it was started with")
    cluster.stop()
    print(f"ended {count(living, 'member')}; their data stays in {directory}")
    return 0


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One `start` at a time. The kernel drops the lock with the process, however that ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (directory / "lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory} ({error.strerror})", hint="choose another place with --dir"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another `holdfast ledger start` is at work in {directory}",
                hint="end it with `holdfast ledger stop`, or choose another --dir",
            ) from error
        yield


# -- a look into any etcd


def show_status(url: str) -> int:
    from holdfast.ledger.etcd import survey

    status = survey(url)
    print("\n".join(_status_lines(status)))
    return 0 if status.serves else 1


def show_runs(url: str) -> int:
    from holdfast.ledger.etcd import list_runs

    runs = list_runs(url)
    print("\n".join(map(_run_line, runs)) if runs else "no runs in this ledger")
    return 0


def forget_run(url: str, run: str) -> int:
    from holdfast.ledger.etcd import delete_run, list_runs, open_etcd

    with closing(open_etcd(url, run)) as ledger:
        found = next((found for found in list_runs(url) if found.name == run), None)
        if found is None:
            raise ConfigError(f"there is no run {run} in this ledger", hint="list them with `holdfast ledger runs`")
        if found.alive or not delete_run(ledger):
            raise ConfigError(
                f"run {run} is not over: hosts or workers are registered in it",
                hint=f"`holdfast stop {run}` first; what a host that lost power registered goes by itself in seconds",
            )
    print(f"forgot run {run}")
    return 0


def _status_lines(status: EtcdStatus) -> Iterator[str]:
    answering = sum(member.serves for member in status.members)
    leader = next((member for member in status.members if member.serves and member.leads), None)
    if status.serves:
        leads = f"{leader.name or leader.address} leads" if leader else "the leader is none of them"
        revision = max(member.revision for member in status.members if member.serves)
        yield f"ledger: {answering} of {len(status.members)} members answer, {leads}, revision {revision}"
    else:
        yield "ledger: no majority of its members answers"
    width = max(len(member.address) for member in status.members)
    for member in status.members:
        yield f"  {member.name or '-':<8} {member.address:<{width}}  {_member_words(member)}"
    if status.unnamed:
        yield f"not in the URL, but members too: {', '.join(status.unnamed)}"
    careless = sorted({member.version for member in status.members} & set(_CARELESS))
    if careless:
        yield f"etcd {', '.join(careless)} can lose writes when it is killed: upgrade to 3.5.3 or later"
    if status.runs is not None:
        yield f"runs: {len(status.runs) or 'none'}"
        for run in status.runs:
            yield f"  {_run_line(run)}"


def _member_words(member: MemberStatus) -> str:
    if not member.version:
        return f"unreachable: {member.trouble}"
    about = f"{member.db_bytes / 1024:.0f} KiB, etcd {member.version}"
    if not member.serves:
        return f"{member.trouble}, {about}"
    assert member.read_s is not None
    words = f"{'leads' if member.leads else 'follows'}, reads in {1000 * member.read_s:.1f} ms, {about}"
    return f"{words}; it says: {member.trouble}" if member.trouble else words


def _run_line(run: RunFound) -> str:
    state = "finished" if run.done else "running" if run.alive else "stopped"
    return f"{run.name:<30} {state:<9} {count(run.hosts, 'host')}, {count(run.workers, 'worker')}, {run.keys} keys"
