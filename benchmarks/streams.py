"""What a stream costs: samples/s beside a plain DataLoader over the same files, a seek in 10^7 samples, and memory.

    python benchmarks/streams.py                       # half a minute on two cores
    python benchmarks/streams.py --loaders 2 --check --json streams.json
    python benchmarks/streams.py --per-shard 16        # with shards of one size

`plain` is what people write: an IterableDataset that reads its share of the files from the beginning, through a shuffle
buffer of the same size, in a DataLoader with as many loader processes and batches as large as a shard. `stream` is
holdfast.data.Stream through the loader of a worker. Both decode the same way; each figure is the median of --rounds
pairs that take turns, with each number of samples in a shard. Files are in the page cache: what is compared is the
work, not a disk.

A seek is everything that a worker needs for a shard in the middle of an epoch: the stream is opened, with its index,
and the first batch is there. Memory is the most that a process has of its own (RssAnon) while it reads shards in every
window from there to the epoch's end, beside what it had before the index was made; for each shuffle buffer of
--buffers. The Parquet files have row groups as large as pyarrow makes them, and are left out where it is missing. Tar
files have a hundredth of the samples, since each of these takes a kilobyte.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from arguments import conclude, listed
from holdfast.data import Stream, Tokens
from holdfast.data.loader import ShardLoader
from holdfast.data.shards import ShardPlan

KINDS = ("tokens", "lines", "tar")
FILES = 8
LENGTH = 256
BUFFER = 4096
RATIO_MIN = 0.95
SEEK_S_MAX = 1.0
MEMORY_MB_MAX = 64.0  # the shuffle buffer's numbers, the order of blocks, and what Python keeps
SHARDS = 4
SOUGHT = ("tokens", "lines", "tar", "parquet")
TAR_PART = 100  # of the samples in which is sought, one of so many


def from_line(line: bytes) -> torch.Tensor:
    return torch.tensor(json.loads(line)["tokens"])


def from_tar(sample: dict[str, bytes]) -> tuple[torch.Tensor, int]:
    return torch.frombuffer(bytearray(sample["raw"]), dtype=torch.uint8).float(), int(sample["cls"])


def write(kind: str, directory: Path, samples: int) -> None:
    """The files of a kind, `samples` in each."""
    for number in range(FILES):
        draws = numpy.random.default_rng(number)
        if kind == "tokens":
            draws.integers(0, 50000, samples * LENGTH, dtype=numpy.uint16).tofile(directory / f"{number}.bin")
        elif kind == "lines":
            rows = draws.integers(0, 50000, (samples, 64)).tolist()
            (directory / f"{number}.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
        else:
            with tarfile.open(directory / f"{number}.tar", "w") as tar:
                for sample in range(samples):
                    for part, data in (("raw", draws.bytes(3072)), ("cls", b"%d" % (sample % 10))):
                        about = tarfile.TarInfo(f"{sample:06}.{part}")
                        about.size = len(data)
                        tar.addfile(about, io.BytesIO(data))


class Plain(IterableDataset[Any]):
    """The files from their beginning, through a shuffle buffer."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self.paths = kind, sorted(one for one in directory.iterdir() if ".holdfast-" not in one.name)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        paths = self.paths if info is None else self.paths[info.id :: info.num_workers]
        draws, waiting = random.Random(info.id if info else 0), []
        for sample in (sample for path in paths for sample in self.samples(path)):
            if len(waiting) < BUFFER:
                waiting.append(sample)
                continue
            place = draws.randrange(BUFFER)
            yield self.decoded(waiting[place])
            waiting[place] = sample
        draws.shuffle(waiting)
        yield from map(self.decoded, waiting)

    def samples(self, path: Path) -> Iterator[Any]:
        if self.kind == "tokens":
            tokens = numpy.memmap(path, dtype=numpy.uint16, mode="r")
            yield from (tokens[start : start + LENGTH] for start in range(0, len(tokens) - LENGTH + 1, LENGTH))
        elif self.kind == "lines":
            with path.open("rb") as file:
                yield from file
        else:
            with tarfile.open(path, "r|") as tar:
                sample: dict[str, bytes] = {}
                for member in tar:
                    reader = tar.extractfile(member)
                    assert reader is not None
                    sample[member.name.partition(".")[2]] = reader.read()
                    if len(sample) == 2:
                        yield sample
                        sample = {}

    def decoded(self, sample: Any) -> Any:
        if self.kind == "tokens":
            return torch.from_numpy(sample.astype(numpy.int64))
        return (from_line if self.kind == "lines" else from_tar)(sample)


