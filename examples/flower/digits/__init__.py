"""Handwritten digits, learned with clients of which some may be hostile."""
