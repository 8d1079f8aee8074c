"""Holdfast keeps deep-learning training going, exactly, while the machines, networks and disks under it fail."""
