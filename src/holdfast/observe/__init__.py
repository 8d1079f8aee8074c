"""A run as its events tell it: one fold over the log, and what is shown of it. No torch."""