def opened(kind: str, directory: Path) -> Stream:
    if kind == "tokens":
        files = sorted(directory.glob("*.bin"))
        return Stream([Tokens(path, length=LENGTH) for path in files], shuffle_buffer=BUFFER)
    if kind == "lines":
        return Stream(directory / "*.jsonl", decode=from_line, shuffle_buffer=BUFFER)
    return Stream(directory / "*.tar", decode=from_tar, shuffle_buffer=BUFFER)


def plan_of(stream: Any, batch_size: int, *, shards: int = SHARDS) -> ShardPlan:
    arrangement = stream.arranged(0, shuffle=True)
    return ShardPlan(length=len(stream), batch_size=batch_size, shards=shards, seed=0, arrangement=arrangement)


def rate(batches: Iterator[Any], per_batch: int, skipped: int) -> float:
    """Samples/s after the first batches, in which processes start and buffers fill."""
    for _ in islice(batches, skipped):
        pass
    began = time.perf_counter()
    count = sum(1 for _ in batches)
    return count * per_batch / (time.perf_counter() - began)


def plain_rate(kind: str, directory: Path, loaders: int, per_shard: int, skipped: int) -> float:
    dataset = Plain(kind, directory)
    loader = DataLoader(dataset, batch_size=per_shard, num_workers=loaders, drop_last=True)
    return rate(iter(loader), per_shard, skipped)


def stream_rate(kind: str, directory: Path, loaders: int, per_shard: int, skipped: int) -> float:
    plan = plan_of(stream := opened(kind, directory), per_shard * SHARDS)
    places = [(step, shard) for step in range(plan.steps_per_epoch) for shard in range(SHARDS)]
    with ShardLoader(stream, plan, num_workers=loaders) as loader:
        loader.expect(places)
        return rate((loader.get(*place) for place in places), per_shard, skipped)


def own_memory_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def write_many(directory: Path, samples: int, kind: str) -> None:
    """Many small samples."""
    each = samples // FILES
    for number in range(FILES):
        if kind == "tokens":
            numpy.arange(each * 2).astype(numpy.uint16).tofile(directory / f"{number}.bin")
        elif kind == "lines":
            (directory / f"{number}.txt").write_bytes(b"a line\n" * each)
        elif kind == "tar":
            with tarfile.open(directory / f"{number}.tar", "w") as tar:
                for sample in range(each):
                    about = tarfile.TarInfo(f"{sample}.cls")
                    about.size = 1
                    tar.addfile(about, io.BytesIO(b"3"))
        else:
            import pyarrow
            from pyarrow import parquet

            numbers = numpy.arange(number * each, (number + 1) * each)
            parquet.write_table(
                pyarrow.table({"n": numbers, "text": numbers.astype(str)}), directory / f"{number}.parquet"
            )


def open_many(directory: Path, kind: str, buffer: int) -> Stream:
    if kind == "tokens":
        files = [Tokens(path, length=2) for path in sorted(directory.glob("*.bin"))]
        return Stream(files, shuffle_buffer=buffer)
    suffix, decode = {"lines": ("txt", len), "tar": ("tar", from_cls), "parquet": ("parquet", from_row)}[kind]
    return Stream(directory / f"*.{suffix}", decode=decode, shuffle_buffer=buffer)


def from_cls(sample: dict[str, bytes]) -> int:
    return int(sample["cls"])


def from_row(row: dict[str, Any]) -> int:
    return int(row["n"])


