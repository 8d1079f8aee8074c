"""Who takes part, who computes what, and what happens when someone fails: decided in machine.py, acted on elsewhere."""
