"""Where a worker is, and how its process runs the script: what it and its agent both know, below both."""
