"""A run in numbers: what is rendered of its record, read by Prometheus' own parser; and the server at /metrics."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from holdfast.core.errors import ConfigError
from holdfast.core.events import KINDS
from holdfast.core.options.kinds import split_address
from holdfast.core.spending import CATEGORIES
from holdfast.dashboard.metrics_server import MetricsServer, RunMetrics
from holdfast.events import EventLog
from holdfast.observe.fold import RunRecord, record_of
from holdfast.observe.prometheus import render
from holdfast.placement.directory import RunDirectory


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values…) -> value. Every name is ours, has its type and help, and stands there once."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("holdfast_") and family.documentation and family.type != "unknown"
        for sample in family.samples:
            key = (sample.name.removeprefix("holdfast_"), *sample.labels.values())
            assert key not in found
            found[key] = sample.value
    return found


def event(t: float, who: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "who": who, "kind": kind, **fields}


RUN = [
    event(0.0, "agent", "agent_started", workers=2, spares=0),
    event(0.0, "agent", "worker_started", worker="w0.1"),
    event(0.0, "agent", "worker_started", worker="w1.1"),
    event(2.0, "w0.1", "view", view=1, members=["w0.1", "w1.1"]),
    event(10.0, "w0.1", "progress", step=5, steps=100, samples_per_s=320.5, metrics={"loss": 0.5, 'a"b\\\n': "nan"}),
    event(10.0, "w0.1", "spent", seconds={"computing": 8.0}, doing="computing", bytes=1000, memory_bytes=5000),
    event(10.0, "w1.1", "spent", seconds={"computing": 8.0}, doing="waiting", bytes=900, memory_bytes=6000),
    event(11.0, "agent", "worker_exited", worker="w1.1", reason="killed", signal=9),
    event(11.1, "w0.1", "view", view=2, members=["w0.1"]),
    event(11.2, "w0.1", "recovered", view=2, step=5, duration_s=0.03),
    event(11.3, "w2.1", "recovered", view=2, step=5, duration_s=0.2),
    event(12.0, "w0.1", "checkpoint", step=6, bytes=4096, duration_s=0.5, held_s=0.002),
    event(13.0, "w0.1", "recovered", view=3, step=6, duration_s=7.0),
    event(14.0, "w0.1", "rewound", number=1, step=3),
    event(15.0, "w0.1", "progress", step=4, steps=100, samples_per_s=300.0),
    event(15.5, "w0.1", "recorded", step=7, metrics={"val_loss": 0.75}, best=True),
    event(16.0, "w0.1", "progress", step=8, steps=100, samples_per_s=310.0),
]


def test_the_numbers_of_a_run() -> None:
    record = record_of(RUN)
    told = parsed(render(record, 20.0, run="first", alive=["w0.1"], suspicion={"w0.1": (2, 4.5)}))
    expected = {
        ("run_info", "first"): 1,
        ("step",): 8,
        ("target_steps",): 100,
        ("steps_total",): 9,
        ("samples_per_second",): 310.0,
        ("recorded", "loss"): 0.5,
        ("view",): 2,
        ("members",): 1,
        ("workers_wanted",): 2,
        ("workers_alive",): 1,
        ("failures_total",): 1,
        ("rewinds_total",): 1,
        ("worker_suspicion", "w0.1"): 2,
        ("worker_suspicion_phi", "w0.1"): 4.5,
        ("worker_memory_bytes", "w0.1"): 5000,
        ("reduced_bytes_total",): 1900,
        ("recovery_seconds_count",): 2,
        ("recovery_seconds_sum",): 7.2,
        ("recovery_seconds_bucket", "0.25"): 1,
        ("recovery_seconds_bucket", "+Inf"): 2,
        ("checkpoint_step",): 6,
        ("checkpoint_bytes",): 4096,
        ("checkpoint_age_seconds",): 8.0,
        ("checkpoint_duration_seconds_sum",): 0.5,
        ("checkpoint_held_seconds_count",): 1,
        ("events_total", "recovered"): 3,
        ("last_event_timestamp_seconds",): 16.0,
    }
    assert {key: told[key] for key in expected} == pytest.approx(expected)
    strange = told["recorded", 'a"b\\\n']
    assert strange != strange
    assert 0 < told[("goodput_ratio",)] < 1
    assert sum(told["time_seconds", category] for category in CATEGORIES) == pytest.approx(20.0 + 20.0)
    assert sum(told["worker_time_seconds", "w0.1", category] for category in CATEGORIES) == pytest.approx(20.0)


def test_what_was_recorded_outside_the_shards_is_there_too() -> None:
    record = record_of(RUN)
    assert parsed(render(record, 20.0))["recorded", "val_loss"] == 0.75


def test_every_number_has_its_line() -> None:
    record = record_of(RUN)
    text = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    lines = [line for line in render(record, 20.0).splitlines() if line.startswith("# TYPE ")]
    told = [tuple(line.split()[2:]) for line in lines]
    assert [name for name, kind in told if f"| `{name}` | {kind} |" not in text] == [] and len(told) == 41


def test_before_anything_happened_there_are_numbers_too() -> None:
    told = parsed(render(RunRecord(), 5.0))
    assert told[("step",)] == 0 and told["recovery_seconds_bucket", "+Inf"] == 0
    assert ("goodput_ratio",) not in told and ("checkpoint_age_seconds",) not in told


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    events=st.lists(
        st.sampled_from(sorted(KINDS)).flatmap(
            lambda kind: st.fixed_dictionaries(
                {"t": st.floats(0, 1e9), "who": st.sampled_from(["agent", "w0.1", "?"]), "kind": st.just(kind)},
                optional=dict.fromkeys(KINDS[kind], anything),
            )
        ),
        max_size=12,
    )
)
def test_whatever_the_events_are_the_text_is_well_formed(events: list[dict[str, Any]]) -> None:
    record = record_of(events)
    parsed(render(record, 1e9, run="r", alive=["w0.1"]))


def run_in(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, "first")
    directory.create()
    directory.write({"workers": 1})
    return directory


def answer(url: str, **headers: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.read().decode()


def test_the_server_reads_on_at_every_question(tmp_path: Path) -> None:
    directory = run_in(tmp_path)
    log = EventLog(directory.events / "w0.1.jsonl", "w0.1")
    server = MetricsServer(directory, "127.0.0.1", 0)
    try:
        for step in (3, 4):
            log.write("progress", step=step, steps=10)
            status, kind, text = answer(server.url)
            assert status == 200 and kind.startswith("text/plain; version=0.0.4")
            assert parsed(text)[("step",)] == step
        assert answer(server.url.replace("/metrics", "/"))[0] == 404
        assert answer(server.url, Host="evil.example:80")[0] == 403
    finally:
        server.close()
    assert parsed(RunMetrics(directory).text())[("step",)] == 4  # what a dashboard mounts


def test_an_address_that_is_taken_is_said_before_the_run_starts(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"--metrics cannot listen .* in use")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        MetricsServer(run_in(tmp_path), "127.0.0.1", taken.getsockname()[1])
    with closing(MetricsServer(run_in(tmp_path), "127.0.0.1", 0)) as server:
        url = server.url
        assert not url.endswith(":0/metrics") and answer(url)[0] == 200
    with pytest.raises(urllib.error.URLError):
        answer(url)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("9000", ("127.0.0.1", 9000)),
        (":0", ("127.0.0.1", 0)),
        ("10.0.0.1:9464", ("10.0.0.1", 9464)),
        ("[::1]:9000", ("::1", 9000)),
    ],
)
def test_where_it_listens(given: str, expected: tuple[str, int]) -> None:
    assert split_address(given, "--metrics") == expected


def test_the_script_is_no_address() -> None:
    for text, sentence in (("train.py", "which is not an address"), ("127.0.0.1:70000", "70000 is not a port")):
        with pytest.raises(ConfigError, match=sentence):
            split_address(text, "--metrics")


def test_parameter_servers_in_numbers() -> None:
    told = {"slices": {"parameters/0": ["primary", 3, 4]}, "leads": 1, "log_bytes": 8192, "updates": 50}
    record = record_of(
        [
            event(0.0, "agent", "agent_started", workers=1, spares=0),
            event(0.1, "agent", "server_started", server="s0.1@a", pid=1),
            event(0.1, "agent", "server_started", server="s1.1@a", pid=2),
            event(1.0, "s0.1@a", "serving", entries=4, lags_s={"s1.1@a": 0.001, "s0.1@b": 0.5}, **told),
            event(1.0, "s1.1@a", "serving", entries=5, lags_s={"s0.1@b": 0.7}, **told),
            event(2.0, "agent", "failover", slice="parameters/0", primary="s0.1@a", was="x", epoch=3, reason="gone"),
            event(2.5, "agent", "server_slow", server="s0.1@b", times=9.0, noticed_by="a", reason="late"),
            event(3.0, "agent", "server_exited", server="s1.1@a", pid=2, signal=9, reason="killed"),
            event(3.0, "w0.1@a", "staleness", updates={"0": 3, "5": 2}, ahead=1),
        ]
    )
    numbers = parsed(render(record, 4.0))
    assert numbers["servers_alive",] == 1 and numbers["server_failures_total",] == 1
    assert numbers["failovers_total",] == 1 and numbers["slice_epoch", "parameters/0"] == 3
    assert numbers["server_log_entries", "s0.1@a"] == 4 and numbers["server_log_bytes", "s0.1@a"] == 8192
    assert ("server_log_entries", "s1.1@a") not in numbers, "it is gone"
    assert numbers["updates_total",] == 100, "what it acknowledged is not"
    assert numbers["server_lag_seconds", "s0.1@b"] == 0.5 and numbers["server_slow_ratio", "s0.1@b"] == 9.0
    assert numbers["update_staleness_bucket", "4"] == 3 and numbers["update_staleness_count",] == 5
