"""A training loop that saves a large state every so many steps, with Holdfast or with one of its peers.

    holdfast run --workers 2 --checkpoint /tmp/c --save-every 8 benchmarks/checkpoint_worker.py --out /tmp/o --every 8
    python benchmarks/checkpoint_worker.py --system torch_save --out /tmp/o --every 8

The model, Adam, the data and the steps are the same for all. `--dense` steps compute with all blocks of the model; the
others do so only once, so that Adam has its state, and then freeze them, train a small head and wait for `--wait`
seconds, as a host does while its accelerators compute.

Leaves in `PID.json`: when each step ended, peak memory, and for a peer when each
save began, gave the loop its turn again, and was durable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CLASSES = 10
SAMPLES = 256
SEED = 0
DURABLE_TIMEOUT_S = 120.0
PEERS = ("torch_save", "dcp", "dcp_thread", "dcp_process", "dlrover")


class Blocks(nn.Module):
    """Square layers and a head. With `dense` off, a pass uses the head alone."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.blocks = nn.ModuleList(nn.utils.skip_init(nn.Linear, width, width) for _ in range(count))
        self.head = nn.Linear(width, CLASSES)
        self.dense = True
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.uniform_(-(width**-0.5), width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.dense else ():
            x = F.relu(block(x))
        return self.head(x)


class Account:
    """What the worker writes down."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._away_s = 0.0
        self.saves: list[dict[str, float]] = []

    def step_done(self) -> None:
        self._ends.append(time.monotonic() - self._away_s)

    def leave_out(self, seconds: float) -> None:
        """Of the step under way."""
        self._away_s += seconds

    def write(self, directory: Path) -> None:
        figures = {
            "ends": self._ends,
            "peak_bytes": peak_bytes(),
            "saves": self.saves,
        }
        path = directory / f"{os.getpid()}.json"
        path.with_suffix(".tmp").write_text(json.dumps(figures))
        path.with_suffix(".tmp").replace(path)


def peak_bytes() -> int:
    """Not getrusage: its peak includes that of whoever started this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Work:
    """The computing of a shard."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_flush_denormal(
            True
        )  # gradients of what is learnt by heart: with them a step takes up to ten times as long
        self.model = Blocks(args.width, args.blocks)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(SAMPLES, args.width, generator=generator)
        self.dataset = TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))
        self._args = args

    def shard(self, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()
        if self._args.wait:
            time.sleep(self._args.wait)

    def step_done(self) -> None:
        """After the first one Adam has its state."""
        if self.model.dense and not self._args.dense:
            self.model.dense = False
            for parameter in self.model.blocks.parameters():
                parameter.requires_grad_(False)
                parameter.grad = None


def ours(args: argparse.Namespace, account: Account) -> None:
    import holdfast

    work = Work(args)
    batch = args.rows * args.workers
    run = holdfast.join(
        work.model, work.optimizer, work.dataset, batch_size=batch, drop_last=True, shards=args.workers, seed=SEED
    )
    for step in run.steps(args.steps):
        for x, y in step:
            work.shard(x, y)
        run.optimizer.step()
        work.step_done()
        account.step_done()


# -- peers


class Peer(Protocol):
    def save(self, number: int, state: dict[str, Any]) -> Future[Any] | None:
        """Returns when the loop may go on; None: it is durable by then."""

    def close(self) -> None: ...


class TorchSave:
    """The usual care: a name of its own, flushed, renamed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, number: int, state: dict[str, Any]) -> None:
        path = self._directory / f"{number}.pt"
        with path.with_suffix(".tmp").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)

    def close(self) -> None:
        pass


class Distributed:
    """torch.distributed.checkpoint: in the loop, in a thread, or in a process with memory that both share.

    The memory that the state is staged in is kept from one save to the next, which is the best that it can do.
    """

    def __init__(self, directory: Path, way: str) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        self._store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=self._store, rank=0, world_size=1)
        self._directory, self._way = directory, way
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=way == "dcp_process",
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)

    def save(self, number: int, state: dict[str, Any]) -> Future[Any] | None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        path = self._directory / str(number)
        if self._way == "dcp":
            dcp.save(state, checkpoint_id=path)
            return None
        kind = AsyncCheckpointerType.PROCESS if self._way == "dcp_process" else AsyncCheckpointerType.THREAD
        answer = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind, async_stager=self._stager)
        assert isinstance(answer, Future)
        return answer

    def close(self) -> None:
        import torch.distributed as dist

        self._stager.close()
        dist.destroy_process_group()


