"""What HoldfastStrategy takes and does, case by case, in one process that imports Lightning once.

    python cases.py

Prints the name of each case that held. test_cases.py reads them.
"""

from __future__ import annotations

import csv
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from holdfast import ConfigError
from holdfast.data import Stream, Tokens
from holdfast.integrations.lightning import HoldfastStrategy, run_of
from holdfast.integrations.lightning.trainer_state import TrainerState
from tests.integrations.pages import run_examples

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
NO_FILES = {"enable_checkpointing": False}


def data(count: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x[:, :3].abs().argmax(1))


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.losses: list[float] = []
        self.logged: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, **self.logged)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss_epoch"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Two(lightning.LightningModule):
    """Two optimizers by hand, one after the other, with clipping and a scheduler."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net, self.critic = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)
        self.losses: list[float] = []
        self._more = more

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, other = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self.critic(self.net(batch[0]).tanh()), batch[1])
        self.log("first", loss, on_step=False, on_epoch=True)
        one.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        one.step()
        if batch_idx % 2 == 0:
            loss = torch.nn.functional.cross_entropy(self.critic(self.net(batch[0]).tanh()), batch[1])
            other.zero_grad()
            self.manual_backward(loss)
            other.step()
            self.log("second", loss, on_step=False, on_epoch=True)
        self.lr_schedulers().step()
        for _ in range(self._more):
            one.step()

    def on_train_epoch_end(self) -> None:
        self.losses += [float(self.trainer.callback_metrics[name]) for name in ("first", "second")]

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam(self.net.parameters(), 0.02)
        return [one, torch.optim.SGD(self.critic.parameters(), 0.1)], [torch.optim.lr_scheduler.StepLR(one, 2)]


def fit(
    module: Any, *, plain: bool = False, batch_size: int = 4, ckpt: Any = None, rows: Any = None, **named: Any
) -> lightning.Trainer:
    strategy = {name: named.pop(name) for name in ("shards", "updates", "spread_evaluation") if name in named}
    given: dict[str, Any] = {} if plain else {"strategy": HoldfastStrategy(**strategy)}
    files = {} if any(isinstance(one, ModelCheckpoint) for one in named.get("callbacks", ())) else NO_FILES
    trainer = lightning.Trainer(**{**QUIET, **files, "max_epochs": 2, **given, **named})
    shown = DataLoader(data() if rows is None else rows, batch_size=batch_size)
    trainer.fit(module, shown, DataLoader(data(), batch_size=32), ckpt_path=ckpt)
    return trainer


def alike(one: Any, other: Any, within: float = 1e-6) -> None:
    assert len(one.losses) == len(other.losses) and one.losses
    assert all(abs(a - b) <= within for a, b in zip(one.losses, other.losses, strict=True)), (one.losses, other.losses)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=20 * within)


def refused(said: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except ConfigError as error:
        assert said in str(error) and "hint" in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def case_the_loss_curve_is_that_without_holdfast() -> None:
    one, other = Small(), Small()
    named = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.3, "max_epochs": 3}
    plain, ours = fit(one, plain=True, **named), fit(other, **named)
    alike(one, other)
    assert plain.global_step == ours.global_step == 18 and plain.current_epoch == ours.current_epoch == 3
    assert abs(float(plain.callback_metrics["val_loss"]) - float(ours.callback_metrics["val_loss"])) <= 1e-6


def case_a_batch_is_cut_into_shards_where_nothing_is_accumulated() -> None:
    one, other = Small(), Small()
    fit(one, plain=True, batch_size=16)
    assert run_of(fit(other, batch_size=16)).plan.shards == 8
    alike(one, other)


def case_every_sample_of_an_epoch_is_used_once() -> None:
    module = Small()
    seen: list[int] = []
    inner = module.training_step
    rows = {tuple(row.tolist()): number for number, row in enumerate(data().tensors[0])}

    def training_step(batch: Any, batch_idx: int) -> Any:
        seen.extend(rows[tuple(row.tolist())] for row in batch[0])
        return inner(batch, batch_idx)

    module.training_step = training_step  # type: ignore[method-assign]
    trainer = fit(module, batch_size=7, accumulate_grad_batches=3, max_epochs=1)  # 96 = 4 * 21 + 12
    assert sorted(seen) == list(range(96)) and trainer.global_step == 5


def case_a_stream_of_token_files() -> None:
    with tempfile.TemporaryDirectory() as home:
        for number in range(2):
            numpy.arange(number * 288, number * 288 + 288, dtype=numpy.uint16).tofile(f"{home}/{number}.bin")
        files = [Tokens(path, length=6) for path in sorted(Path(home).iterdir())]
        stream = Stream(files, decode=lambda row: (row / 600, int(row[0]) // 6 % 3), shuffle_buffer=24, block=4)
        trainer = fit(Small(), rows=stream, batch_size=8, accumulate_grad_batches=4, max_epochs=2)
        plan = run_of(trainer).plan
        for epoch in range(2):
            steps = range(3 * epoch, 3 * epoch + 3)
            assert sorted(n for step in steps for shard in range(4) for n in plan.indices(step, shard)) == [*range(96)]
        assert trainer.global_step == 6 and plan.indices(0, 0) != plan.indices(3, 0)


class _Rows:
    """A source of rows of data()."""

    identity = ("rows",)

    def __len__(self) -> int:
        return 96

    def read(self, number: int) -> Any:
        return data()[number]


def samples_of(trainer: lightning.Trainer, first: int, stop: int) -> list[list[int]]:
    plan = run_of(trainer).plan
    return [[n for shard in range(plan.shards) for n in plan.indices(step, shard)] for step in range(first, stop)]


def case_a_stream_whose_batches_do_not_come_out_even() -> None:
    """96 samples in steps of 28: three of these and 12 that are left; each once, and in another order then."""
    stream = Stream([_Rows()], shuffle_buffer=24, block=4)
    trainer = fit(Small(), rows=stream, batch_size=7, accumulate_grad_batches=4, max_epochs=2)
    assert trainer.global_step == 8
    epochs = [samples_of(trainer, 4 * epoch, 4 * epoch + 4) for epoch in range(2)]
    for epoch in epochs:
        assert [len(one) for one in epoch] == [28, 28, 28, 12]
        assert sorted(number for one in epoch for number in one) == [*range(96)]
    assert epochs[0] != epochs[1]


def case_limit_train_batches_counts_a_streams_batches_too() -> None:
    stream = Stream([_Rows()], shuffle_buffer=24, block=4)
    trainer = fit(Small(), rows=stream, batch_size=7, accumulate_grad_batches=4, max_epochs=2, limit_train_batches=5)
    assert trainer.global_step == 4 and [len(one) for one in samples_of(trainer, 0, 4)] == [28, 7, 28, 7]
    used = [number for one in samples_of(trainer, 0, 2) for number in one]
    assert len(set(used)) == 35


def case_a_stream_is_shuffled_where_a_batch_has_several_updates() -> None:
    stream = Stream([_Rows()], shuffle_buffer=24, block=4)
    trainer = fit(Two(), rows=stream, batch_size=20, max_epochs=1, shards=4)
    found = samples_of(trainer, 0, 10)
    assert [len(one) for one in found] == [20] * 8 + [16] * 2 and found[::2] == found[1::2]
    used = [number for one in found[::2] for number in one]
    assert sorted(used) == [*range(96)] and used != sorted(used)


def case_the_state_that_a_joiner_is_given_in_a_step_has_nothing_of_the_step() -> None:
    """It is read whenever one comes, and the loops count a batch as begun before its shards are computed."""
    states: list[Any] = []
    told = TrainerState.__init__

    def kept(state: Any, trainer: Any) -> None:
        told(state, trainer)
        states.append(state)

    seen: list[tuple[int, ...]] = []

    class Looking(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            progress = states[-1].state_dict()["progress"]
            batches = progress["epoch_loop.batch_progress"]["total"]
            optimizer = progress["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
            zeroed = optimizer["zero_grad"]["total"]["completed"]
            counts = (*batches.values(), *optimizer["step"]["total"].values(), zeroed)
            seen.append((self.trainer.global_step, *counts))
            return super().training_step(batch, batch_idx)

    TrainerState.__init__ = kept  # type: ignore[method-assign]
    try:
        fit(Looking(), batch_size=16, max_epochs=2, shards=4)
    finally:
        TrainerState.__init__ = told  # type: ignore[method-assign]
    assert len(seen) == 2 * 6 * 4 and all(len(set(one)) == 1 for one in seen), seen[:9]


def case_two_optimizers_by_hand() -> None:
    one, other = Two(), Two()
    fit(one, plain=True, batch_size=16, max_epochs=3)
    trainer = fit(other, batch_size=16, max_epochs=3, shards=4)
    alike(one, other)
    assert trainer.global_step == 27 and run_of(trainer).step == 36
    refused("more than 2 times", lambda: fit(Two(more=1), batch_size=16))


def case_checkpoints_go_both_ways() -> None:
    whole = Small()
    fit(whole, plain=True, accumulate_grad_batches=4, max_epochs=3)
    for first_is_plain in (True, False):
        with tempfile.TemporaryDirectory() as home:
            saves = ModelCheckpoint(home, every_n_train_steps=4, save_top_k=-1)  # in the middle of an epoch of 6
            begun, ended = Small(), Small()
            fit(begun, plain=first_is_plain, accumulate_grad_batches=4, max_epochs=1, callbacks=[saves])
            path = next(Path(home).glob("*step=4.ckpt"))
            trainer = fit(ended, plain=not first_is_plain, accumulate_grad_batches=4, max_epochs=3, ckpt=path)
            assert trainer.global_step == 18, (first_is_plain, trainer.global_step)
            if first_is_plain:  # Lightning by itself begins the DataLoader anew
                for a, b in zip(whole.parameters(), ended.parameters(), strict=True):
                    assert torch.allclose(a, b, rtol=0.0, atol=1e-5)


def case_precision() -> None:
    for precision in ("bf16-mixed", "16-mixed", "64-true"):
        one, other = Small(), Small()
        fit(one, plain=True, precision=precision, accumulate_grad_batches=4)
        fit(other, precision=precision, accumulate_grad_batches=4)
        alike(one, other, within=1e-6 if precision == "64-true" else 2e-3)


def case_files_are_written_once() -> None:
    with tempfile.TemporaryDirectory() as home:
        fit(
            Small(),
            accumulate_grad_batches=4,
            logger=CSVLogger(home),
            log_every_n_steps=1,
            callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=1)],
        )
        rows = list(csv.DictReader(next(Path(home).glob("**/metrics.csv")).open()))
        assert [int(row["step"]) for row in rows if row["train_loss_step"]] == list(range(12))
        assert len(list(Path(home).glob("**/*.ckpt"))) == 1


def case_early_stopping_and_limits() -> None:
    stops = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    trainer = fit(Small(), accumulate_grad_batches=4, max_epochs=9, callbacks=[stops])
    assert trainer.current_epoch == 2 and run_of(trainer).stopped
    trainer = fit(Small(), accumulate_grad_batches=4, limit_train_batches=8, max_epochs=2)
    assert trainer.global_step == 4
    assert fit(Small(), accumulate_grad_batches=4, max_epochs=-1, max_steps=7).global_step == 7


def case_an_evaluation_that_is_shared_out() -> None:
    one, other = Small(), Small()
    plain = fit(one, plain=True, accumulate_grad_batches=4, limit_val_batches=2)
    ours = fit(other, accumulate_grad_batches=4, limit_val_batches=2, spread_evaluation=True)
    assert abs(float(plain.callback_metrics["val_loss"]) - float(ours.callback_metrics["val_loss"])) <= 1e-6


def case_refusals() -> None:
    refused("StochasticWeightAveraging", lambda: fit(Small(), callbacks=[StochasticWeightAveraging(1e-2)]))
    refused("devices", lambda: fit(Small(), devices=2))
    refused("in the middle of an update", lambda: fit(Small(), accumulate_grad_batches=4, val_check_interval=6))
    module = Small()
    module.logged = {"reduce_fx": "max"}
    refused("reduce_fx", lambda: fit(module))
    nothing = Small()
    nothing.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign, assignment]
    refused("returned no loss", lambda: fit(nothing))

    def twice() -> None:
        trainer = fit(Small(), max_epochs=1)
        trainer.fit(Small(), DataLoader(data(), batch_size=8))

    refused("twice", twice)
    refused("iterable dataset", _fit_stream)


def case_the_example_of_the_page() -> None:
    run_examples("lightning.md", count=1)


def _fit_stream() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    lightning.Trainer(**QUIET, **NO_FILES, strategy=HoldfastStrategy(), max_steps=2).fit(
        Small(), DataLoader(Endless(), batch_size=8)
    )


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
            print(f"held {name}", flush=True)
    os._exit(0)  # the runs that were refused in the middle would say so now


if __name__ == "__main__":
    main()
