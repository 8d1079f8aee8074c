"""Importing this lets TensorFlow and JAX compute with one thread, unless a person has said otherwise.

Bits depend on the number of threads, and both packages read it from the environment when they begin to compute: before
holdfast's own functions are called, since the model is built first. It imports neither.
"""

from __future__ import annotations

import os

from holdfast.placement.early_variables import set_unless_given

INTRA, INTER, JAX = "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"
_XLA = "--xla_cpu_multi_thread_eigen=false"

for _name in (INTRA, INTER, JAX):
    set_unless_given(_name, "1")
if os.environ[JAX] == "1":
    set_unless_given("XLA_FLAGS", _XLA)


def threads_said(name: str) -> int:
    """By the environment; 0: nothing, or nothing that is a number."""
    said = os.environ.get(name, "")
    return int(said) if said.isdecimal() else 0
