"""What Slurm says of a step, and what of a job's ledger outlives the job."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_member import find_etcd
from holdfast.core.errors import ConfigError
from holdfast.integrations.slurm.first_nodes import FirstNodes
from holdfast.integrations.slurm.ledger_copy import LedgerCopy
from holdfast.integrations.slurm.step import SlurmStep, run_name
from holdfast.ledger.memory import MemoryLedger

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "n3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_a_step() -> None:
    step = SlurmStep.read(STEP)
    assert (run_name(step), step.mark, step.name, step.members, step.serves) == ("slurm-77", "77.1.0", "n3", 3, True)
    again = SlurmStep.read({**STEP, "SLURM_RESTART_COUNT": "2", "SLURM_NODEID": "3"})
    assert (run_name(again), again.mark, again.serves) == ("slurm-77", "77.1.2", False)
    small = SlurmStep.read({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"})
    assert (small.members, small.serves) == (1, False)


@pytest.mark.parametrize("wrong", [{"SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_NODEID": "first"}])
def test_no_such_step(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        SlurmStep.read({**STEP, **wrong})


def test_what_is_the_runs_is_kept_and_who_takes_part_is_not(tmp_path: Path) -> None:
    path, ledger = tmp_path / "run.ledger.json", MemoryLedger()
    for key in ("run", "rewinds", "incarnation/0@n1", "liar/w0.1@n1"):
        ledger.put(key, f'{{"of":"{key}"}}'.encode())
    for key in ("worker/w0.1@n1", "view", "size/n1", "host/n1", "dead/w0.1@n1"):
        ledger.put(key, b"{}")
    copy = LedgerCopy(path, ledger)
    copy.keep()
    ledger.put("done", b"{}")
    copy.keep()  # not so soon again
    fresh = MemoryLedger()
    fresh.put("liar/w0.1@n1", b"newer")
    LedgerCopy(path, fresh).restore()
    found = {entry.key: entry.value for entry in fresh.read("").entries}
    assert found.keys() == {"run", "rewinds", "incarnation/0@n1", "liar/w0.1@n1"}
    assert found["run"] == b'{"of":"run"}' and found["liar/w0.1@n1"] == b"newer"
    copy.keep(at_once=True)
    assert '"done"' in path.read_text()


def test_a_first_start_has_nothing_to_restore(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    LedgerCopy(tmp_path / "none.json", ledger).restore()
    LedgerCopy(tmp_path / "none.json", ledger).keep()
    assert not ledger.read("").entries and not list(tmp_path.iterdir())


def test_a_run_has_its_id_before_its_first_worker(tmp_path: Path) -> None:
    """And keeps it, where the job is lost at once."""
    path, ledger, again = tmp_path / "run.ledger.json", MemoryLedger(), MemoryLedger()
    LedgerCopy(path, ledger).name_run()
    known = ledger.get("run")
    copy = LedgerCopy(path, again)
    copy.restore()
    copy.name_run()
    found = again.get("run")
    assert known is not None and found is not None and known.value == found.value
    assert len(json.loads(known.value)["id"]) == 32


@pytest.mark.processes
def test_what_the_ledger_says_last_outlives_the_job(tmp_path: Path) -> None:
    """Also what the last agent writes just before it ends: the job's etcd is gone with it."""
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)
    variables = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    step = SlurmStep.read({**variables, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"})
    kept = tmp_path / "slurm" / "r.ledger.json"
    nodes = FirstNodes(step, tmp_path, "r")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOLDFAST_LEDGER_CA", "HOLDFAST_LEDGER_CERT", "HOLDFAST_LEDGER_KEY"):
            patch.setenv(name, "")
        try:
            nodes.start(os.environ)
            begun = json.loads(kept.read_text())
            with closing(nodes._open()) as ledger:
                for number in range(20):
                    ledger.put("rewinds", b'{"number":%d}' % number)
        finally:
            nodes.close()
    ended = json.loads(kept.read_text())
    assert begun.keys() == {"run"} and ended == {**begun, "rewinds": '{"number":19}'}
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
