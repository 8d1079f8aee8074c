"""Trainers that take a DataLoader and own their loop: the loader as the run's data, and the steps as they come."""
