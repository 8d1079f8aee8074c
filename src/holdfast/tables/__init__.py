"""Embedding tables: rows by 64-bit id, trained row by row."""
