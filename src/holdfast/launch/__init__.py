"""The agent: starts, watches and replaces the workers of a host, and serves them the embedded ledger."""
