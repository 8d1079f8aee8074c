"""Groups of ranks that shard one model: the same weights as one process, also when ranks are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch

from holdfast.cli.main import main
from holdfast.placement.proc import process_state
from holdfast.testing.observed_run import ObservedRun
from tests.harness.gate import Gate

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
SCRIPT = str(Path(__file__).with_name("sharded.py"))
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sharded-models.md"
STEPS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digest of one process whose model is not sharded, by optimizer."""
    return {kind: trained(tmp_path_factory.mktemp(kind), kind, "--plain") for kind in ("AdamW", "SGD")}


def trained(home: Path, kind: str, *words: str) -> str:
    """By one process, without an agent."""
    command = [sys.executable, SCRIPT, str(STEPS), kind, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, "HOME": str(home)})
    assert ended.returncode == 0, ended.stderr
    return found_digest(ended.stdout)


def found_digest(said: str) -> str:
    digests = set(re.findall(r"digest ([0-9a-f]{32})", said))
    assert len(digests) == 1, said[-3000:]
    return digests.pop()


@contextmanager
def training(
    home: Path, groups: int, ranks: int, *script: str, held_at: int | None = None, options: Sequence[str] = ()
) -> Iterator[ObservedRun]:
    home.mkdir(exist_ok=True)
    gate = Gate(home / "gate")
    words = [SCRIPT, str(STEPS), *script]
    if held_at is not None:
        gate.open_to(held_at)
        words += ["--gate", str(gate.path)]
    run = ObservedRun(home, "r", ["--workers", str(groups), "--ranks", str(ranks), *options], words)
    run.start()
    try:
        yield run
    except BaseException:
        print(run.log()[-6000:])
        raise
    finally:
        run.end()


def digest_of(run: ObservedRun) -> str:
    """Of a run that comes to its end: as the first ranks say, and as every rank has printed it."""
    digest = run.finish(90)
    printed = "".join(path.read_text() for path in run.directory.logs.glob("w*.log"))
    assert found_digest(printed) == digest
    return digest


