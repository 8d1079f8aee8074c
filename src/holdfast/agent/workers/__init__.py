"""The processes of an agent's workers: how they are started, watched and ended."""
