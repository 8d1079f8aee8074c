"""The agent of a host: starts workers, watches them, replaces them, and takes part in the ring of a run's hosts."""
