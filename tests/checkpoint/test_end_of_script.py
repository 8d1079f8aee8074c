"""A script's last checkpoint is committed although the interpreter is already on its way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.checkpoint.restoring.reading import list_checkpoints, verify
from holdfast.checkpoint.storage.opening import open_storage

STEPS = 3
# 84 MB with Adam's state: more than one part, and so more than one thread that writes.
SCRIPT = f"""
import sys, torch, holdfast
model = torch.nn.Linear(2700, 2600)
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.TensorDataset(torch.ones(8, 2700))
kept = holdfast.Checkpoints(sys.argv[1], every={STEPS})
run = holdfast.join(model, optimizer, data, batch_size=2, shards=1, checkpoint=kept)
for step in run.steps({STEPS}):
    for (x,) in step:
        model(x).mean().backward()
    run.optimizer.step()
"""


def test_the_last_line_is_not_too_early_for_the_last_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "kept")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    storage = open_storage(str(tmp_path / "kept"))
    newest = list_checkpoints(storage)[0]
    assert (newest.step, newest.committed) == (STEPS, True)
    assert newest.parts > 1
    assert verify(storage, STEPS) == []
