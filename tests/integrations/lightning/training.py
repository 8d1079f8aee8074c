"""A small Lightning module, with or without Holdfast: what the tests kill, join, stop, resume and compare.

    python training.py [--plain] [--epochs 3] [--accumulate 8] [--gate FILE] [--home DIR] [--precision 32]

Prints the history of its metrics, how often files were written, and the digest of its weights.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastStrategy, run_of
from tests.harness.gate import wait_at

WORKER = os.environ.get("HOLDFAST_WORKER") or os.environ.get("SLURM_PROCID", "")


class Small(lightning.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("right", (logits.argmax(1) == y).float().sum(), reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByHand(Small):
    """Two optimizers, one after the other."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net[0].parameters(), 0.01)
        return [first, torch.optim.SGD(self.net[3].parameters(), 0.1)], [torch.optim.lr_scheduler.StepLR(first, 5)]


class History(lightning.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append({name: float(value) for name, value in sorted(trainer.callback_metrics.items())})

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics, self.losses = state["metrics"], state["losses"]


class Waiting(lightning.Callback):
    """At the gate before every step."""

    def __init__(self, gate: Path | None) -> None:
        self._gate = gate

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        wait_at(self._gate, WORKER, trainer.global_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ckpt")
    parser.add_argument("--save-at-end", type=Path)
    options = parser.parse_args()
    lightning.seed_everything(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 12, generator=generator)
    y = x[:, :3].abs().argmax(1)
    history = History()
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        precision=options.precision,
        gradient_clip_val=None if options.by_hand else 0.5,
        val_check_interval=0.5,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.home,
        logger=CSVLogger(options.home / "logs"),
        callbacks=[
            history,
            Waiting(options.gate),
            ModelCheckpoint(monitor="val_loss", save_top_k=2),
            EarlyStopping(monitor="val_loss", patience=100),
            LearningRateMonitor(),
        ],
        **({} if options.plain else {"strategy": HoldfastStrategy(shards=8, spread_evaluation=options.spread)}),
    )
    train = DataLoader(TensorDataset(x, y), batch_size=32 // options.accumulate, shuffle=options.shuffle)
    module = (ByHand if options.by_hand else Small)(options.dropout)
    trainer.fit(module, train, DataLoader(TensorDataset(x, y), batch_size=32), ckpt_path=options.ckpt)
    print("history", json.dumps({"metrics": history.metrics, "losses": history.losses, "steps": trainer.global_step}))
    if options.save_at_end:
        trainer.save_checkpoint(options.save_at_end)
    if not options.plain:
        print("digest", run_of(trainer).digest())


if __name__ == "__main__":
    main()
