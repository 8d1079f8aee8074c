"""A run as it is watched: its numbers at /metrics, where its time went, its events, while a worker dies."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from harness import DEADLINE_S, TRAIN, Training, holdfast, training
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.spending import CATEGORIES, COMPUTING, DOWN, RECOVERING
from holdfast.events import read_events
from holdfast.observe.accounting import Accounting

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
STEPS = 12
SCRIPT = [TRAIN, "--steps", str(STEPS)]


def numbers(run: Training) -> dict[tuple[str, ...], float]:
    found = re.search(r"metrics: (http://127\.0\.0\.1:\d+/metrics)", run.log())
    assert found
    with urllib.request.urlopen(found[1], timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_a_run_that_loses_a_worker_is_seen_from_outside(tmp_path: Path) -> None:
    with training(tmp_path, "--workers", "2", "--metrics", ":0", script=SCRIPT, held_at=6) as run:
        run.wait(lambda: run.at(6, workers=2), "step 6", DEADLINE_S)
        before = numbers(run)
        assert before["holdfast_members",] == 2 and before["holdfast_failures_total",] == 0
        run.kill("w1.1")
        run.let_go(STEPS - 1)
        run.wait(lambda: run.at(STEPS - 1, workers=1), "the last step", DEADLINE_S)
        run.wait(lambda: numbers(run)["holdfast_recovery_seconds_count",] == 1, "the recovery being told")
        after = numbers(run)
        assert after["holdfast_failures_total",] == 1 and after["holdfast_view",] > before["holdfast_view",]
        assert after["holdfast_worker_suspicion", "w0.1"] >= 0
        run.let_go()
        run.finish(DEADLINE_S)
    assert re.search(r"holdfast \| goodput \d+\.\d %; of the workers' .*computing", run.log())
    shown = json.loads(holdfast("status", "r", "--json", home=run.home).stdout)
    assert set(shown["time"]["seconds"]) == set(CATEGORIES) and 0 < shown["time"]["goodput"] < 1
    events = read_events(run.directory.events)
    accounting = Accounting()
    for event in events:
        accounting.feed(event)
    each = accounting.workers()
    started = {event["worker"]: event["t"] for event in events if event["kind"] == "worker_started"}
    ended = {event["worker"]: event["t"] for event in events if event["kind"] == "worker_exited"}
    assert {"w0.1", "w1.1"} <= set(ended)
    for worker, end in ended.items():
        assert each[worker].total_s == pytest.approx(end - started[worker], abs=0.05)
    assert each["w0.1"].seconds[RECOVERING] > 0 and each["w0.1"].seconds[COMPUTING] > 0
    assert accounting.run().seconds[DOWN] >= 0
    told = [event for event in events if event["kind"] == "spent" and event["who"] == "w0.1"]
    assert told[-1]["bytes"] > 0 and told[-1]["memory_bytes"] > 0
    # Its own account covers its life since it joined; before that it imports and builds.
    registered = next(event["t"] for event in events if event["kind"] == "registered" and event["who"] == "w0.1")
    assert sum(told[-1]["seconds"].values()) >= told[-1]["t"] - registered - 0.05
