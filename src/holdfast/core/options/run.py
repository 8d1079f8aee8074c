"""Every option of `holdfast run`, by who reads it: the agent, the workers, or those who save checkpoints. Pure.

To add one, add a field: docs/how-to/add-an-option.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.options.declaring import Option, option
from holdfast.core.options.kinds import Choice, ChoiceOrCount, Duration, Fraction, ListenAddress, Switch, Text, Whole

WORKERS_MAX = 1024
SERVERS_MAX = 256
REPLICAS_MAX, REPLICAS = 9, 3
MEMORY, DISK = DURABLE = ("memory", "disk")  # where a majority of the replicas has an update that is acknowledged
TABLE_ROWS_MAX = 1 << 40
COUNT_MAX = 1_000_000  # of restarts, of strikes, of checkpoints
STEPS_MAX = 10**12
AUDIT_EVERY_MAX = 1_000_000
DAY_S = 86400.0
WARM, COLD = STARTS = ("warm", "cold")  # forked from a process that has imported what they need, or one by one
AUTO, NONE = "auto", "none"  # which of a host's accelerators its workers are given
DEVICES_MAX = 64
RANKS_MAX = 64
PATHS = ("auto", "shared-memory", "network", "process-group")
ON, OFF = REBALANCE = ("on", "off")  # shards follow the workers' paces, or stay with them
REFUSE, WARN = NUMERICS = ("refuse", "warn")  # a worker whose arithmetic gives other bits
DASHBOARD_PORT = 8642
METRICS_PORT = 9464  # where OpenTelemetry's exporter for Prometheus is

GENERAL = "options"
CREW = "workers"
SAVING = "checkpoints"
WATCHING = "watching"
PATIENCE = "late, hung and wrong workers"
HOSTS = "several hosts, and the network"
SERVING = "parameter servers"
GROUPS = (GENERAL, CREW, SERVING, SAVING, WATCHING, PATIENCE, HOSTS)

DIRECTORY = Option(
    flag="--dir",
    kind=Text(),
    default=None,
    usual="`$HOLDFAST_DIR`, else `~/.holdfast`",
    group=GENERAL,
    metavar="DIR",
    help="where runs are kept",
)


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What the agent alone reads."""

    name: str = option(
        Text(),
        "",
        flag="--run",
        usual="the script's name and the time",
        group=GENERAL,
        metavar="NAME",
        help="the run's name",
        more="Up to 64 letters, digits, dots, dashes, underscores",
    )
    workers: int = option(
        Whole(0, WORKERS_MAX),
        group=GENERAL,
        metavar="N",
        help="how many workers train; 0: this host only serves, with --servers",
        hint="a worker is a process: about as many as the host has cores",
    )
    durable: str = option(
        Choice(DURABLE),
        MEMORY,
        group=SERVING,
        help="an update is acknowledged when a majority of the replicas has it in memory, or on disk",
    )
    table_rows: int = option(
        Whole(0, TABLE_ROWS_MAX),
        0,
        usual="all of them",
        group=SERVING,
        metavar="N",
        help="so many rows of embedding tables stay in each server's memory; those used least lie on its disk",
        more="In the run's directory; [with embedding tables](../how-to/embedding-tables.md#where-the-rows-are)",
        hint="0: all rows are in memory; 10000000 rows of 32 numbers with Adagrad take about 3 GB",
    )
    spares: int = option(
        Whole(0, WORKERS_MAX), 0, group=CREW, metavar="K", help="how many workers wait to replace others"
    )
    replace_slow: float = option(
        Fraction(0, 0.5),  # above, somebody is always slow
        0.3,
        group=CREW,
        metavar="F",
        help="a spare replaces a worker that stays below this fraction of the usual speed; 0: never",
        more="It is replaced after 30 s, if a spare waits",
        hint="0.3: a spare replaces who stays below three tenths of the usual speed; 0: nobody is replaced",
    )
    restarts: int = option(
        Whole(0, COUNT_MAX),
        100,
        group=CREW,
        metavar="R",
        help="how many workers are replaced at most",
        more="Evicted workers do not count",
    )
    start: str = option(
        Choice(STARTS),
        WARM,
        group=CREW,
        help="warm: workers are forked from a process that has the script's imports; cold: each starts by itself",
        more="A [fork](../decisions/0010-workers-are-forked-warm.md) replaces a worker in a tenth of a second",
    )
    devices: str = option(
        ChoiceOrCount((AUTO, NONE), 1, DEVICES_MAX),
        AUTO,
        group=CREW,
        metavar="auto|none|K",
        help="each worker sees one of this host's accelerators: of all, of none, or of the first K",
        more="[Accelerators](../how-to/accelerators.md)",
    )
    metrics: str = option(
        ListenAddress(alone=f"127.0.0.1:{METRICS_PORT}"),
        "",
        usual=f"off; without an address `127.0.0.1:{METRICS_PORT}`",
        group=WATCHING,
        metavar="ADDR:PORT",
        help="serve the run's numbers at /metrics, for Prometheus",
        more="[Which numbers](metrics.md). Port 0: any that is free",
    )
    tensorboard: str = option(
        Text(),
        "",
        group=WATCHING,
        metavar="DIR",
        help="write the run's curves there, for TensorBoard",
        more="What the script records, throughput, goodput, recoveries, checkpoints. Needs "
        "`pip install 'holdfast[tensorboard]'`",
    )
    dashboard: int | None = option(
        Whole(0, 65535, alone=str(DASHBOARD_PORT)),
        None,
        usual=f"off; without a port {DASHBOARD_PORT}",
        group=WATCHING,
        metavar="PORT",
        help="show the run in the browser, for as long as the agent runs",
        more="On 127.0.0.1 only, and only to be read: [the dashboard](../how-to/dashboard.md)",
        hint="ports are from 1 to 65535; 0 is any that is free",
    )
    stuck_after_s: float = option(
        Duration(0.5, 7 * DAY_S, never=True),
        5.0,
        group=PATIENCE,
        metavar="T",
        help="a worker hangs that stands still in a shard for longer than this, or none",
        more="It also has to be much longer than any shard before; a batch may take three times as long to come: "
        "[who hangs](../explanation/detection.md)",
    )
    hang_after_s: float = option(
        Duration(0.5, 7 * DAY_S, never=True),
        120.0,
        group=PATIENCE,
        metavar="T",
        help="the same for the script's lines outside shards, or none",
        more="Also for a worker's first shards, and where other threads still compute. "
        "`none`: nobody is ended for hanging",
    )
    strikes: int = option(
        Whole(1, COUNT_MAX),
        3,
        group=PATIENCE,
        metavar="N",
        help="a slot stays empty after its workers were found wrong this many times",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What workers read as well: each becomes a variable of their environment."""

    servers: int = option(
        Whole(0, SERVERS_MAX),
        0,
        group=SERVING,
        metavar="N",
        help="how many parameter servers this host has, for a script whose mode or embedding tables use them",
        more="A host with `--servers` and without workers [only serves](../how-to/parameter-servers.md#several-hosts)",
        hint="a server is a process: 3 of them outlive the loss of one",
    )
    replicas: int = option(
        Whole(0, REPLICAS_MAX),
        0,
        usual=f"{REPLICAS}, or as many as there are servers",
        group=SERVING,
        metavar="R",
        help="how many servers have each slice of the parameters",
        more="A slice outlives the loss of fewer than half of them. On several hosts, of the servers of all hosts",
        hint="3 replicas outlive the loss of one server, 5 of two",
    )
    ranks: int = option(
        Whole(1, RANKS_MAX),
        1,
        group=CREW,
        metavar="G",
        help="each worker is a group of this many processes that shard one model among themselves",
        more="A power of two that divides the shards: [sharded models](../how-to/sharded-models.md)",
        hint="1, 2, 4, ...: as many processes as the model needs to be spread over",
    )
    horovod: str = option(
        Switch(),
        "",
        group=GENERAL,
        help="`import horovod` in the script finds holdfast.horovod",
        more="[From Horovod](../how-to/from-horovod.md)",
    )
    late_after_s: float = option(
        Duration(0.1, 7 * DAY_S, never=True),
        0.5,
        group=PATIENCE,
        metavar="T",
        help="the others go on without a worker whose shards come this much later than theirs, or none",
        more="It is [left behind](../explanation/membership.md#late-and-left-behind) and comes back when it can; later "
        "where its shards usually take long or the state is large",
    )
    rebalance: str = option(
        Choice(REBALANCE),
        ON,
        group=PATIENCE,
        help="shards move from slow workers to fast ones, or every worker keeps as many",
        more="That changes nothing in the result; `off` is for measuring what it is worth",
    )
    lease_s: float = option(
        Duration(0.2, 3600.0),
        2.0,
        group=PATIENCE,
        metavar="T",
        help="the others go on without a worker that the ledger does not hear from for this long",
        more="etcd has whole seconds, at least 2",
        hint="2 s suits most runs; a longer lease finds a hung worker later",
    )
    audit: float = option(
        Fraction(0, 1),
        0.0,
        group=PATIENCE,
        metavar="F",
        help="two workers compute this part of the shards, and compare",
        more="[How](../explanation/audits.md)",
        hint="give the fraction of shards, from 0 (none) to 1 (all of them)",
    )
    audit_every: int = option(
        Whole(0, AUDIT_EVERY_MAX),
        100,
        group=PATIENCE,
        metavar="N",
        help="workers compare their whole state once in N steps; 0: never",
    )
    ledger: str = option(
        Text(),
        "",
        group=HOSTS,
        metavar="URL",
        help="etcd://A:2379,B:2379,C:2379: the run is on several hosts",
        more="`etcds://` for TLS. Needs `--run` and `--keys`. `slurm`: the first nodes of the "
        "[Slurm job](../how-to/slurm.md) serve it",
    )
    keys: str = option(Text(), "", group=HOSTS, metavar="DIR", help="the run's keys, made by `holdfast keys create`")
    host: str = option(
        Text(),
        "",
        usual="the host's own name",
        group=HOSTS,
        metavar="NAME",
        help="this host's name in the run",
        more="Each host needs another",
    )
    outage_s: float = option(
        Duration(10.0, DAY_S),
        300.0,
        group=HOSTS,
        metavar="T",
        help="with --ledger: workers train on without it for this long",
        more="An agent also waits as long at the end, to write down there that the run is finished",
        hint="5 minutes suit most runs; workers pause when the ledger is away for longer",
    )
    listen: str = option(
        Text(),
        "",
        usual="with `--ledger`, the address towards it",
        group=HOSTS,
        metavar="HOST[:FIRST-LAST]",
        help="listen on TCP, on these ports",
        more="IPv6 as `[::1]:29500-29599`. On one host this means the network path; `--path network` alone listens on "
        "127.0.0.1 and any free port. Workers and spares need a port each, on several hosts the agent one more",
    )
    advertise: str = option(
        Text(),
        "",
        usual="where it listens",
        group=HOSTS,
        metavar="HOST",
        help="the address that workers of other hosts dial",
    )
    path: str = option(
        Choice(PATHS),
        "auto",
        group=HOSTS,
        help="how gradients travel",
        more="`network` is TCP; `auto` is shared memory, and between hosts one stream for each. With `process-group`"
        " [torch.distributed](../how-to/accelerators.md#process-groups) moves them, by NCCL or gloo",
    )
    numerics: str = option(
        Choice(NUMERICS),
        REFUSE,
        group=HOSTS,
        help="what to do about a worker whose arithmetic gives other bits",
        more="`warn` lets it train, and the run is [no longer exact](../guarantees.md); audits are off then",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What those who save read."""

    uri: str = option(
        Text(),
        "",
        flag="--checkpoint",
        usual="the run's directory; on several hosts nowhere",
        group=SAVING,
        metavar="URI",
        help="where checkpoints are kept, or none",
        more="A directory, `s3://`, `gs://`, `az://`, `hdfs://`: [checkpoints](../how-to/checkpoints.md)",
    )
    every: str = option(
        Text(),
        "auto",
        flag="--save-every",
        group=SAVING,
        metavar="N",
        help="how often: 500 (steps), 30s, 10min, 2h or auto",
    )
    keep: int = option(
        Whole(1, COUNT_MAX),
        3,
        group=SAVING,
        metavar="K",
        help="the newest K stay",
        hint="at least the newest checkpoint is kept: keep 1 or more",
    )
    keep_every: int = option(
        Whole(0, STEPS_MAX),
        0,
        group=SAVING,
        metavar="N",
        help="those of every N steps stay too",
        hint="give a number of steps, or 0 for no others",
    )
    keep_best: str = option(
        Text(),
        "",
        group=SAVING,
        metavar="METRIC:min",
        help="the best by a recorded metric stays too, :min or :max",
        more="A value given to `run.record` that is the best so far "
        "[is saved at once](../how-to/evaluate-and-keep-the-best.md)",
    )
    notice_s: float = option(
        Duration(1.0, 3600.0),
        25.0,
        group=SAVING,
        metavar="T",
        help="workers that are asked to leave may take this long to save",
        hint="from 1 s to 1 h: as long as the machine gives notice before it goes",
    )
    memory: str = option(
        Text(),
        "",
        usual="none",
        group=SAVING,
        metavar="plain|K+M",
        help="copies of the newest snapshot in hosts' memory, whole or erasure-coded (4+2)",
        more="[How](../how-to/keep-snapshots-in-memory.md)",
    )


RUN_OPTIONS = (AgentOptions, WorkerOptions, CheckpointOptions)
