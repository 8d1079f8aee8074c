"""Manifests against the API's schema, and a pod's entry point as they describe it: real processes, SIGTERM and kill."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError
from holdfast.events import EventLog, read_events
from holdfast.integrations.kubernetes.manifest import PodRun, objects_of
from holdfast.integrations.kubernetes.pod import words_of
from holdfast.integrations.kubernetes.progress import FILE, TOKEN, URL, KubeflowProgress
from holdfast.integrations.kubernetes.yaml_text import documents
from holdfast.placement.directory import RunDirectory
from holdfast.trust.keys import create_keys
from tests.harness import ROOT
from tests.harness.gate import Gate

TRAIN = ROOT / "tests" / "end_to_end" / "train.py"
DEADLINE_S = 600.0
STEPS = 12
KINDS = ["StatefulSet", "Job", "PodDisruptionBudget", "PodDisruptionBudget", "NetworkPolicy", "Service", "Service"]


def run_of(**more: Any) -> PodRun:
    usual = {"name": "digits", "image": "example/train:1", "script": ("train.py",), "hosts": 3, "workers": 2}
    return PodRun(**{**usual, "checkpoint": "s3://bucket/digits", **more})


def example() -> list[str]:
    """The words of the page's manifest."""
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    (command,) = re.findall(r"^holdfast (kubernetes manifest .*?) > digits.yaml$", page, re.DOTALL | re.MULTILINE)
    return shlex.split(command.replace("\\\n", ""))


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--ledger", "etcds://a,b,c"],
        ["--hosts", "1", "--namespace", "research", "--notice", "2min"],
    ],
    ids=["page", "own-etcd", "one-host"],
)
def test_a_manifest_is_what_the_api_takes(more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    validate = pytest.importorskip("kubernetes_validate")
    words = example()
    assert main([*words[:2], *more, *words[2:]]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# before: holdfast keys create keys && kubectl create secret generic digits-keys")
    found = [one for one in yaml.safe_load_all(text) if one is not None]
    for one in found:
        validate.validate(one, validate.latest_version(), strict=True)
    if not more:
        assert sorted(one["kind"] for one in found) == sorted(KINDS)


def test_yaml_says_what_it_was_given() -> None:
    yaml = pytest.importorskip("yaml")
    objects = [
        *objects_of(run_of(keys={"secret": b"\x00\xff"})),
        {"a": ["", "no", "1", "-x", "a: b", "é\n", None, 1.5]},
    ]
    assert list(yaml.safe_load_all(documents(objects))) == json.loads(json.dumps(objects))


def test_the_secret_has_the_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_keys(tmp_path / "keys")
    words = example()
    assert main([*words[:2], "--keys", str(tmp_path / "keys"), *words[2:]]) == 0
    text = capsys.readouterr().out
    assert not text.startswith("#")
    yaml = pytest.importorskip("yaml")
    secret = next(iter(yaml.safe_load_all(text)))
    assert base64.b64decode(secret["data"]["secret"]) == (tmp_path / "keys" / "secret").read_bytes()


def test_the_job_waits_as_long_as_the_workers_may_save_and_reads_their_exit_codes() -> None:
    job = next(one for one in objects_of(run_of(notice_s=100)) if one["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 100 + 30
    actions = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {2: "FailJob", 65: "FailJob", 143: "Ignore"}
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for code in actions:
        assert re.search(rf"^\| (\d+, )*{code}(, \d+)* \|", page, re.MULTILINE), code


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run", "Digits"], "cannot be the name of objects"),
        (["--memory", "lots"], "--memory lots is no quantity"),
        (["--hosts", "0"], "--hosts is 0"),
        (["--checkpoint", "none"], "a pod's own disk goes with it"),
        (["--notice", "soon"], "--notice is 'soon', which is not a time"),
    ],
)
def test_what_cannot_be(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = example()
    script = given.pop()
    assert main([*given, *words, script]) == 2
    assert told in capsys.readouterr().err


def test_a_pod_says_what_it_lacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_RUN", "HOLDFAST_LEDGER", "HOLDFAST_KEYS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["kubernetes", "start", "--workers", "2", "train.py"]) == 2
    assert "HOLDFAST_RUN is not set in this pod" in capsys.readouterr().err
    told = {"HOLDFAST_RUN": "r", "HOLDFAST_LEDGER": "etcd://a", "HOLDFAST_KEYS": "/k", "JOB_COMPLETION_INDEX": "4"}
    words = words_of(["--workers", "2", "train.py"], told, "/private")
    assert words == shlex.split("run --run r --ledger etcd://a --host pod-4 --keys /private --workers 2 train.py")


# ---- the entry point


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)
    cluster = EtcdCluster(tmp_path / "etcd", 1)
    try:
        yield cluster  # not started: pods start in any order
    finally:
        cluster.stop()


class Pod:
    """What the manifest's container starts, with what it gives to it, in processes of this machine."""

    def __init__(self, home: Path, container: Mapping[str, Any], index: int, url: str) -> None:
        self.home, directory = home, home.parent
        home.mkdir()
        variables = {one["name"]: one["value"] for one in container["env"]}
        ours = {"HOLDFAST_DIR": str(self.home), "HOLDFAST_KEYS": str(directory / "mounted"), "HOLDFAST_LEDGER": url}
        words = ["127.0.0.1:0" if word.startswith("0.0.0.0:") else word for word in container["args"]]
        self.log = self.home / "log"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *words],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **variables, **ours, "JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"},
            )

    def said(self) -> str:
        return self.log.read_text()

    def probe(self) -> int:
        """What kubelet asks."""
        found = re.search(r"metrics: (http://\S+)", self.said())
        assert found is not None, self.said()
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            return int(answer.status)

    def events(self, kind: str) -> list[dict[str, Any]]:
        runs = list((self.home / "runs").glob("*"))
        return [event for run in runs for event in read_events(run / "events") if event["kind"] == kind]

    def lose(self) -> None:
        """The whole container at once, as with its node."""
        mark = f"HOLDFAST_DIR={self.home}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
        self.process.wait(30)


