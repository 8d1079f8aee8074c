"""Every fault in a line or two, what it needs of the machine, and why this machine cannot do it, if it cannot."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class FaultEntry:
    flag: str
    meaning: str
    why_not: Callable[[], str] = lambda: ""  # why it cannot be had here; empty: it can


def no_hosts() -> str:
    """Several hosts are network namespaces with an etcd of their own."""
    from holdfast.agent.hosts.etcd_member import find_etcd
    from holdfast.testing.switchboard import why_not

    reason = why_not()
    if not reason:
        try:
            find_etcd()
        except ConfigError as error:
            reason = error.message
    return reason


def no_mounts() -> str:
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    return "" if shutil.which("mount") else "mount is not installed"


FAULTS: dict[str, FaultEntry] = {
    "kill": FaultEntry(
        "--kill-every 10s", "SIGKILL to a worker, about once in each such time. A new one takes its place."
    ),
    "kill-server": FaultEntry(
        "--kill-servers-every 5s",
        "SIGKILL to a parameter server, about once in each such time, the primary of each slice in turn, while every "
        "slice keeps a majority. For scripts that train on them, with --servers 3 or more and no other fault.",
    ),
    "stop": FaultEntry(
        "--stop N",
        "SIGSTOP to N workers, one after another, for good: they live and do nothing, until the others go on without "
        "them and the agent ends them.",
    ),
    "slow": FaultEntry(
        "--slow 1:5x",
        "Worker 1 gets a fifth of its time, by SIGSTOP and SIGCONT ten times a second, for the whole drill. May be "
        "given several times.",
    ),
    "partition": FaultEntry(
        "--partition 5s",
        "The run is on two hosts (--hosts N: more), network namespaces with an etcd in others, and one of them is cut "
        "off from everything for 5 s. Needs root, ip, nft and etcd.",
        no_hosts,
    ),
    "ledger-down": FaultEntry(
        "--ledger-down 20s",
        "The ledger is away for 20 s. On one host it lives in the agent: that is killed, and started again. On "
        "several, all members of etcd are killed.",
    ),
    "storage-down": FaultEntry(
        "--storage-down 30s",
        "The place of the checkpoints is away for 30 s, as if it were unmounted: a plain file is in its stead.",
    ),
    "disk-full": FaultEntry(
        "--disk-full 10s",
        "The file system of the checkpoints has no room for 10 s. It is a tmpfs, which needs root.",
        no_mounts,
    ),
    "corrupt": FaultEntry(
        "--corrupt gradient",
        "One bit flips in one worker's memory: in a gradient, a parameter or the optimizer's state. This one is done "
        "by the drill's starter inside the worker: from outside nobody finds a gradient in time. Gradients are audited "
        "at every shard then (--audit 1), states every 10 steps, in both runs.",
    ),
}


def listing() -> str:
    """What `holdfast drill --list` prints."""
    parts = []
    for entry in FAULTS.values():
        reason = entry.why_not()
        text = entry.meaning + (f" Not on this machine: {reason}." if reason else "")
        parts.append(entry.flag + "\n" + textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(parts)


def refuse_impossible(kinds: Iterable[str], *, hosts: int) -> None:
    """ConfigError for the first fault that this machine cannot do."""
    for kind in kinds:
        if reason := FAULTS[kind].why_not():
            flag = FAULTS[kind].flag.split()[0]
            raise ConfigError(
                f"{flag} cannot be done here: {reason}", hint="leave it out, or see `holdfast drill --list`"
            )
    if hosts > 1 and (reason := no_hosts()):
        raise ConfigError(
            f"--hosts {hosts} cannot be had here: {reason}", hint="leave it out: one host needs none of it"
        )
