"""Horovod's data service: where the two runs meet, and a training that reads what the other run's workers make."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError
from holdfast.horovod import meeting_place
from holdfast.horovod.meeting_place import ComputeClient, MeetingPlace
from holdfast.ledger.embedded import EmbeddedServer

SECRET = b"s" * 32
TRAINING = Path(__file__).with_name("data_service_training.py")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[MeetingPlace]:
    directory = Path(tempfile.mkdtemp(prefix="hf"))  # short enough for a socket
    server = EmbeddedServer(tmp_path / "ledger", directory / "l.sock", SECRET)
    server.start()
    yield MeetingPlace("", "serving", str(directory / "l.sock"), SECRET.hex())
    server.stop()
    shutil.rmtree(directory)


def test_each_finds_who_has_registered_before_or_after_it_asked(place: MeetingPlace) -> None:
    here, there = ComputeClient(place), ComputeClient(MeetingPlace.from_dict(json.loads(json.dumps(place.to_dict()))))
    here.register_dispatcher(0, "grpc://localhost:1")
    assert there.wait_for_dispatcher_registration(0, 5.0) == "grpc://localhost:1"
    here.register_worker_for_dispatcher(0, 3)
    later = threading.Thread(target=here.register_worker_for_dispatcher, args=(0, 4))
    over = threading.Thread(target=there.wait_for_shutdown)
    over.start()
    later.start()
    there.wait_for_dispatcher_worker_registration(0, 5.0, 2)
    later.join()
    assert over.is_alive()
    here.shutdown()
    over.join(5.0)
    assert not over.is_alive()


def test_who_does_not_come_is_named(place: MeetingPlace) -> None:
    client = ComputeClient(place)
    client.register_dispatcher(10, "grpc://localhost:10")
    with pytest.raises(ConfigError, match=r"dispatcher 1 did not register within 0\.05 s"):
        client.wait_for_dispatcher_registration(1, 0.05)
    client.register_worker_for_dispatcher(1, 0)
    with pytest.raises(ConfigError, match="the 2 workers of dispatcher 1"):
        client.wait_for_dispatcher_worker_registration(1, 0.05, 2)


def test_a_service_that_is_gone_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "GONE_S", 0.0)
    client = ComputeClient(MeetingPlace("", "gone", str(tmp_path / "none.sock"), SECRET.hex()))
    with pytest.raises(ConfigError, match="the data service of the run gone does not answer") as refused:
        client.shutdown()
    assert "compute_worker" in refused.value.hint


@pytest.mark.parametrize("given", [None, {}, [], {"ledger": "", "run": "a", "socket": "", "secret": "no hex"}])
def test_what_is_no_configuration_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="no configuration of a data service"):
        MeetingPlace.from_dict(given)


def test_without_an_agent_there_is_no_service() -> None:
    with pytest.raises(ConfigError, match="workers that an agent has started"):
        MeetingPlace.of_this_run()


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is an extra")
def test_a_training_reads_what_another_run_makes(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

    def start(name: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast", "run", "--horovod", "--workers", "1", "--lease", "30s"]
        command += ["--dir", str(tmp_path / name), *words, str(file)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)

    serving = start("serving", "-m", "horovod.tensorflow.data.compute_worker")
    training = start("training", str(TRAINING))
    try:
        said = training.communicate(timeout=120)[0]
        assert training.returncode == 0, said
        assert f"rank 0 of 1 has read {list(range(0, 120, 10))}" in said
        serving.communicate(timeout=60)
        assert serving.returncode == 0, "the training has said that it is over"
        assert not file.exists(), "the next training is not to find it"
    finally:
        for process in (training, serving):
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=60)
