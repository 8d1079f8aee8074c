"""What workers print: followed by the agent, and read again from their logs."""
