"""Slurm: one agent a node, and a ledger that the first nodes of the job serve themselves.

    step.py         what Slurm says of this step: pure
    first_nodes.py  etcd on the first nodes, found by all of them
    ledger_copy.py  what of it outlives the job

A worker that srun starts without an agent is for placement/launched.py.
"""
