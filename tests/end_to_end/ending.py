"""A script that comes to its end in the way it is told: `ending.py HOW STEPS [PLACE]`. It prints where it ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import holdfast
from holdfast.engine.transfer import last_save

HOW, STEPS = sys.argv[1], int(sys.argv[2])
PLACE = sys.argv[3] if len(sys.argv) > 3 else None
AT = 7  # the step in which something happens
last_save.AWAY_S = last_save.REFUSED_S = 2.0


class Enough(Exception):
    pass


def fill(directory: Path) -> None:
    with (directory / "ballast").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    samples = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(samples)
    extras = {"scheduler": scheduler}
    run = holdfast.join(model, optimizer, data, batch_size=8, shards=4, extras=extras, checkpoint=PLACE)
    trained = 0
    loop = run.steps(STEPS)  # a progress bar that the script keeps does the same: the loop is not told that it is left
    kept = loop if HOW.startswith("kept") else None
    del loop
    try:
        for step in kept or run.steps(STEPS):
            if HOW == "break before" and step.number == AT:
                break
            for (x,) in step:
                loss = (model(x) ** 2).mean()
                loss.backward()
                step.record(loss=loss)
            optimizer.step()
            scheduler.step()
            trained += 1
            if step.number == AT:
                if HOW.endswith("break"):
                    break
                if HOW.endswith("exit"):
                    sys.exit(0)
                if HOW == "own exception":
                    raise Enough
                if HOW.startswith("full "):
                    fill(Path(HOW.removeprefix("full ")))
            if HOW == "slow":
                print("at", step.number, flush=True)
                time.sleep(0.05)
    except Enough:
        pass
    if HOW == "raise after":
        raise ValueError("after the loop")
    print("end", run.step, run.digest(), scheduler.last_epoch, "trained", trained, flush=True)


if __name__ == "__main__":
    main()
