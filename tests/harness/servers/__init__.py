"""Parameter servers as real processes, for tests and benchmarks: an embedded ledger, servers that can be killed."""
