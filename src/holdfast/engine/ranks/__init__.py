"""Workers that are groups of ranks, which shard one model among themselves: decision 19 in docs/decisions."""
