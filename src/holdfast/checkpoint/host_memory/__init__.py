"""Snapshots in the memory of hosts, whole or erasure-coded, and how they are gathered again."""
