"""`holdfast check` with real processes: exit codes, sentences, and the file for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.script_check import conduct
from holdfast.script_check.conduct import CheckRequest, check_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = """
import sys

import torch
from torch.nn import functional as F

import holdfast

names = {f"name{number}" for number in range(40)}  # iterated in the order of their hashes
torch.manual_seed(0)
bound = 1.0 if "bounded" in sys.argv else None
model = torch.nn.Sequential(torch.nn.Embedding(8, 4, max_norm=bound), torch.nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.tensor([number % 8]), number % 4) for number in range(64)]
loaders = {"num_workers": 1, "prefetch_factor": 3}
run = holdfast.join(model, optimizer, data, batch_size=16, shards=4, checkpoint=sys.argv[1], **loaders)
for step in run.steps(50):
    for x, y in step:
        weight = 0.0
        for name in names:
            weight = 0.9 * weight + int(name[4:])
        loss = F.cross_entropy(model(x), y) * weight
        loss.backward()
    optimizer.step()
"""


def test_a_script_with_a_set_of_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is exact with the hash seed that workers have, and is not where each process has its own."""
    script, told, place = tmp_path / "train.py", tmp_path / "told.json", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    words = (str(script), str(place))
    assert check_script(CheckRequest(words=words)) == 0
    assert capsys.readouterr().out == "exact in 16 shards of 4 steps: fetch, order, restore, join\n"
    assert not place.exists()

    variables = conduct.process_variables
    monkeypatch.setattr(conduct, "process_variables", lambda: {**variables(), "PYTHONHASHSEED": "random"})
    assert check_script(CheckRequest(words=words, json=told)) == 1
    said = capsys.readouterr().err
    assert "not exact: the gradient of 0.weight in shard 0 of step 2 differs in a process that joined the run" in said
    assert "train.py:9 (names = {" in said
    verdict = json.loads(told.read_text())
    assert (verdict["exact"], verdict["found"]["check"], verdict["found"]["step"]) == (False, "join", 2)


def test_what_is_refused_and_bad_input(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def check(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "check", *words], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    code, said = check(str(script), str(tmp_path / "checkpoints"), "bounded")
    assert code == 2
    assert said.startswith("holdfast: the parameter 0.weight was changed while a shard was computed")
    assert check(str(tmp_path / "nothing.py")) == (
        2,
        f"holdfast: there is no script {tmp_path / 'nothing.py'}\n  hint: name a Python file, or -m and a module\n",
    )
    code, said = check("--steps", "1", str(script))
    assert (code, said.splitlines()[0]) == (2, "holdfast: --steps is 1")


TABLES = """
import sys

import torch

import holdfast

torch.manual_seed(0)


class Taste(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = holdfast.EmbeddingTable(4, seed=1), holdfast.EmbeddingTable(4, seed=2)
        self.scale = torch.nn.Linear(1, 1)

    def forward(self, ids):
        return self.scale((self.users(ids) * self.items(ids % 7)).sum(dim=1, keepdim=True))


model = Taste()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.tensor(number % 9), torch.tensor([1.0])) for number in range(64)]
run = holdfast.join(model, optimizer, data, batch_size=16, shards=4)
seen = 0
for step in run.steps(50):
    for x, y in step:
        seen += "planted" in sys.argv
        loss = (model(x) - y).square().mean() * (1 + seen)
        loss.backward()
    optimizer.step()
    model.users.step()
    model.items.step()
"""


def test_a_script_with_tables_is_checked_in_its_dense_part_and_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, told = tmp_path / "train.py", tmp_path / "told.json"
    script.write_text(TABLES)
    assert check_script(CheckRequest(words=(str(script),), json=told)) == 0
    assert capsys.readouterr().out == (
        "exact in 16 shards of 4 steps: fetch, order, restore, join; that is the dense part, with the rows of users "
        "and items left as they are: rows that several workers train depend on whose update comes first, so they are "
        "not exact by design (docs/how-to/embedding-tables.md)\n"
    )
    assert json.loads(told.read_text())["tables"] == ["users", "items"]
    assert check_script(CheckRequest(words=(str(script), "planted"))) == 1, "the dense part is still looked at"
    assert "the gradient of scale.weight" in capsys.readouterr().err
