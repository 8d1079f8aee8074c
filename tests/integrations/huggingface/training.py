"""A tiny causal language model with random weights, with or without Holdfast: killed, joined, stopped and compared.

    python training.py trainer | loop [--plain] [--iterable] [--steps 16] [--accumulate 4] [--gate FILE] --home DIR

Prints the history of its losses and the digest of its weights. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tests.harness.gate import wait_at

WORKER = os.environ.get("HOLDFAST_WORKER", "")
SAMPLES, LENGTH, WORDS = 64, 12, 40


def data() -> list[dict[str, Any]]:
    """Sequences that count on, of unequal length: the loss is one over tokens."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, WORDS, (SAMPLES,), generator=generator).tolist()
    found = []
    for number, start in enumerate(starts):
        words = [(start + place * (1 + number % 3)) % WORDS for place in range(LENGTH)]
        labels = [word if place < LENGTH - number % 4 else -100 for place, word in enumerate(words)]
        found.append({"input_ids": torch.tensor(words), "labels": torch.tensor(labels)})
    return found


class Rows(torch.utils.data.IterableDataset[Any]):
    """The same one after the other, with a position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        rows = data()
        while self.at < SAMPLES:
            self.at += 1
            yield rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def model(dropout: float) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


class Waiting(transformers.TrainerCallback):
    """At the gate before every step."""

    def __init__(self, gate: Path | None) -> None:
        self._gate = gate

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_at(self._gate, WORKER, state.global_step)


def train_by_trainer(options: argparse.Namespace) -> None:
    from holdfast.integrations.huggingface import distribute, run_of

    args = transformers.TrainingArguments(
        output_dir=str(options.home),
        max_steps=options.steps,
        per_device_train_batch_size=16 // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=2,
        load_best_model_at_end=False,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = transformers.Trainer(
        model=model(options.dropout),
        args=args,
        train_dataset=Rows() if options.iterable else data(),
        eval_dataset=data()[:20],
        callbacks=[Waiting(options.gate), transformers.EarlyStoppingCallback(50)],
    )
    if not options.plain:
        distribute(trainer)
    trainer.train(resume_from_checkpoint=options.resume)
    told = ("loss", "grad_norm", "eval_loss", "learning_rate", "epoch", "step")
    history = [{name: one[name] for name in told if name in one} for one in trainer.state.log_history]
    print("history", json.dumps(history))
    if not options.plain:
        print("digest", run_of(trainer).digest())


class Losses:
    """What the loop remembers, so that a worker that joins knows it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def train_in_a_loop(options: argparse.Namespace) -> None:
    import accelerate

    import holdfast.integrations.huggingface as on_huggingface

    kind: Any = accelerate.Accelerator if options.plain else on_huggingface.Accelerator
    accelerator = kind(
        gradient_accumulation_steps=options.accumulate, cpu=True, **({} if options.plain else {"seed": 3})
    )
    network = model(options.dropout)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    rows = data()
    shown: Any = Rows() if options.iterable else rows
    loader = torch.utils.data.DataLoader(shown, batch_size=16 // options.accumulate)
    held_out = torch.utils.data.DataLoader(rows[:20], batch_size=5)
    network, optimizer, loader, held_out, scheduler = accelerator.prepare(
        network, optimizer, loader, held_out, scheduler
    )
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    waits = True
    held: list[float] = []
    for _ in range(options.steps // 4):
        network.train()
        for batch in loader:
            if waits and not options.plain:
                wait_at(options.gate, WORKER, accelerator.run.step)
            with accelerator.accumulate(network):
                loss = network(**batch).loss
                held.append(float(loss))
                accelerator.backward(loss)
                if waits := accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(network.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.values.append(sum(held) / len(held) if options.plain else accelerator.step_metrics["loss"])
                held = []
        network.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(network(**batch).loss) for batch in held_out]
        losses.values.append(float(torch.stack(found).mean()))
    print("history", json.dumps(losses.values))
    if not options.plain:
        print("digest", accelerator.run.digest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["trainer", "loop"])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--iterable", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--resume")
    options = parser.parse_args()
    {"trainer": train_by_trainer, "loop": train_in_a_loop}[options.how](options)


if __name__ == "__main__":
    main()
