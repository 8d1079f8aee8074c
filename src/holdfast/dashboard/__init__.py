"""The page that shows a run: a small server on this host's loopback, and what the browser gets. No torch."""
