"""One process of benchmarks/trainers.py: a trainer's own loop, with Holdfast or without; prints what a step took.

    python benchmarks/trainer_steps/worker.py lightning | trainer | accelerate plain | holdfast [--steps 40]

Both take the same micro-batches: a step accumulates eight, which are the shards. The first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

SHARDS, ROWS, WARM = 8, 64, 5


class Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def tick(self) -> None:
        self._times.append(time.perf_counter())

    def step_s(self) -> float:
        pairs = zip(self._times[WARM:], self._times[WARM + 1 :], strict=False)
        return statistics.median(after - before for before, after in pairs)


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(width, 10))


def dataset(width: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHARDS * ROWS * 10, width, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))


def by_lightning(plain: bool, steps: int, width: int, home: str) -> tuple[float, bool]:
    import lightning

    from holdfast.integrations.lightning import HoldfastStrategy

    clock = Clock()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(width)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=SHARDS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=home,
        **({} if plain else {"strategy": HoldfastStrategy()}),
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(dataset(width), batch_size=ROWS, shuffle=True))
    return clock.step_s(), trainer.is_global_zero


def by_trainer(plain: bool, steps: int, width: int, home: str) -> tuple[float, bool]:
    import transformers

    from holdfast.integrations.huggingface import distribute

    clock = Clock()

    class Ticking(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=32, n_embd=width // 4, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 512, (SHARDS * 8 * 10, 32), generator=generator)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=home,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=SHARDS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in words],
        callbacks=[Ticking()],
    )
    if not plain:
        distribute(trainer)
    trainer.train()
    return clock.step_s(), trainer.is_world_process_zero()


def by_accelerate(plain: bool, steps: int, width: int, home: str) -> tuple[float, bool]:
    import accelerate

    import holdfast.integrations.huggingface as on_huggingface

    clock = Clock()
    kind: Any = accelerate.Accelerator if plain else on_huggingface.Accelerator
    accelerator = kind(gradient_accumulation_steps=SHARDS, cpu=True)
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = torch.utils.data.DataLoader(dataset(width), batch_size=ROWS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(steps // 10):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.tick()
    return clock.step_s(), accelerator.is_main_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["lightning", "trainer", "accelerate"])
    parser.add_argument("how", choices=["plain", "holdfast"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    by = {"lightning": by_lightning, "trainer": by_trainer, "accelerate": by_accelerate}[options.trainer]
    with tempfile.TemporaryDirectory() as home:
        step_s, leads = by(options.how == "plain", options.steps, options.width, home)
    if leads:
        print(f"figures {json.dumps({'step_s': step_s})}", flush=True)


if __name__ == "__main__":
    main()
