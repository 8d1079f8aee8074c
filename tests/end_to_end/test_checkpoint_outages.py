"""Training goes on while storage does not: full, read-only, overloaded, gone, with other credentials, without its disk.

Each run is told of it once, harms nothing that was committed, saves again when storage is back, and ends exact.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import train
from harness import DEADLINE_S, TRAIN, Training, holdfast, training

from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid, verify
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.events import read_events
from tests.harness import hdfs_server, s3_server
from tests.harness.forked import agreed, forked
from tests.harness.hdfs_server import HdfsCluster
from tests.harness.http_proxy import HttpProxy
from tests.harness.s3_server import S3Server
from tests.trainings.staged_training import WRITING, Announced
from tests.trainings.staged_training import __file__ as STAGED

pytestmark = [pytest.mark.processes, pytest.mark.timeout(250)]
STEPS = 400  # many: a worker tries again after about as long as storage was away, and steps go on meanwhile
WORKERS = 2
GOES_ON_STEPS = 5  # while storage is away
TRAINING = ["--steps", str(STEPS), "--pause", "0.03"]  # until there is nothing more to wait for


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run in which nothing happened."""
    return agreed(forked(lambda: train.main(["--steps", str(STEPS)]), workers=1))


class Saving:
    """A run that saves every third step, and what became of it."""

    def __init__(self, run: Training, uri: str) -> None:
        self.run = run
        self.uri = uri

    def happened(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run.directory.events) if e["kind"] == kind and e["t"] > since]

    def wait_saved(self, since: float) -> int:
        self.run.wait(lambda: bool(self.happened("checkpoint", since)), "a checkpoint", DEADLINE_S, period_s=0.05)
        return int(self.happened("checkpoint", since)[-1]["step"])

    def go_through(self, begin: Callable[[], None], end: Callable[[], None], reason: str) -> None:
        """Storage is in trouble from `begin` to `end`."""
        run, before = self.run, self.wait_saved(0.0)
        began = time.time()
        begin()
        run.wait(lambda: bool(self.happened("storage_down", began)), "the word of it", DEADLINE_S, period_s=0.05)
        at = run.step
        run.wait(lambda: run.step >= at + GOES_ON_STEPS, "steps in the meantime", DEADLINE_S, period_s=0.05)
        ended = time.time()
        end()
        saved = self.wait_saved(ended)
        run.wait(lambda: self._are_all_well(began), "the word that it is over", DEADLINE_S, period_s=0.05)
        assert saved > before
        downs = self.happened("storage_down", began)
        assert len({event["who"] for event in downs}) == len(downs) <= WORKERS, downs  # each says it once
        assert all(reason in event["reason"] for event in downs), downs
        self.check_whole()

    def _are_all_well(self, since: float) -> bool:
        down, up = (sorted(e["who"] for e in self.happened(kind, since)) for kind in ("storage_down", "storage_up"))
        return down == up

    def check_whole(self) -> None:
        """Everything that was committed. What a worker is just deleting may go while it is read."""
        storage = open_storage(self.uri)
        for entry in list_checkpoints(storage)[:2]:
            if entry.committed:
                assert verify(storage, entry.step) == []

    def finish(self, spells: int, digest: str) -> None:
        (self.run.home / "hurry").touch()
        self.run.let_go()
        assert self.run.finish(DEADLINE_S) == digest
        log = self.run.log()
        assert log.count("training goes on, the newest snapshot waits in memory") == spells, log
        assert log.count("storage is back") == spells, log
        assert "Traceback" not in log
        found = newest_valid(open_storage(self.uri), warn=pytest.fail)
        assert found is not None and found[0].step == STEPS


def saving_to(home: Path, uri: str, *script: str) -> Any:
    options = ["--workers", str(WORKERS), "--checkpoint", uri, "--save-every", "3"]
    return training(home, *options, script=[*script, *TRAINING, "--times", str(home)], held_at=STEPS - 5)


