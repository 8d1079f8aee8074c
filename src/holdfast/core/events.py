"""The event vocabulary: what agents and workers write down about a run, and the fields each event has.

Every event also has `t` (seconds since 1970), `who` (a worker id or "agent") and `kind`.
"""

from __future__ import annotations

from typing import Final

# kind -> its fields. A field that does not apply is left out.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    # written by the agent
    "agent_started": ("pid", "took_over", "workers", "spares", "script"),
    "agent_stopped": ("reason", "exit_code"),
    "worker_started": ("worker", "pid"),
    "worker_exited": ("worker", "pid", "exit_code", "signal", "reason"),
    "hung": ("worker", "step", "activity", "seconds", "phi", "reason", "killed", "stacks"),
    "scaled": ("workers", "was"),
    "run_finished": ("step", "digest", "exit_code"),
    # written by workers
    "registered": ("address",),
    "view": ("view", "members", "reason", "step"),
    "lost": ("view", "peer", "reason", "step"),
    "recovered": ("view", "step", "duration_s", "recomputed_shards"),
    "joined": ("view", "step", "duration_s", "bytes"),
    "progress": ("view", "step", "steps", "metrics", "samples_per_s", "workers"),
    "rebalanced": ("view", "step", "shards", "paces_s"),  # shards follow the workers' paces
    "slow": ("step", "worker", "times", "since_s", "costs", "shards"),  # a worker, against the median
    "no_longer_slow": ("step", "worker"),
    # where its time went so far, what it is in, gradient bytes reduced so far, and the memory it has
    "spent": ("seconds", "doing", "bytes", "memory_bytes"),
    "waiting": ("step", "reason"),  # it does not get on, and why
    "checkpoint": ("step", "uri", "bytes", "duration_s", "held_s"),  # it has committed one
    "resumed": ("step", "uri", "bytes", "duration_s"),  # from a checkpoint: no worker was left
    "storage_down": ("uri", "reason"),  # training goes on; the newest snapshot waits in memory
    "storage_up": ("uri", "down_s"),
    "rewound": ("number", "step", "passed", "reason"),  # the run goes back to `step` or before; by all workers
    "skipped": ("step", "reason"),  # its update is not applied
    # written by every member that sees it: two workers disagree on bits that have one value
    "corruption": ("step", "what", "where", "digests", "liars", "decided", "good"),
    # written by both
    "ledger_down": ("reason",),
    "ledger_up": ("down_s",),
    # written by workers
    "evicted": ("view", "reason"),
    "left": ("step", "reason"),
    "reached": ("step", "digest", "view"),  # the end of a loop; the script may go on
    "finished": ("step", "digest", "view"),  # the end of the script
    "failed": ("reason",),
    "warning": ("text",),
}
