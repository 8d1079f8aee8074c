"""Options of Horovod's launcher that are taken so that command lines need not change, and have no effect here."""

from __future__ import annotations

WITH_A_VALUE = (
    *("start-timeout", "elastic-timeout", "gloo-timeout-seconds", "stall-check-shutdown-time-seconds"),
    *("network-interface", "network-interfaces", "output-filename", "log-level", "thread-affinity"),
    *("fusion-threshold-mb", "cycle-time-ms", "cache-capacity", "num-nccl-streams", "autotune-log-file"),
    *("autotune-warmup-samples", "autotune-steps-per-sample", "autotune-bayes-opt-max-samples"),
    "autotune-gaussian-process-noise",
)
WITHOUT_ONE = (
    *("gloo", "mpi", "tcp", "verbose", "stall-check", "disable-cache", "autotune", "no-autotune"),
    *("hierarchical-allreduce", "no-hierarchical-allreduce", "hierarchical-allgather", "no-hierarchical-allgather"),
    *("torus-allreduce", "no-torus-allreduce", "timeline-mark-cycles", "no-timeline-mark-cycles"),
    *("mpi-threads-disable", "no-mpi-threads-disable", "log-with-timestamp", "log-without-timestamp"),
    "prefix-output-with-timestamp",
)
