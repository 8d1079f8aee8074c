"""What holdfast.join builds: the one place where ledger, membership, reduction, state and data are wired together."""
