"""The canonical sum over shards: its shape, and moving what it adds through shared memory or a network."""
