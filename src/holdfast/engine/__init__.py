"""What trains: the step engine, which needs neither a generator nor the main thread nor a process of its own."""
