"""Kubernetes: manifests for a run, what a pod starts, and progress for Kubeflow's Trainer.

manifest.py      the objects of a run, from a few settings: pure
yaml_text.py     objects as YAML: pure
containerfile.py how an image is made
pod.py           the entry point of a pod: keys, the ledger, and then `holdfast run` in its place
progress.py      how far the run is, where Kubeflow's Trainer wants to know
"""
