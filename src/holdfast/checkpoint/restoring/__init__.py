"""How a checkpoint is found, verified and read."""
