"""A run on several hosts, as its agents see it: who is there, and the ring in which they hear each other."""
