"""What people get wrong, each answered by one sentence with a hint and exit code 2, or by the script's own code."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import DEADLINE_S, holdfast, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

SCRIPT = """
import sys, torch, holdfast
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

how = sys.argv[1]

class Stream(IterableDataset):
    def __iter__(self):
        return iter(())

class Endless:
    def __getitem__(self, index):
        return torch.zeros(6)

def fail_at(step):
    raise KeyError("my own mistake")

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
if how == "stream":
    dataset = Stream()
if how == "loader":
    dataset = torch.utils.data.DataLoader(dataset, batch_size=12, shuffle=True)
if how == "no length":
    dataset = Endless()
run = holdfast.join(model, optimizer, dataset, batch_size=10 if how == "shards" else 16, shards=4)
for step in run.steps(20):
    for x, y in step:
        if how == "raises":
            fail_at(step.number)
        if how == "nondeterministic":
            x.put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        loss = F.mse_loss(model(x), y)
        if how == "NaN" and step.number == 5:
            loss = loss * float("nan")
        loss.backward()
        step.record(loss=loss)
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def answered(done: subprocess.CompletedProcess[str], sentence: str, hint: str, code: int = 2) -> None:
    """Exactly one sentence, exactly one hint, no traceback."""
    everything = f"{done.stdout}\n--- stderr\n{done.stderr}"
    assert done.returncode == code, everything
    lines = done.stderr.splitlines()
    assert len(lines) == 2, everything
    assert lines[0].startswith("holdfast: ") and sentence in lines[0], everything
    assert lines[1].startswith("  hint: ") and hint in lines[1], everything
    assert "Traceback" not in everything


