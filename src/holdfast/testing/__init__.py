"""Tools to test training under failures: a seeded simulator of the protocol, and fault runs on real processes."""
