"""What a shard contains: index arithmetic, seeds, and the fetching of samples. Same bits wherever it happens."""
