"""C that is compiled where it runs; nothing here knows what it computes."""
