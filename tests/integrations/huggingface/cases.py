"""What distribute(trainer) and Accelerator take and do, case by case, in one process that imports them once.

    python cases.py

Prints the name of each case that held. test_cases.py reads them. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import accelerate
import numpy
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

import holdfast.integrations.huggingface as on_huggingface
from holdfast import ConfigError
from holdfast.data import Stream, Tokens
from holdfast.integrations.huggingface import distribute, run_of
from tests.integrations.huggingface.training import LENGTH, WORDS, Rows, data, model
from tests.integrations.pages import run_examples


def trained(
    *,
    plain: bool = False,
    resume: Any = None,
    shards: int | None = None,
    home: str = "",
    rows: Any = None,
    **named: Any,
) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        arguments = {
            "output_dir": home or directory,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        }
        trainer = transformers.Trainer(
            model=model(0.0),
            args=transformers.TrainingArguments(**{**arguments, **named}),
            train_dataset=data() if rows is None else rows,
            eval_dataset=data()[:20],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if not plain:
            distribute(trainer, shards=shards)
        trainer.train(resume_from_checkpoint=resume)
        return trainer


def logged(trainer: Any, *names: str) -> list[float]:
    return [one[name] for one in trainer.state.log_history for name in names if name in one]


def alike(one: Any, other: Any, within: float = 1e-6) -> None:
    for names, off in ((("loss", "eval_loss"), within), (("grad_norm", "learning_rate"), 2 * within)):
        pairs = list(zip(logged(one, *names), logged(other, *names), strict=True))
        assert pairs and all(abs(mine - theirs) <= off for mine, theirs in pairs), pairs
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=40 * within)


def refused(said: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except ConfigError as error:
        assert said in str(error) and "hint" in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def case_the_loss_curve_is_that_without_holdfast() -> None:
    """Over tokens, of which sequences have different numbers; with clipping, warmup and evaluation."""
    named = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "epoch"}
    one, other = trained(plain=True, **named), trained(**named)
    alike(one, other)
    assert one.state.global_step == other.state.global_step == run_of(other).step == 8
    assert one.state.epoch == other.state.epoch and one.state.total_flos == other.state.total_flos


def case_a_batch_is_cut_into_shards_where_nothing_is_accumulated() -> None:
    named = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    one, other = trained(plain=True, **named), trained(**named)
    assert run_of(other).plan.shards == 8
    alike(one, other)


def case_every_sample_of_an_epoch_is_used_once() -> None:
    trainer = trained(per_device_train_batch_size=3, gradient_accumulation_steps=3, num_train_epochs=1)
    plan = run_of(trainer).plan  # 64 = 7 * 9 + 1, which goes with the seventh
    used = [
        number
        for step in range(trainer.state.global_step)
        for shard in range(3)
        for number in plan.indices(step, shard)
    ]
    assert sorted(used) == list(range(64)) and trainer.state.global_step == 7


def case_a_stream_of_token_files() -> None:
    with tempfile.TemporaryDirectory() as home:
        for number in range(2):
            (numpy.arange(32 * LENGTH, dtype=numpy.uint16) % WORDS).tofile(f"{home}/{number}.bin")
        files = [Tokens(path, length=LENGTH) for path in sorted(Path(home).iterdir())]
        stream = Stream(files, decode=lambda row: {"input_ids": row, "labels": row}, shuffle_buffer=16, block=2)
        trainer = trained(rows=stream)
    plan = run_of(trainer).plan
    for epoch in range(2):
        steps = range(4 * epoch, 4 * epoch + 4)
        assert sorted(n for step in steps for shard in range(4) for n in plan.indices(step, shard)) == [*range(64)]
    assert trainer.state.global_step == 8 and logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


class _Sequences:
    """A source of rows of data()."""

    identity = ("sequences",)

    def __len__(self) -> int:
        return 64

    def read(self, number: int) -> Any:
        return data()[number]


def case_a_stream_whose_batches_do_not_come_out_even() -> None:
    """64 samples in steps of 20; the last one has what is left. Whole batches only, where those are asked for."""
    for drop_last, sizes in ((False, [20, 20, 20, 4]), (True, [20, 20, 20])):
        stream = Stream([_Sequences()], shuffle_buffer=16, block=2)
        trainer = trained(rows=stream, per_device_train_batch_size=5, dataloader_drop_last=drop_last)
        plan = run_of(trainer).plan
        for epoch in range(2):
            steps = range(len(sizes) * epoch, len(sizes) * (epoch + 1))
            found = [[n for shard in range(4) for n in plan.indices(step, shard)] for step in steps]
            assert [len(one) for one in found] == sizes
            assert len({number for one in found for number in one}) == sum(sizes)
        assert trainer.state.global_step == 2 * len(sizes)


def case_an_iterable_dataset_is_as_without_holdfast() -> None:
    one, other = trained(plain=True, rows=Rows(), max_steps=7), trained(rows=Rows(), max_steps=7)
    alike(one, other)
    assert other.state.global_step == run_of(other).step == 7
    try:
        trained(rows=Rows())
    except (ConfigError, ValueError) as error:  # where transformers does not say it itself, Holdfast does
        assert "has no length" in str(error) or "does not implement __len__" in str(error), error
    else:
        raise AssertionError("not refused: a dataset without a length, and no max_steps")


def case_a_run_goes_on_from_a_checkpoint_of_hugging_faces_own() -> None:
    whole = trained(plain=True)
    for first_is_plain in (True, False):
        with tempfile.TemporaryDirectory() as home:
            trained(plain=first_is_plain, home=home, save_strategy="steps", save_steps=6, max_steps=8)
            path = str(Path(home) / "checkpoint-6")  # in the middle of the second epoch
            rest = trained(plain=not first_is_plain, home=home, resume=path)
            assert rest.state.global_step == 8
            for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=0.0, atol=1e-4), first_is_plain


def case_refusals_of_the_trainer() -> None:
    refused("auto_find_batch_size", lambda: trained(auto_find_batch_size=True))
    refused("non_padding", lambda: trained(include_num_input_tokens_seen="non_padding"))
    refused("twice", lambda: trained(num_train_epochs=1).train())
    refused("distributed already", lambda: distribute(trained(num_train_epochs=1)))
    refused("the trainer is", lambda: distribute(model(0.0)))


def looped(
    *, plain: bool = False, before: Callable[[Any, Any], Any] | None = None, **named: Any
) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(network.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator)
    loader = DataLoader(TensorDataset(x, x[:, :3].abs().argmax(1)), batch_size=8)
    kind: Any = accelerate.Accelerator if plain else on_huggingface.Accelerator
    accelerator = kind(gradient_accumulation_steps=4, cpu=True, **named)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    found: list[float] = []
    held: list[float] = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(network):
                loss = torch.nn.functional.cross_entropy(network(inputs), targets)
                held.append(loss.item())
                accelerator.backward(loss)
                if before is not None:
                    before(accelerator, loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(network.parameters(), 0.5)
                if before is None:
                    optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append(sum(held) / len(held) if plain else accelerator.step_metrics["loss"])
                held = []
    found += [float(one.abs().sum()) for one in network.parameters()] + scheduler.get_last_lr()
    return accelerator, found


def case_a_loop_on_accelerate_is_as_without_holdfast() -> None:
    _, plain = looped(plain=True)
    accelerator, ours = looped()
    assert accelerator.run.step == 6
    off = [abs(a - b) for a, b in zip(plain, ours, strict=True)]
    assert max(off[:6]) <= 1e-6 and max(off) <= 1e-5, (plain, ours)  # losses, and then sums of parameters


def case_refusals_of_a_loop() -> None:
    def again(accelerator: Any, loss: Any) -> None:
        accelerator.backward(loss * 0.5)

    refused("called twice for a batch", lambda: looped(before=again))
    refused("no optimizer was called", lambda: looped(before=lambda accelerator, loss: None))


def case_the_examples_of_the_page() -> None:
    run_examples("hugging-face.md", count=2)


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
            print(f"held {name}", flush=True)
    os._exit(0)  # the runs that were refused in the middle would say so now


if __name__ == "__main__":
    main()