def wait(condition: Callable[[], bool], what: str, *pods: Pod) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "\n".join([f"waited for {what}", *(pod.said() for pod in pods)])
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_pods_do_what_the_manifest_says(tmp_path: Path, etcd: EtcdCluster) -> None:
    """Two pods wait for the ledger, and train. One is drained and comes back; the other one's node is lost."""
    create_keys(tmp_path / "keys")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for path in (tmp_path / "keys").iterdir():
        (mounted / path.name).write_bytes(path.read_bytes())
        (mounted / path.name).chmod(0o440)  # as the secret's volume has them
    gate = Gate(tmp_path / "gate")
    gate.open_to(0)
    script = (str(TRAIN), "--steps", str(STEPS), "--gate", str(gate.path))
    run = run_of(hosts=2, workers=1, checkpoint=str(tmp_path / "checkpoints"), script=script)
    job = next(one for one in objects_of(run) if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    pods: list[Pod] = []

    def start(index: int) -> Pod:
        home = tmp_path / f"pod{index}-{len(pods)}"  # a new pod has an empty disk
        pods.append(Pod(home, container, index, etcd.url))
        return pods[-1]

    try:
        first, second = start(0), start(1)
        wait(lambda: "waiting for the ledger" in first.said(), "a pod to wait", *pods)
        etcd.start()
        wait(lambda: bool(first.events("registered") and second.events("registered")), "both pods", *pods)
        gate.open_to(4)
        wait(lambda: bool(_at(gate, 4, "@pod-0") and _at(gate, 4, "@pod-1")), "both at step 4", *pods)
        assert first.probe() == second.probe() == 200

        second.process.send_signal(signal.SIGTERM)  # a drain
        gate.open_to(8)
        wait(lambda: second.process.poll() is not None, "the drained pod to end", *pods)
        assert second.process.returncode == 143, second.said()
        assert second.events("left")
        wait(lambda: bool(_at(gate, 8, "@pod-0")), "the other one at step 8", *pods)
        again = start(1)  # the Job does: that code is ignored
        wait(lambda: bool(again.events("registered")), "the pod to be back", *pods)
        gate.open_to(10)
        wait(lambda: bool(_at(gate, 10, "@pod-1")), "the pod to train again", *pods)

        first.lose()  # a node
        gate.open_to()
        wait(lambda: again.process.poll() is not None, "the end", *pods)
        assert again.process.returncode == 0, again.said()
        back = start(0)
        wait(lambda: back.process.poll() is not None, "the lost pod to see that it is over", *pods)
        assert back.process.returncode == 0, back.said()
    finally:
        for pod in pods:
            pod.lose()
    digests = {event["digest"] for pod in pods for event in pod.events("finished")}
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert digests == {done.stdout.split()[-1]}


def _at(gate: Gate, step: int, host: str = "") -> list[Path]:
    return [path for path in gate.path.parent.glob(f"at-*{host}") if path.read_text() == str(step)]


# ---- Kubeflow's Trainer


class _Controller(http.server.BaseHTTPRequestHandler):
    heard: list[tuple[str, str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append((self.path, self.headers["Authorization"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_kubeflow_hears_how_far_the_run_is(tmp_path: Path) -> None:
    handler = type("Handler", (_Controller,), {"heard": []})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        directory = RunDirectory(tmp_path, "r")
        directory.create()
        log = EventLog(directory.events / "w0.1.jsonl", "w0.1")
        log.write("progress", view=1, step=25, steps=100, metrics={"loss": 0.5}, samples_per_s=8.0, workers=1)
        (tmp_path / "token").write_text("a.b.c\n")
        place = f"http://127.0.0.1:{server.server_port}/status"
        variables = {URL: place, TOKEN: str(tmp_path / "token"), FILE: str(tmp_path / "status.json")}
        progress = KubeflowProgress(directory, variables)
        progress.close()
        log.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    (path, authorization, body), *_ = handler.heard  # type: ignore[attr-defined]
    status = body["trainerStatus"]
    assert (path, authorization) == ("/status", "Bearer a.b.c")
    assert status["progressPercentage"] == 25 and {"name": "loss", "value": "0.5"} in status["metrics"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["lastUpdatedTime"])
    assert json.loads((tmp_path / "status.json").read_text()) == status


def test_a_controller_that_is_away_is_told_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path, "r")
    directory.create()
    log = EventLog(directory.events / "w0.1.jsonl", "w0.1")
    log.write("progress", view=1, step=1, steps=2, metrics={}, samples_per_s=8.0, workers=1)
    log.close()
    progress = KubeflowProgress(directory, {URL: "http://127.0.0.1:1/status"})
    progress.close()
    assert capsys.readouterr().err.count("Kubeflow's Trainer does not hear") == 1