# ---- a disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB: ten checkpoints, and no more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "holdfast-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_full_and_one_that_turns_read_only(small_disk: Path, tmp_path: Path, quiet: str) -> None:
    ballast = small_disk / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(small_disk)], check=True)

    uri = str(small_disk / "checkpoints")
    with saving_to(tmp_path, uri, TRAIN) as run:
        saving = Saving(run, uri)
        saving.go_through(fill, ballast.unlink, "the disk is full")
        saving.go_through(lambda: remount("ro"), lambda: remount("rw"), "the file system is read-only")
        saving.finish(2, quiet)


# ---- S3


with_s3 = [
    pytest.mark.skipif(bool(s3_server.why_not()), reason=s3_server.why_not() or "-"),
    pytest.mark.xdist_group("s3"),
]


def s3_variables(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    given = {"AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY, **changed}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket("checkpoints")
        yield server


class TestS3:
    pytestmark = with_s3

    def test_503_a_server_that_is_gone_and_credentials_that_go_bad(
        self, s3: S3Server, tmp_path: Path, quiet: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        s3_variables(monkeypatch)
        with HttpProxy(s3.address) as proxy:
            uri = s3.uri("checkpoints/outages", proxy.endpoint) + "&timeout_s=1"
            with saving_to(tmp_path, uri, TRAIN) as run:
                saving = Saving(run, uri)
                saving.go_through(lambda: proxy.trouble(answer=503), proxy.heal, "503")
                saving.go_through(s3.kill, s3.start, "")
                saving.go_through(lambda: proxy.trouble(answer=403), proxy.heal, "these credentials are not allowed to")
                saving.finish(3, quiet)

    @pytest.mark.parametrize(
        ("bucket", "secret", "sentence"),
        [
            ("checkpoints", "wrong", "does not accept these credentials (SignatureDoesNotMatch)"),
            ("no-such-bucket", s3_server.SECRET_KEY, "there is no bucket no-such-bucket"),
        ],
        ids=["credentials", "bucket"],
    )
    def test_at_the_start_it_is_one_sentence(
        self, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str, secret: str, sentence: str
    ) -> None:
        s3_variables(monkeypatch, AWS_SECRET_ACCESS_KEY=secret)
        options = ["--workers", "1", "--checkpoint", s3.uri(f"{bucket}/run")]
        done = holdfast("run", "--run", "r", *options, TRAIN, "--steps", "5", home=tmp_path)
        said = f"{done.stdout}\n--- stderr\n{done.stderr}"
        assert done.returncode == 2, said
        lines = done.stderr.splitlines()
        assert len(lines) == 2 and lines[0].startswith("holdfast: ") and lines[1].startswith("  hint: "), said
        assert sentence in lines[0], said


# ---- HDFS


@pytest.mark.skipif(bool(hdfs_server.why_not()), reason=hdfs_server.why_not() or "-")
@pytest.mark.xdist_group("hdfs")
def test_the_datanode_is_killed_in_the_middle_of_a_write(tmp_path: Path, quiet: str) -> None:
    """The moment is the training's own word, by staged_training, that a part is on its way."""
    address = tmp_path / "stages"
    with HdfsCluster(tmp_path / "hdfs") as cluster, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ears:
        ears.bind(str(address))
        ears.settimeout(DEADLINE_S)
        uri = f"{cluster.uri}/checkpoints"

        def kill() -> None:
            ears.setblocking(False)
            try:
                while ears.recv(4096):
                    pass
            except BlockingIOError:
                ears.settimeout(DEADLINE_S)
            while Announced.decode(ears.recv(4096)).stage != WRITING:
                pass
            cluster.kill_datanode()

        with saving_to(tmp_path, uri, STAGED, str(address)) as run:
            saving = Saving(run, uri)
            saving.go_through(kill, cluster.start_datanode, "")
            saving.finish(1, quiet)