# ---- before anything is started


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["--workers", "2", "nothere.py"], "there is no script nothere.py", "check the path"),
        (["--workers", "2", "."], ". is not a file", "-m module"),
        (["--workers", "2"], "there is nothing to run", "name a script"),
        (["SCRIPT"], "--workers is missing", "say how many workers train"),
        (["--workers", "0", "SCRIPT"], "--workers 0 is for a host that only serves, and --servers is 0", "--servers 1"),
        (["--workers", "-3", "SCRIPT"], "--workers is -3", "cores"),
        (["--workers", "many", "SCRIPT"], "--workers is 'many', which is not a whole number", "--help"),
        (["--workers", "99999999999999999999", "SCRIPT"], "--workers is 99999999999999999999", "cores"),
        (["--workers", "2", "--spares", "-1", "SCRIPT"], "--spares is -1", "--help"),
        (["--workers", "2", "--restarts", "-1", "SCRIPT"], "--restarts is -1", "--help"),
        (["--workers", "2", "--numerics", "shrug", "SCRIPT"], "--numerics is 'shrug'", "warn"),
        (["--workers", "2", "--lease", "nan", "SCRIPT"], "--lease is 'nan', which is not a time", "2 s"),
        (["--workers", "2", "--lease", "0", "SCRIPT"], "--lease is 0 s", "2 s"),
        (["--workers", "2", "--path", "pigeon", "SCRIPT"], "--path is 'pigeon'", "shared-memory"),
        (["--workers", "2", "--listen", "127.0.0.1:0-99999", "SCRIPT"], "is not a range of ports", "1 to 65535"),
        (["--workers", "2", "--run", "../up", "SCRIPT"], "'../up' cannot be the name of a run", "letters"),
        (["--workers", "2", "--run", "", "SCRIPT"], "the value of --run is empty", "shell variable"),
        (["--workers", "2", "--speed", "11", "SCRIPT"], "--speed", "--help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options(arguments: list[str], sentence: str, hint: str, script: str, tmp_path: Path) -> None:
    arguments = [script if argument == "SCRIPT" else argument for argument in arguments]
    answered(holdfast("run", *arguments, home=tmp_path / "home"), sentence, hint)
    assert not list((tmp_path / "home" / "runs").glob("*"))


def test_a_port_in_use(script: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = holdfast("run", "--workers", "1", "--listen", listen, script, "", home=tmp_path / "home")
    answered(done, f"--listen {listen}: 0 of 1 ports can be used and the run needs 1", "give a wider range")


def test_an_address_of_another_host(script: str, tmp_path: Path) -> None:
    done = holdfast("run", "--workers", "1", "--listen", "nowhere.invalid", script, "", home=tmp_path / "home")
    answered(done, "--listen: nowhere.invalid is not an address of this host", "--listen 127.0.0.1")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk(script: str, full_disk: Path) -> None:
    done = holdfast("run", "--workers", "1", script, "", home=full_disk)
    answered(done, f"the disk under {full_disk}", "free some space")


def test_a_directory_that_is_a_file(script: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    done = holdfast("run", "--workers", "1", script, "", home=home)
    answered(done, f"{home}", "--dir")


# ---- what only a worker can find out


@pytest.mark.parametrize(
    ("how", "sentence", "hint"),
    [
        ("shards", "a batch of 10 cannot be cut into 4 equal shards", "batch_size=8"),
        ("no length", "the dataset, an Endless, has no length", "__len__"),
        ("stream", "the dataset, a Stream, gives nothing", "at least one batch"),
        ("loader", "the dataset is a DataLoader", "holdfast.join(model, optimizer, loader.dataset, batch_size=12)"),
    ],
)
def test_wrong_arguments_of_join(how: str, sentence: str, hint: str, script: str, tmp_path: Path) -> None:
    answered(holdfast("run", "--workers", "1", script, how, home=tmp_path), sentence, hint)


def test_a_loss_that_is_not_a_number(script: str, tmp_path: Path) -> None:
    done = holdfast("run", "--workers", "2", script, "NaN", home=tmp_path)
    answered(done, "the metric 'loss' is nan at step 5", "lower the learning rate")


def test_a_worker_that_raises_is_heard_once(script: str, tmp_path: Path) -> None:
    done = holdfast("run", "--workers", "2", script, "raises", home=tmp_path)
    everything = done.stdout + done.stderr
    assert done.returncode == 1, everything
    assert done.stderr.startswith("holdfast: the script failed in every worker before the first step\n"), everything
    assert done.stderr.count("Traceback") == 1, everything
    assert done.stderr.count("in fail_at") == 1, everything
    assert f'File "{script}", line' in done.stderr
    assert "bootstrap" not in done.stderr and "runpy" not in done.stderr  # the script's lines, not ours
    assert done.stderr.rstrip().splitlines()[-1].startswith("  hint: all output is in")


def test_a_nondeterministic_operation(script: str, tmp_path: Path) -> None:
    done = holdfast("run", "--workers", "1", script, "nondeterministic", home=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    sentence = "holdfast: this operation gives different bits from run to run, so training cannot be exact\n  hint: "
    assert done.stderr.count(sentence) == 1
    assert "put_ does not have a deterministic implementation" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("how", ["shards", "loader", "raises"])
def test_a_script_started_by_hand(how: str, script: str, tmp_path: Path) -> None:
    """The same sentence and exit code as in a run; the script's own exceptions keep their traceback."""
    done = subprocess.run(
        [sys.executable, script, how], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    everything = done.stdout + done.stderr
    if how == "raises":
        assert done.returncode == 1 and "Traceback" in done.stderr and "in fail_at" in done.stderr, everything
        return
    assert done.returncode == 2 and "Traceback" not in done.stderr, everything
    lines = done.stderr.splitlines()
    assert lines[0].startswith("holdfast: ") and lines[1].startswith("  hint: "), everything
    assert lines[2].startswith("  at script.py:") and len(lines) == 3, everything


def test_a_second_run_of_the_same_name(tmp_path: Path) -> None:
    """While the first lives; after it has finished there is nothing left to do."""
    script = tmp_path / "wait.py"
    script.write_text(WAITING)
    home = tmp_path / "home"
    home.mkdir()
    end = tmp_path / "end"
    with training(home, "--workers", "1", script=[str(script), str(end)]) as run:
        run.wait(lambda: run.said("w0.1 | here"), "the first run", DEADLINE_S)
        done = holdfast("status", "r", home=home)
        assert done.returncode == 0, done.stderr
        again = subprocess.run(
            [sys.executable, "-m", "holdfast", "run", "--dir", str(home), "--run", "r", "--workers", "1", str(script)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        answered(again, "run r already has an agent (process", "another --run name")
        end.touch()
        run.finish(DEADLINE_S)
    done = holdfast("run", "--run", "r", "--workers", "1", str(script), str(end), home=home)
    assert done.returncode == 0 and "run r is finished already, at step 3" in done.stdout, done


WAITING = """
import sys, time, torch, holdfast
from pathlib import Path
from torch.utils.data import TensorDataset

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = holdfast.join(model, optimizer, TensorDataset(torch.ones(8, 2)), batch_size=4, shards=2)
for step in run.steps(3):
    for (x,) in step:
        model(x).sum().backward()
    optimizer.step()
    if step.number == 1:
        print("here")
        while not Path(sys.argv[1]).exists():
            time.sleep(0.01)
"""
