"""Named, asynchronous collectives between the members of a view, for any framework. See engine.py."""