class Dlrover:
    """The flash checkpoint of DLRover: to shared memory in the loop, from there to the disk by its agent."""

    def __init__(self, directory: Path) -> None:
        from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        # Its sockets and its memory are named after the run: without that, one run finds what another left behind.
        os.environ["TORCHELASTIC_RUN_ID"] = f"holdfast-bench-{os.getpid()}"
        AsyncCheckpointSaver.start_async_saving_ckpt()
        self._directory = directory
        self._checkpointer = DdpCheckpointer(str(directory))

    def save(self, number: int, state: dict[str, Any]) -> Future[Any]:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        path = self._directory / f"{number}.pt"
        self._checkpointer.save_checkpoint(number, state, str(path), storage_type=StorageType.DISK)
        done: Future[Any] = Future()

        def watch() -> None:
            tracker = self._directory / "dlrover_latest.txt"
            deadline = time.monotonic() + DURABLE_TIMEOUT_S
            while time.monotonic() < deadline:
                if tracker.exists() and tracker.read_text().strip() == str(number):
                    done.set_result(None)
                    return
                time.sleep(0.005)
            done.set_exception(TimeoutError(f"step {number} is not durable after {DURABLE_TIMEOUT_S:g} s"))

        threading.Thread(target=watch, daemon=True).start()
        return done

    def close(self) -> None:
        """It leaves its memory and its sockets to whoever comes next, who is nobody."""
        from dlrover.python.common.multi_process import SOCKET_TMP_DIR
        from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver

        saver = AsyncCheckpointSaver.get_ckpt_saver()
        if saver is not None:
            saver.close()
        shutil.rmtree(Path(SOCKET_TMP_DIR) / os.environ["TORCHELASTIC_RUN_ID"], ignore_errors=True)


def make_peer(system: str, directory: Path) -> Peer:
    if system == "torch_save":
        return TorchSave(directory)
    return Dlrover(directory) if system == "dlrover" else Distributed(directory, system)


def theirs(args: argparse.Namespace, account: Account) -> None:
    torch.set_num_threads(1)
    work = Work(args)
    directory = args.out / "checkpoints"
    directory.mkdir()
    peer = make_peer(args.system, directory)
    on_their_way: list[Future[Any]] = []
    for number, (x, y) in zip(range(args.steps), batches(work.dataset, args.rows), strict=False):
        if number and number % args.every == 0:
            save(peer, number, work, account, on_their_way)
        work.optimizer.zero_grad()
        work.shard(x, y)
        work.optimizer.step()
        work.step_done()
        account.step_done()
        if all(future.done() for future in on_their_way):
            for path in sorted(directory.glob("[0-9]*"), key=lambda path: path.stat().st_mtime)[:-2]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for future in on_their_way:
        future.result(DURABLE_TIMEOUT_S)
    peer.close()


def save(peer: Peer, number: int, work: Work, account: Account, on_their_way: list[Future[Any]]) -> None:
    came = time.monotonic()
    for future in on_their_way:
        future.result(DURABLE_TIMEOUT_S)  # none of them can have two under way; nobody saves that often
    began = time.monotonic()
    account.leave_out(began - came)
    state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}
    future = peer.save(number, state)
    entry = {"step": number, "began": began, "free": time.monotonic()}
    account.saves.append(entry)
    note: Callable[[object], None] = lambda _: entry.update(durable=time.monotonic())  # noqa: E731
    if future is None:
        note(None)
    else:
        on_their_way.append(future)
        future.add_done_callback(note)


def batches(dataset: TensorDataset, rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
    while True:
        yield from (dataset[start : start + rows] for start in range(0, SAMPLES - rows + 1, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=("holdfast", *PEERS), default="holdfast")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--rows", type=int, default=8, help="of a worker's share of the batch")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--every", type=int, default=8, help="steps between two saves of a peer")
    args = parser.parse_args()
    account = Account()
    if args.system == "holdfast":
        ours(args, account)
    else:
        theirs(args, account)
    account.write(args.out)


if __name__ == "__main__":
    main()
