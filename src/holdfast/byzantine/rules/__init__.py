"""Rules that combine updates of which f may be anything: each with its condition, its bound and its paper."""
