"""What a worker does about losses, lateness, wrong bits and steps that go wrong; and how it leaves."""