def seek(directory: Path, kind: str, buffer: int, found: Any) -> None:
    """In a process of its own: the first shard in the middle of an epoch, and memory in the epoch's other half."""
    if kind == "parquet":
        import_module("pyarrow.parquet")  # the library itself takes tens of megabytes
    before = own_memory_mb()
    open_many(directory, kind, buffer)  # the index is made, and kept
    began = time.perf_counter()
    stream = open_many(directory, kind, buffer)
    plan = plan_of(stream, 64)
    loader = ShardLoader(stream, plan)
    middle = plan.steps_per_epoch // 2
    loader.get(middle, 0)
    took, most = time.perf_counter() - began, 0.0
    for step in range(middle, plan.steps_per_epoch, max(1, buffer // 64 // 2)):  # twice in every window to the end
        loader.get(step, 0)
        most = max(most, own_memory_mb())
    found.put((took, most - before, len(stream)))


def measure_seek(kind: str, samples: int, buffers: list[int]) -> Iterator[tuple[int, float, float, int]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        write_many(Path(directory), samples, kind)
        for buffer in buffers:
            found = context.Queue()
            process = context.Process(target=seek, args=(Path(directory), kind, buffer, found))
            process.start()
            took: tuple[float, float, int] = found.get(timeout=600)
            process.join(60)
            yield buffer, *took


def compare(kind: str, per_shard: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Samples/s of both, and the median of the ratios of pairs."""
    skipped = args.skipped // per_shard
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        write(kind, home, args.samples)
        opened(kind, home)  # the index is kept, as it is after the first start
        ways = [partial(way, kind, home, args.loaders, per_shard, skipped) for way in (plain_rate, stream_rate)]
        pairs = []
        for number in range(args.rounds):
            pair = [0.0, 0.0]
            for way in (0, 1) if number % 2 else (1, 0):
                pair[way] = ways[way]()
            pairs.append(pair)
    plain, stream = (statistics.median(column) for column in zip(*pairs, strict=True))
    return plain, stream, statistics.median(pair[1] / pair[0] for pair in pairs)


def seek_all(args: argparse.Namespace, figures: dict[str, float], missed: list[str]) -> None:
    print(f"{'':10}{'buffer':>10}{'samples':>12}{'seek':>10}{'memory':>10}")
    for kind in SOUGHT:
        if kind == "parquet" and find_spec("pyarrow") is None:
            print("parquet: left out, there is no pyarrow here")
            continue
        samples = int(args.many) // (TAR_PART if kind == "tar" else 1)
        for buffer, took, memory, length in measure_seek(kind, samples, args.buffers):
            print(f"{kind:10}{buffer:10,}{length:12,}{took:8.3f} s{memory:7.1f} MB", flush=True)
            figures |= {f"{kind}_{buffer}_seek_s": took, f"{kind}_{buffer}_memory_mb": memory}
            if took > SEEK_S_MAX:
                missed.append(f"{kind}, buffer {buffer}: a seek took {took:.2f} s, and {SEEK_S_MAX} s is the most")
            if memory > MEMORY_MB_MAX:
                what = f"{memory:.0f} MB of memory, and {MEMORY_MB_MAX:.0f} MB is the most"
                missed.append(f"{kind}, buffer {buffer}: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=listed(KINDS), default=list(KINDS))
    parser.add_argument("--samples", type=int, default=4000, help="of each file")
    parser.add_argument("--many", type=float, default=1e7, help="samples in which is sought")
    parser.add_argument(
        "--buffers", type=int, nargs="+", default=[1024, 8192, 32768], help="of which memory is measured"
    )
    parser.add_argument("--per-shard", type=int, nargs="+", default=[16, 64], help="samples")
    parser.add_argument("--loaders", type=int, default=1, help="loader processes of both")
    parser.add_argument("--rounds", type=int, default=5, help="0 to seek only")
    parser.add_argument("--skipped", type=int, default=4800, help="samples before the clock starts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    missed = []
    print(f"{'':10}{'plain':>12}{'stream':>12}{'ratio':>8}    samples/s, {args.loaders} loader processes")
    for kind, per_shard in product(args.kinds, args.per_shard) if args.rounds else ():
        plain, stream, ratio = compare(kind, per_shard, args)
        name = f"{kind}_{per_shard}"
        print(f"{name:10}{plain:12,.0f}{stream:12,.0f}{ratio:8.2f}", flush=True)
        figures |= {f"{name}_plain": plain, f"{name}_stream": stream, f"{name}_ratio": ratio}
        if ratio < RATIO_MIN:
            what = f"{kind}, {per_shard} samples a shard"
            missed.append(f"{what}: {ratio:.2f} of a plain DataLoader, and {RATIO_MIN} is wanted")
    seek_all(args, figures, missed)
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
