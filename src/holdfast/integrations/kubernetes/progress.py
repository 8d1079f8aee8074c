"""How far the run is, where Kubeflow's Trainer wants to know: in `status.trainerStatus` of a TrainJob.

Its controller sets variables in the pods. With KUBEFLOW_TRAINER_SERVER_URL the status is posted there, over TLS with
the authority and the token that two more name; with KUBEFLOW_TRAINER_STATUS_FILE it is written to that file. Nothing
of it matters to the training: what does not arrive is said once, and tried again with the next.

Thread `holdfast-kubeflow` reads the run's events and reports; `close` reports a last time.
"""

from __future__ import annotations

import json
import math
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.events import EventReader
from holdfast.observe.fold import RunRecord
from holdfast.placement.directory import RunDirectory, replace_file

URL, AUTHORITY, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
FILE = "KUBEFLOW_TRAINER_STATUS_FILE"
PERIOD_S = 5.0
POST_S = 10.0
METRICS_MAX = 100


def is_wanted(variables: Mapping[str, str]) -> bool:
    return bool(variables.get(URL) or variables.get(FILE))


def status_of(record: RunRecord, *, now: float, began: tuple[float, int]) -> dict[str, Any]:
    """What a TrainJob shows. `began`: when this agent saw the first step, and which; the pace since then tells the
    rest. Pure."""
    status: dict[str, Any] = {"lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))}
    finished = record.finished is not None
    if record.steps or finished:
        status["progressPercentage"] = 100 if finished else min(99, 100 * record.step // max(record.steps, 1))
    steps, took_s = record.step - began[1], now - began[0]
    if finished:
        status["estimatedRemainingSeconds"] = 0
    elif record.steps and steps > 0 and took_s > 0:
        status["estimatedRemainingSeconds"] = math.ceil((record.steps - record.step) * took_s / steps)
    values = {"step": record.step, **record.metrics}
    status["metrics"] = [{"name": name, "value": _spelled(value)} for name, value in values.items()][:METRICS_MAX]
    return status


def _spelled(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class KubeflowProgress:
    """Reports for as long as the agent runs. Of several hosts, the one whose worker writes the steps down reports."""

    def __init__(self, directory: RunDirectory, variables: Mapping[str, str]) -> None:
        self._reader = EventReader(directory.events)
        self._record = RunRecord()
        self._variables = variables
        self._began: tuple[float, int] | None = None
        self._reported: tuple[int, bool] | None = None
        self._told = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-kubeflow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(POST_S + 1.0)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._report()
        self._report()

    def _report(self) -> None:
        for event in self._reader.stream():
            self._record.feed(event)
        record, now = self._record, time.time()
        if self._began is None and record.step:
            self._began = (now, record.step)
        news = (record.step, record.finished is not None)
        if news == self._reported or news == (0, False):
            return
        status = status_of(record, now=now, began=self._began or (now, record.step))
        try:
            if path := self._variables.get(FILE):
                replace_file(Path(path), json.dumps(status))
            if url := self._variables.get(URL):
                _post(url, status, self._variables)
        except (OSError, ValueError) as error:
            if not self._told:
                self._told = True
                print(f"holdfast: Kubeflow's Trainer does not hear how far the run is: {error}", file=sys.stderr)
            return
        self._reported, self._told = news, False


def _post(url: str, status: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    headers = {"Content-Type": "application/json"}
    if token := variables.get(TOKEN):
        headers["Authorization"] = f"Bearer {Path(token).read_text().strip()}"  # read each time: it is renewed
    request = urllib.request.Request(url, json.dumps({"trainerStatus": status}).encode(), headers, method="POST")
    context = ssl.create_default_context(cafile=variables.get(AUTHORITY) or None) if url.startswith("https:") else None
    with urllib.request.urlopen(request, timeout=POST_S, context=context):
        pass
