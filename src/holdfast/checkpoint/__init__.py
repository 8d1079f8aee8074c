"""Checkpoints: snapshots that reached storage, whole or not at all. See docs/decisions/0007."""
