"""The state of a step: snapshots, their bytes and digests, and how they move between workers. Nothing is unpickled."""
