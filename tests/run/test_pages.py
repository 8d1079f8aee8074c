"""The scripts of the how-to pages, as they stand there: of two workers one is killed, and the bits are those of one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.harness.forked import agreed, forked

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
SCRIPTS = (
    *("several-optimizers.md", "samplers-and-imbalanced-data.md", "mixed-precision.md", "torch-compile.md"),
    *("convert-a-dataloader-script.md", "streams.md", "iterable-datasets.md", "torchrun.md"),
)


def script_of(page: str) -> str:
    """The first block that is a whole script."""
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    script = next(block for block in blocks if block.startswith("import holdfast") and "run.digest()" in block)
    # The same steps without a compiler of C++ at work for a minute.
    return script.replace("torch.compile(model, ", 'torch.compile(model, backend="eager", ')


def run_script(page: str, dies_at_call: int = 0) -> Any:
    """What the script prints of its state, in a process of its own; it may die in a call of optimizer.step()."""
    calls = 0

    def die(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == dies_at_call:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(die)
    printed: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda *words: printed.append(" ".join(map(str, words)))}
    exec(compile(script_of(page), page, "exec"), names)
    names["run"].close()
    assert calls > 10
    return printed[-1]


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.parametrize("page", SCRIPTS)
def test_a_pages_script_survives_a_kill(page: str) -> None:
    quiet = agreed(forked(lambda: run_script(page), workers=1))
    assert quiet.startswith("digest ")
    outcomes = forked({"w0.1": lambda: run_script(page), "w1.1": lambda: run_script(page, dies_at_call=7)})
    assert outcomes["w1.1"].signal == signal.SIGKILL
    assert agreed(outcomes) == quiet
