"""Flower is imported here, once: what its dependencies warn of at import is not ours to mend. It asks nobody."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("flwr") is None:  # it wants Python 3.11
    collect_ignore_glob.append("flower/*")
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("flwr.clientapp", "flwr.serverapp.strategy"):
            importlib.import_module(name)
