"""Datasets that give their samples one after the other: read by one worker, and handed to all with each step's mean."""
