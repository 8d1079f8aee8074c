"""Accelerators as torch has them: their streams and events, their pinned memory, and which of them there are.

Knows torch's accelerators in general and no maker's in particular. What is on the CPU never comes here.
"""
