"""The event vocabulary: what agents and workers write down about a run, and the fields each event has.

Every event also has `t` (seconds since 1970), `who` (a worker id or "agent") and `kind`.
"""

from __future__ import annotations

from typing import Final

OTHERS_PARTS = "parts of other workers have not come"  # why a state is not saved, by a worker that wrote its own

# kind -> its fields. A field that does not apply is left out.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    # written by the agent
    "agent_started": ("pid", "took_over", "workers", "spares", "script"),
    "agent_stopped": ("reason", "exit_code"),
    "worker_started": ("worker", "pid"),
    "worker_exited": ("worker", "pid", "exit_code", "signal", "reason", "step"),
    "server_started": ("server", "pid"),
    "server_exited": ("server", "pid", "exit_code", "signal", "reason"),
    "server_hung": ("server", "reason", "seconds", "stacks"),  # by its heartbeats; it is ended
    # by what other servers measure, on whose host that was found: others lead its slices
    "server_slow": ("server", "times", "noticed_by", "reason"),
    "server_no_longer_slow": ("server",),
    "placed": ("slice", "primary", "servers", "epoch", "reason"),  # a slice is on these servers
    "failover": ("slice", "primary", "was", "epoch", "reason"),  # a slice has another primary
    # no server has them any more; the checkpoint from which all begin anew, if there is one
    "slices_lost": ("slices", "step"),
    "slice_moves": ("slice", "servers", "primary", "reason"),  # where it should be from now on, and who should lead
    "hung": ("worker", "step", "activity", "seconds", "phi", "reason", "killed", "stacks"),
    # everybody waits for somebody who waits too: who is in the way, and is ended if that is safe; who waits for what
    "standstill": ("worker", "step", "seconds", "waits", "reason", "killed", "stacks"),
    "host_silent": ("host", "phi", "seconds", "noticed_by"),  # its agent does not beat any more
    "host_back": ("host", "seconds", "noticed_by"),  # it does again, after so long
    "host_given_up": ("host", "workers", "phi", "seconds", "noticed_by", "reason"),  # before their leases ran out
    "scaled": ("workers", "was"),
    "run_finished": ("step", "digest", "exit_code", "in_ledger"),
    # written by workers
    "registered": ("address",),
    "view": ("view", "members", "reason", "step", "own"),  # own: each worker has one for itself
    "lost": ("view", "peer", "reason", "step"),
    "recovered": ("view", "step", "duration_s", "recomputed_shards"),
    "carried": ("view", "library", "duration_s"),  # a process group stands: gradients go by it, once it does for all
    "joined": ("view", "step", "duration_s", "bytes"),
    "progress": ("view", "step", "steps", "metrics", "samples_per_s", "workers"),
    "recorded": (
        "step",
        "metrics",
        "best",
    ),  # outside the shards; by each host's first two workers
    "early_stop": ("step", "reason"),  # the script ends the training; by the same
    "rebalanced": ("view", "step", "shards", "paces_s"),  # shards follow the workers' paces
    "slow": ("step", "worker", "times", "since_s", "costs", "shards"),  # a worker, against the median
    "no_longer_slow": ("step", "worker"),
    "late": ("worker", "step", "waited_s", "expected_s"),  # the others go on without it; by the one who proposed it
    "caught_up": ("worker", "step", "duration_s", "behind"),  # who was late has the state again, `behind` steps later
    # where its time went so far, what it is in, gradient bytes reduced so far, and the memory it has
    "spent": ("seconds", "doing", "bytes", "memory_bytes"),
    "waiting": ("step", "reason"),  # it does not get on, and why
    "checkpoint": ("step", "uri", "bytes", "duration_s", "held_s"),  # it has committed one
    # parameter servers: its updates since the last such event, by how many of others came between
    # (how many rounds a step of its was ahead of the first unfinished one at most, and how many are allowed; how many
    # acknowledged updates its parameters lacked at most)
    "staleness": ("updates", "ahead", "bound", "missing"),
    # a state of all slices, for a checkpoint; how many steps before the next one are not in it
    "captured": ("versions", "next", "left"),
    # at step 0, although the run was further: nobody has the state, and there is no checkpoint. `keeps`: it keeps them
    "started_over": ("view", "step", "keeps"),
    "resumed": ("step", "uri", "bytes", "duration_s"),  # from a checkpoint: no worker was left
    "storage_down": ("uri", "reason"),  # training goes on; the newest snapshot waits in memory
    "storage_up": ("uri", "down_s"),
    "rewound": ("number", "step", "passed", "reason"),  # the run goes back to `step` or before; by all workers
    "skipped": ("step", "reason"),  # its update is not applied
    # written by every member that sees it: two workers disagree on bits that have one value
    "corruption": ("step", "what", "where", "digests", "liars", "decided", "good"),
    # by each host's first worker: of how many shards of each worker the robust rule left out how many, so far, and how
    # far that is from what chance explains; 1: it is evicted
    "left_out": ("step", "shards", "left_out", "suspicion"),
    # written by every member: more than half of them distrust this one, and it is evicted
    "distrusted": ("step", "worker", "reason", "shards", "left_out"),
    # written by every member that sees it: workers differ, and it is the script's doing
    "script_mistake": ("step", "where", "reason", "hint"),
    # written by the first member: a shard gives other bits each time that it is computed. Training goes on
    "inexact": ("step", "reason", "hint"),
    # written by parameter servers: what one has decided for a slice
    "slice": ("slice", "decision", "reason"),
    # by them, now and then: each slice's role here, its epoch and the entries of its log; how many it leads; entries
    # and payload bytes of all its logs; updates acknowledged so far; how long each other server takes to confirm
    "serving": ("slices", "leads", "entries", "log_bytes", "updates", "lags_s"),
    # written by both
    "ledger_down": ("reason",),
    "ledger_up": ("down_s",),
    # written by workers
    "evicted": ("view", "reason"),
    "left": ("step", "reason", "uri"),  # and where the state of that step is saved, if it is
    "cut_short": ("step", "steps", "uri"),  # the script ended in the middle of the training; where its state is saved
    "unsaved": ("step", "reason", "saved", "uri"),  # its last state; the newest that is saved, and where
    "reached": ("step", "digest", "view"),  # the end of a loop; the script may go on
    "finished": ("step", "digest", "view"),  # the end of the script
    "failed": ("reason", "place", "step"),  # the script's line, and the step that it was in
    "warning": ("text",),
}
