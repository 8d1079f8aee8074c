"""Settings for all tests. Machines are slow and shared, so no test of a property has a deadline of its own."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("holdfast")
