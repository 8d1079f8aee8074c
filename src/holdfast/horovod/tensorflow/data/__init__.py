"""Horovod's data service: batches made by the workers of another run. See compute_service.py."""
