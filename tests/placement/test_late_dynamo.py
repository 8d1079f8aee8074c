"""A worker's process does without torch's compiler until somebody compiles, and then has all of it."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from holdfast.placement import late_dynamo
late_dynamo.install()
import torch
import torch._dynamo

def here():
    return type(sys.modules["torch._dynamo"]).__name__

torch.manual_seed(0)
late_dynamo.be_deterministic()
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())

def train():
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

train()
optimizer.load_state_dict(optimizer.state_dict())
print(here())
told = torch.optim.Optimizer.zero_grad.__wrapped__
print(getattr(told, "__dynamo_disable") is told)
torch.compile(train, backend="eager")()
print(here(), torch._dynamo is sys.modules["torch._dynamo"])
train()
print(getattr(told, "__dynamo_disable") is told)
import torch._inductor.config
print(torch._inductor.config.deterministic, torch.are_deterministic_algorithms_enabled())
print(float(model.bias.detach().sum()))
"""


def run(*, dynamo: str) -> list[str]:
    environment = {**os.environ, "HOLDFAST_DYNAMO": dynamo}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_is_lost_by_it() -> None:
    late, eager = run(dynamo=""), run(dynamo="eager")
    assert late[:4] == ["LateDynamo", "True", "module True", "False"]
    assert eager[0] == "module"
    assert late[4] == eager[4] == "True True"
    assert late[5] == eager[5], "the weights depend on it"
