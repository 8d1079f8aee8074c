"""What a checkpoint is: its parts, the manifest that commits it, and the record of whose a place is."""
