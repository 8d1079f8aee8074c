"""What a script holds: join, the run and its steps, what is recorded and evaluated, and how a script ends."""
