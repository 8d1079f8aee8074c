"""Long drills of our own, as plans on the engine of `holdfast.drills`: run by `make soak`, and in short by tests."""
