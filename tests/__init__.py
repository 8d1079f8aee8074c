"""Tests, and what only they need: `harness` (servers, gates, simulator), `trainings` (scripts), `soak` (drills)."""
