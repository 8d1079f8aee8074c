"""How a snapshot gets to storage behind the training, when, and which checkpoints stay."""
