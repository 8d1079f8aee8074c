"""Checkpoints as other programs' files, and back."""
