"""Rows on servers are in a run's checkpoints. Real runs whose processes are killed, and that go on."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest, read_snapshot
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.state.codec import unflatten, unpack_tree
from holdfast.tables.rows.port import HEADER_WORDS
from holdfast.testing.observed_run import ObservedRun, send
from tests.tables.test_hybrid import servers_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SCRIPT = Path(__file__).parent / "counting_rows.py"
EVERY = 6


class Training:
    """Starts of one run, whose checkpoints are in `place`."""

    def __init__(self, home: Path, *words: str) -> None:
        self.home, self.place, self.words = home, home / "checkpoints", words

    def started(self, *, servers: int, workers: int, steps: int, pause_s: float = 0.0) -> ObservedRun:
        options = ["--workers", str(workers), "--servers", str(servers)]
        options += ["--checkpoint", str(self.place), "--save-every", str(EVERY), "--keep", "4"]
        lines = self.home / f"lines{servers}"
        lines.mkdir(exist_ok=True)
        run = ObservedRun(
            self.home, "counting", options, [str(SCRIPT), str(lines), str(steps), str(pause_s), *self.words]
        )
        run.start()
        return run

    def first_lines(self, servers: int) -> list[dict[str, Any]]:
        """Of each worker that wrote any, at the first step that it took part in."""
        return [
            json.loads(text[0])
            for path in (self.home / f"lines{servers}").iterdir()
            if (text := path.read_text().splitlines())
        ]

    def saved(self) -> list[int]:
        with closing(open_storage(str(self.place))) as storage:
            return sorted(entry.step for entry in list_checkpoints(storage) if entry.committed)

    def state(self, step: int) -> dict[str, Any]:
        with closing(open_storage(str(self.place))) as storage:
            _, snapshot = read_snapshot(storage, step)
        found: dict[str, Any] = unflatten(unpack_tree(snapshot.tree), snapshot.tensors)
        return found

    def command(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "checkpoint", *words], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout

    def damage_rows(self, step: int) -> None:
        """A bit in the part that has a shard's rows."""
        with closing(open_storage(str(self.place))) as storage:
            manifest = read_manifest(storage, step)
        number = manifest.names.index("modules/full/shards/0/records")
        part = next(one for one in manifest.layout if any(piece.tensor == number for piece in one.pieces))
        piece = next(piece for piece in part.pieces if piece.tensor == number)
        path = self.place / manifest.path(manifest.parts[part.number])
        content = bytearray(path.read_bytes())
        content[piece.offset] ^= 1
        path.write_bytes(content)


def kill_everything(run: ObservedRun) -> None:
    servers = servers_of(run)
    run.power_off()
    for server in servers:
        send(server, signal.SIGKILL)
    run.agent = None


def counts_of(state: dict[str, Any]) -> tuple[float, set[float]]:
    """How many steps are in the dense part, and in the rows of the table that counts."""
    rows: set[float] = set()
    for shard in state["modules"]["counted"]["shards"]:
        records = shard["records"].numpy()
        rows |= set((records[:, HEADER_WORDS : HEADER_WORDS + 2].copy().view(np.float32).reshape(-1) * 2).tolist())
    return state["parameters"]["dense"].item(), rows


def hashes_of(state: dict[str, Any], table: str) -> list[str]:
    """As the script tells them."""
    found = []
    for shard in state["modules"][table]["shards"]:
        words = [json.dumps(shard["moment"]).encode(), shard["records"].numpy().tobytes()]
        found.append(hashlib.sha256(b"".join([*words, shard["candidates"].numpy().tobytes()])).hexdigest())
    return found


def test_a_run_that_lost_everything_goes_on_with_rows_that_fit_on_another_number_of_servers(tmp_path: Path) -> None:
    training = Training(tmp_path)
    run = training.started(servers=2, workers=2, steps=1000, pause_s=0.02)
    try:
        run.wait(lambda: len(training.saved()) >= 3, "three checkpoints", 100.0)
    finally:
        kill_everything(run)
    *_, before, newest = training.saved()
    for step in (before, newest):
        assert counts_of(training.state(step)) == (step, {float(step)}), "the rows are those of the dense part's step"
    assert training.command("verify", str(training.place))[0] == 0
    code, shown = training.command("show", str(training.place))
    assert code == 0 and "modules/full/shards/7/records" in shown and "modules/full/shards/7/candidates" in shown

    training.damage_rows(newest)
    code, said = training.command("verify", str(training.place))
    assert code == 1 and "modules/full/shards/0/records" in said
    run = training.started(servers=3, workers=2, steps=before + 9)
    try:
        run.finish(120.0)
    finally:
        run.end()
    first = min(training.first_lines(3), key=lambda line: int(line["step"]))
    assert (first["step"], first["dense"], first["rows"]) == (before, before, [before, before])
    state = training.state(before)
    for table in ("counted", "full"):
        assert first["shards"][table] == hashes_of(state, table), (
            "rows, ages, counts and the optimizer's state are back"
        )
    assert any(shard["candidates"].numel() for shard in state["modules"]["full"]["shards"]), "some ids are counted"
    last = training.saved()[-1]
    assert last == before + 9 and counts_of(training.state(last)) == (last, {float(last)})


def test_servers_that_live_on_go_back_to_the_rows_of_the_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path)
    run = training.started(servers=2, workers=2, steps=40, pause_s=0.02)
    try:
        run.wait(lambda: len(training.saved()) >= 1 and len(run.living_members()) == 2, "a checkpoint", 100.0)
        at = training.saved()[-1] + 2
        run.wait(lambda: run.step >= at, "steps after a checkpoint", 60.0)
        servers, workers = servers_of(run), list(run.pids.values())
        for pid in workers:
            send(pid, signal.SIGKILL)
        run.finish(120.0)
        assert len(servers) == 2 and not any(event["kind"] == "server_exited" for event in run.seen)
    finally:
        run.end()
    resumed = next(event["step"] for event in run.seen if event["kind"] == "resumed")
    lines = [line for line in training.first_lines(2) if line["step"] == resumed]
    assert lines and all((line["dense"], line["rows"]) == (resumed, [resumed, resumed]) for line in lines)
    assert counts_of(training.state(40)) == (40, {40.0})


def test_in_the_asynchronous_mode_a_step_changes_rows_once_whoever_makes_it_again(tmp_path: Path) -> None:
    """A checkpoint's rows may be further than its dense part, and a worker may die between its rows and its update."""
    training = Training(tmp_path, "async")
    run = training.started(servers=2, workers=3, steps=1000, pause_s=0.02)
    try:
        run.wait(lambda: len(training.saved()) >= 3, "three checkpoints", 100.0)
    finally:
        kill_everything(run)
    for step in training.saved():
        dense, rows = counts_of(training.state(step))
        assert min(rows) >= dense, "no update is in a checkpoint without its rows"
    resumed = training.saved()[-1]
    steps = resumed + 60
    run = training.started(servers=3, workers=2, steps=steps, pause_s=0.02)
    try:
        run.wait(lambda: run.step >= resumed + 10 and len(run.living_registered()) == 2, "two that train", 100.0)
        send(run.pids[max(run.living_registered())], signal.SIGKILL)
        run.finish(120.0)
    finally:
        run.end()
    dense, rows = counts_of(training.state(training.saved()[-1]))
    assert rows == {float(steps)}
    assert steps <= dense <= steps + 1, "the killed worker's step may be in the dense part twice"