def others_of(pid: int) -> list[int]:
    """The ranks that this one has forked, in their order."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_script_alone_is_a_group_of_one_rank(tmp_path: Path, whole: dict[str, str]) -> None:
    assert trained(tmp_path, "AdamW") == whole["AdamW"]


@pytest.mark.parametrize(
    ("groups", "ranks", "kind"),
    [(groups, ranks, "AdamW") for groups in (1, 2, 3) for ranks in (1, 2, 4)] + [(1, 2, "SGD"), (2, 4, "SGD")],
)
def test_any_groups_and_ranks_give_the_bits_of_one_process(
    tmp_path: Path, whole: dict[str, str], groups: int, ranks: int, kind: str
) -> None:
    with training(tmp_path, groups, ranks, kind) as run:
        assert digest_of(run) == whole[kind]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_unequal_numbers_of_samples_count_for_what_they_have(tmp_path: Path, ranks: int) -> None:
    right = trained(tmp_path, "SGD", "--plain", "--unequal")
    with training(tmp_path, 1, ranks, "SGD", "--unequal") as run:
        assert digest_of(run) == right


def test_what_no_shard_of_a_step_uses_is_not_decayed(tmp_path: Path) -> None:
    """It has no gradient, as with one rank, where FSDP has zeros for it."""
    right = trained(tmp_path, "AdamW", "--plain", "--skips")
    assert trained(tmp_path, "AdamW", "--skips") == right
    with training(tmp_path, 1, 2, "AdamW", "--skips") as run:
        assert digest_of(run) == right


def test_gradients_of_less_precision_are_added_up_in_that_of_the_parameters(tmp_path: Path) -> None:
    right = trained(tmp_path, "SGD", "--mixed", "--unequal")
    for ranks in (2, 4):
        with training(tmp_path / str(ranks), 1, ranks, "SGD", "--mixed", "--unequal") as run:
            assert digest_of(run) == right


@pytest.mark.parametrize("large", [False, True], ids=["one round", "two rounds"])
def test_a_killed_rank_costs_its_group_and_no_bit(tmp_path: Path, whole: dict[str, str], large: bool) -> None:
    words = ["--large"] if large else []
    right = trained(tmp_path, "AdamW", "--plain", *words) if large else whole["AdamW"]
    with training(tmp_path, 3, 2, "AdamW", *words, held_at=2) as run:
        gate = Gate(tmp_path / "gate")
        names = [f"w{slot}.1-{rank}" for slot in range(3) for rank in range(2)]
        run.wait(lambda: len(gate.at(2, names)) == 6, "all ranks to come to step 2")
        (rank,) = others_of(run.pids["w1.1"])
        before = dict(run.pids)
        os.kill(rank, signal.SIGKILL)
        run.wait(lambda: "w1.2" in run.registered, "another group")
        gate.open_to(5)
        run.wait(lambda: "w1.2" in run.members, "it to be taken in")
        gate.open_to()
        assert digest_of(run) == right
        exits = [
            event["worker"] for event in run.seen if event["kind"] == "worker_exited" and event["reason"] == "killed"
        ]
        assert exits == ["w1.1"] and set(before) - set(run.finished) == {"w1.1"}
        joined = [event["who"] for event in run.seen if event["kind"] == "joined"]
        assert "w1.2" in joined  # its ranks had their parts from the others' memory
    assert not process_state(rank)
    said = (run.directory.logs / "w1.1.log").read_text()
    assert "rank 1 of this group was ended by signal 9, and the group ends with it" in said


def test_the_other_ranks_end_with_their_first(tmp_path: Path, whole: dict[str, str]) -> None:
    with training(tmp_path, 2, 4, "SGD", held_at=3) as run:
        gate = Gate(tmp_path / "gate")
        names = [f"w{slot}.1-{rank}" for slot in range(2) for rank in range(4)]
        run.wait(lambda: len(gate.at(3, names)) == 8, "all ranks to come to step 3")
        ranks = others_of(run.pids["w0.1"])
        assert len(ranks) == 3
        os.kill(run.pids["w0.1"], signal.SIGKILL)
        run.wait(lambda: not any(map(process_state, ranks)), "the kernel to end the others", 10)
        gate.open_to()
        assert digest_of(run) == whole["SGD"]


def test_a_rank_that_is_stopped_is_found_and_its_group_replaced(tmp_path: Path, whole: dict[str, str]) -> None:
    """Rank 0 waits for it within a forward pass, where nothing but the agent sees that it stands still."""
    with training(tmp_path, 2, 2, "SGD", held_at=3, options=["--hang-after", "10s"]) as run:
        gate = Gate(tmp_path / "gate")
        names = [f"w{slot}.1-{rank}" for slot in range(2) for rank in range(2)]
        run.wait(lambda: len(gate.at(3, names)) == 4, "all ranks to come to step 3")
        (rank,) = others_of(run.pids["w1.1"])
        os.kill(rank, signal.SIGSTOP)
        gate.open_to()
        assert digest_of(run) == whole["SGD"]
    assert not process_state(rank)
    ended = [event for event in run.seen if event["kind"] == "worker_exited" and event["worker"] == "w1.1"]
    assert [event["reason"] for event in ended] == ["hung"]


def test_a_checkpoint_of_groups_is_loaded_by_any_number_of_ranks(tmp_path: Path, whole: dict[str, str]) -> None:
    """Two groups of two save; one of four goes on, and then a model that is not sharded, to the bits of one that did
    all of it."""
    place = tmp_path / "checkpoints"
    options, digests = ["--checkpoint", str(place), "--save-every", "1"], []
    for steps, groups, ranks, words in ((2, 2, 2, []), (4, 1, 4, []), (STEPS, 1, 1, ["--plain"])):
        counts = ["--workers", str(groups), "--ranks", str(ranks)]
        run = ObservedRun(tmp_path, "r", [*counts, *options], [SCRIPT, str(steps), "AdamW", *words])
        run.start()
        try:
            run.wait(run.over, "the end of the run", 90)
        finally:
            run.end()
        assert run.agent is not None and run.agent.returncode == 0, run.log()
        digests.append([event["digest"] for event in run.seen if event["kind"] == "finished"][-1])
        resumed = [event["step"] for event in run.seen if event["kind"] == "resumed"]
        assert resumed == [2, 4][: len(digests) - 1]
    assert digests[-1] == whole["AdamW"]
    to = tmp_path / "whole.safetensors"
    assert main(["checkpoint", "export", str(place), "--step", "4", "--only", "parameters", "--to", str(to)]) == 0
    exported = safetensors.torch.load_file(to)
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()}["hidden.0.weight"] == (57, 57)


def test_a_rank_that_fails_in_its_last_lines_makes_the_run_fail(tmp_path: Path) -> None:
    with training(tmp_path, 1, 2, "SGD", "--wrong", "last lines") as run:
        run.wait(run.over, "the end of the run", 60)
        assert run.agent is not None and run.agent.returncode == 1, run.log()
        assert "the disk is full" in run.log()
        assert "rank 1 of this group ended with exit code 1, and the group has failed with it" in run.log()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--ranks", "3"], "a power of two"),
        (["--ranks", "2", "--path", "network"], "--path network does not go with --ranks 2"),
        (["--ranks", "2", "--path", "process-group"], "--path process-group does not go with --ranks 2"),
        (["--ranks", "2", "--listen", "127.0.0.1"], "--listen does not go with --ranks 2"),
        (["--ranks", "2", "--servers", "1"], "--servers does not go with --ranks 2"),
        (["--ranks", "2", "--audit", "0.5"], "--audit does not go with --ranks 2"),
        (["--ranks", "2", "--memory", "plain"], "--memory does not go with --ranks 2"),
        (["--ranks", "2", "--keep-best", "loss:min"], "--keep-best does not go with --ranks 2"),
        (["--ranks", "2", "--ledger", "etcd://127.0.0.1:1"], "--ledger does not go with --ranks 2"),
    ],
)
def test_what_does_not_go_with_ranks_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    code = main(["run", "--dir", str(tmp_path), "--run", "r", "--workers", "1", *words, SCRIPT, "1", "SGD"])
    assert code == 2 and why in capsys.readouterr().err
    if len(words) > 2:
        option = " ".join(words[2:]) if words[2] == "--path" else words[2]
        assert f"`{option}`" in PAGE.read_text().partition("does not go with")[2]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--plain"], "--ranks 2 asks for groups that shard the model, and the model is not sharded"),
        (["--shards", "3"], "3 shards cannot be dealt to groups of 2 ranks"),
        (["--wrong", "batch norm"], "a buffer of a model that is sharded over a group changes"),
        (["--wrong", "elastic"], "the mode Elastic does not train models that are sharded"),
        (["--wrong", "twice"], "are added up twice in one shard"),
        (["--wrong", "evaluate"], "run.evaluate does not go with groups of ranks yet"),
    ],
)
def test_what_a_group_cannot_do_is_one_sentence(tmp_path: Path, words: list[str], why: str) -> None:
    with training(tmp_path, 1, 2, "SGD", *words) as run:
        run.wait(run.over, "the end of the run", 60)
        assert run.agent is not None and run.agent.returncode == 2, run.log()
        assert why in run.log()
