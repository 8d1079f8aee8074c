"""How fast parameter servers are, against torch.distributed.rpc, a Ray actor and bare sockets; how fast they fail over.

    python benchmarks/parameter_server.py                       # all of it: minutes, and 3 GB of memory
    python benchmarks/parameter_server.py --parts speed --workers 2 --paths tcp --json f.json    # a piece of it
    python benchmarks/parameter_server.py --check --json f.json

Figures that are in FILE already stay there, and all of them are held to the bars: so it can be measured in pieces.

Speed: each worker, a process of its own, pushes gradients of 25 M float32 parameters and pulls the parameters, again
and again; the servers apply SGD. GB/s counts what all workers have pushed and pulled, over the time from the first
one's beginning to the last one's end. With 3 replicas there are 3 servers, and what the primaries send to the others
counts as moved too: the column `moved` is GB/s of all of it. Over TCP, everything goes over TCP; with shared memory,
workers and servers share memory, and servers talk through unix sockets. Peers have one server and no replicas. They
are measured where they are importable. `loopback` are bare sockets, a process for each end, without arithmetic.

Memory: of a server with Adam, beyond one that has nothing to do, and of a worker in a training with `holdfast run`,
beyond what it needs in the exact mode. Peaks of what is resident, shared memory included. Of a server also while one
of three workers reads a checkpoint after each of its steps, and the others push.

Failover: from kill -9 of a slice's primary to the next acknowledged push, with 3 servers and 3 replicas of each slice;
with the log's lease alone, and when the ledger is told of the exit, as an agent does.

Bars: with one replica at least as fast as the fastest peer on the same path; with three at least 0.6 of the loopback,
in bytes that are moved; failover in the median under 1 s with the lease alone and under 0.3 s when the exit is told;
memory of a server at most 1.3 times its parameters and optimizer state, plus the bound of its log; memory of a worker
at most twice its parameters beyond the exact mode's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from arguments import conclude, listed

WORKER = Path(__file__).with_name("parameter_server_worker.py")
PATHS = ("tcp", "shared memory")
PARTS = ("speed", "memory", "failover")
LOG_BYTES_MAX = 256 << 20
SMALL_LOG_BYTES = 64 << 20  # where memory is measured
MOVED_MIN, LEASE_S_MAX, TOLD_S_MAX, SERVER_MEMORY_MAX, WORKER_MEMORY_MAX = 0.6, 1.0, 0.3, 1.3, 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=listed(PARTS), default=list(PARTS))
    parser.add_argument("--workers", type=listed(["1", "2", "3"]), default=["2", "3"])
    parser.add_argument("--paths", type=listed(PATHS), default=list(PATHS))
    parser.add_argument("--replicas", type=listed(["1", "3"]), default=["1", "3"])
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    if args.json and args.json.exists():
        figures.update(json.loads(args.json.read_text()))
    if "speed" in args.parts:
        for workers in map(int, args.workers):
            measure_speed(args, workers, figures)
    if "memory" in args.parts:
        measure_server_memory(args, figures)
        measure_worker_memory(args, figures)
    missed = missed_bars(figures)
    if "failover" in args.parts:
        measure_failover(args, figures, missed)
    return conclude(args, figures, missed)


def missed_bars(figures: dict[str, float]) -> list[str]:
    """Of speed and memory, as far as they are measured."""
    missed = []
    for name, speed in figures.items():
        who, _, rest = name.partition(", ")
        if who == "holdfast" and rest.startswith("1 replica, "):
            peers = {one: figures.get(rest.replace("1 replica", one, 1), 0.0) for one in ("rpc", "ray")}
            fastest = max(peers, key=lambda one: peers[one])
            if speed < peers[fastest]:
                missed.append(f"{name}: {speed:.2f} GB/s, and {fastest} has {peers[fastest]:.2f}")
        elif who == "holdfast" and rest.startswith("3 replicas, "):
            loopback = figures.get(f"loopback, {rest.rpartition(', ')[2]}", 0.0)
            if 2 * speed < MOVED_MIN * loopback:
                missed.append(f"{name}: {2 * speed:.2f} GB/s moved, and the loopback has {loopback:.2f}")
    for who, limit in (("server", SERVER_MEMORY_MAX), ("worker", WORKER_MEMORY_MAX)):
        for name, times in figures.items():
            if name.startswith(f"memory of a {who}") and times > limit:
                missed.append(f"{name}: {times:.2f}, and {limit} is the bar")
    return missed


# ---- processes


def start(role: str, words: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), role, json.dumps(words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def run_workers(processes: Sequence[subprocess.Popen[str]]) -> float:
    """Seconds from the first one's beginning to the last one's end."""
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip() == "ready", f"a worker said {line!r}"
    for process in processes:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
    said = [json.loads(process.stdout.readline()) for process in processes if process.stdout is not None]
    for process in processes:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
    return max(one["ended"] for one in said) - min(one["began"] for one in said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OurServers:
    """An embedded ledger and servers over it."""

    def __init__(self, servers: int, replicas: int, path: str, log_bytes_max: int) -> None:
        from holdfast.ledger.embedded import EmbeddedServer

        self.directory = Path(tempfile.mkdtemp(prefix="hf"))
        self.secret = os.urandom(32)
        self.replicas = replicas
        self.slots = servers
        self._path = path
        self._log_bytes_max = log_bytes_max
        self._ledger = EmbeddedServer(self.directory / "ledger", self.directory / "l.sock", self.secret)
        self._ledger.start()
        self._incarnations = [0] * servers
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for slot in range(servers):
            self.start(slot)

    def start(self, slot: int) -> str:
        self._incarnations[slot] += 1
        name = f"s{slot}.{self._incarnations[slot]}"
        host = "h" if self._path == "shared memory" else f"h{slot}"  # another host's unix socket is not dialled
        words = {**self.words, "id": name, "host": host, "socket": str(self.directory / f"{name}.sock")}
        self.processes[name] = start("ours_server", {**words, "log_bytes_max": self._log_bytes_max})
        return name

    @property
    def words(self) -> dict[str, Any]:
        ledger = str(self.directory / "l.sock")
        return {"secret": self.secret.hex(), "ledger": ledger, "servers": self.slots, "replicas": self.replicas}

    def memory_peak(self) -> int:
        """Of the largest server, in bytes."""
        peaks = []
        for process in self.processes.values():
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
        return max(peaks)

    def close(self) -> None:
        end(list(self.processes.values()))
        self._ledger.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def our_servers(
    servers: int, replicas: int, path: str = "shared memory", log_bytes_max: int = LOG_BYTES_MAX
) -> Iterator[OurServers]:
    running = OurServers(servers, replicas, path, log_bytes_max)
    try:
        yield running
    finally:
        running.close()


# ---- speed


def measure_speed(args: argparse.Namespace, workers: int, figures: dict[str, float]) -> None:
    print(f"\npush plus pull of {args.elements:,} float32 parameters, {workers} workers")
    print(f"{'':<50}{'GB/s':>8}{'moved':>8}")
    common = {"elements": args.elements, "rounds": args.rounds, "warm_up": 2, "workers": workers}
    show(figures, f"loopback, {workers} workers", raw(common, workers))
    for path in args.paths:
        if "1" in args.replicas:
            show(figures, f"rpc, {path}, {workers} workers", rpc(common, workers, path))
            if path == "shared memory" and importlib.util.find_spec("ray") is not None:
                show(figures, f"ray, {path}, {workers} workers", ray(common, workers))
            single = ours(common, workers, path, 1)
            show(figures, f"holdfast, 1 replica, {path}, {workers} workers", single)
        if "3" in args.replicas:
            triple = ours(common, workers, path, 3)
            show(figures, f"holdfast, 3 replicas, {path}, {workers} workers", triple, moved=2 * triple)


def show(figures: dict[str, float], name: str, speed: float, moved: float | None = None) -> float:
    print(f"{name:<50}{speed:>8.2f}{speed if moved is None else moved:>8.2f}", flush=True)
    figures[name] = round(speed, 3)
    return speed


def rate(common: dict[str, Any], workers: int, seconds: float) -> float:
    return workers * int(common["rounds"]) * 2 * 4 * int(common["elements"]) / seconds / 1e9


def raw(common: dict[str, Any], workers: int) -> float:
    words = {**common, "port": free_port()}
    processes = [start("raw_server", words)]
    try:
        wait_for_port(words["port"])
        processes += [start("raw_worker", words) for _ in range(workers)]
        return rate(common, workers, run_workers(processes[1:]))
    finally:
        end(processes)


def wait_for_port(port: int) -> None:
    """Until somebody listens there; asked of the kernel, since a connection would count as a worker's."""
    wanted = f":{port:04X}"
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(row[1].endswith(wanted) and row[3] == "0A" for row in rows):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on port {port}")


def rpc(common: dict[str, Any], workers: int, path: str) -> float:
    words = {**common, "port": free_port(), "path": path, "world": workers + 1}
    processes = [start("rpc_server", {**words, "id": "server", "rank": 0})]
    try:
        ranks = range(1, workers + 1)
        processes += [start("rpc_worker", {**words, "id": f"w{rank}", "rank": rank}) for rank in ranks]
        return rate(common, workers, run_workers(processes[1:]))
    finally:
        end(processes)


def ray(common: dict[str, Any], workers: int) -> float:
    processes = [start("ray_all", common)]
    try:
        return rate(common, workers, run_workers(processes))
    finally:
        end(processes)


def ours(common: dict[str, Any], workers: int, path: str, replicas: int) -> float:
    with our_servers(replicas, replicas, path) as servers:
        words = {**common, **servers.words, "path": path}
        processes = [start("ours_worker", {**words, "id": f"w{number}"}) for number in range(workers)]
        try:
            return rate(common, workers, run_workers(processes))
        finally:
            end(processes)


# ---- memory


def measure_server_memory(args: argparse.Namespace, figures: dict[str, float]) -> None:
    """Of the largest server, in times of its parameters and optimizer state, beyond an idle one and the log's bound."""
    limit = SMALL_LOG_BYTES >> 20
    print(f"\nmemory, with {args.elements:,} float32 parameters and Adam, and a log of {limit} MiB at most")
    with our_servers(1, 1, log_bytes_max=SMALL_LOG_BYTES) as idle:
        give_up = time.monotonic() + 60
        while not list(idle.directory.glob("s*.sock")) and time.monotonic() < give_up:
            time.sleep(0.05)
        base = idle.memory_peak()
    common = {"elements": args.elements, "rounds": 4, "warm_up": 2, "optimizer": "Adam"}
    for path, replicas, captures in product(args.paths, map(int, args.replicas), (False, True)):
        with our_servers(replicas, replicas, path, SMALL_LOG_BYTES) as servers:
            words = {**common, **servers.words, "path": path}
            processes = [
                start("ours_worker", {**words, "id": f"w{number}", "captures": captures and not number})
                for number in range(3)
            ]
            try:
                run_workers(processes)
                peak = servers.memory_peak()
            finally:
                end(processes)
        times = (peak - base - SMALL_LOG_BYTES) / (3 * 4 * args.elements)
        name = f"memory of a server, {replicas} replica{'s' * (replicas > 1)}, {path}"
        name += ", with checkpoints" if captures else ""
        print(f"{name:<68}{times:>8.2f} times its parameters and optimizer state", flush=True)
        figures[name] = round(times, 3)


def measure_worker_memory(args: argparse.Namespace, figures: dict[str, float]) -> None:
    exact = trained_peak(args, {"mode": "exact"}, [])
    peak = trained_peak(args, {"mode": "async"}, ["--servers", "1"])
    times = (peak - exact) / (4 * args.elements)
    name = "memory of a worker, shared memory"
    print(f"{name:<50}{times:>8.2f} times its parameters beyond the exact mode's", flush=True)
    figures[name] = round(times, 3)


def trained_peak(args: argparse.Namespace, words: dict[str, Any], options: list[str]) -> int:
    """Of the larger of two workers, in bytes."""
    with tempfile.TemporaryDirectory(prefix="hf") as directory:
        told = {"elements": args.elements, "rounds": 6, "notes": directory, **words}
        command = [sys.executable, "-m", "holdfast", "run", "--run", "b", "--dir", f"{directory}/home"]
        command += ["--workers", "2", "--save-every", "1000", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(WORKER), "train", json.dumps(told)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return max(int(path.read_text()) for path in Path(directory).glob("*.peak"))


# ---- failover


def measure_failover(args: argparse.Namespace, figures: dict[str, float], missed: list[str]) -> None:
    print(f"\nfrom kill -9 of a primary to the next acknowledged push, {args.kills} kills each")
    for told, limit in ((False, LEASE_S_MAX), (True, TOLD_S_MAX)):
        name = "the exit is told" if told else "the lease alone"
        seconds = failovers(args.kills, told=told)
        median = statistics.median(seconds)
        print(f"{name:<20} median {median:.3f} s, from {min(seconds):.3f} to {max(seconds):.3f} s", flush=True)
        figures[f"failover, {name}, median s"] = round(median, 4)
        if median >= limit:
            missed.append(f"failover with {name}: {median:.3f} s in the median, and {limit} is the bar")


def failovers(kills: int, *, told: bool) -> list[float]:
    import torch

    from holdfast.core.words import KEY_DEAD_SERVERS, KEY_SERVERS, KEY_SLICE, KEY_TARGETS, decode_json, encode_json
    from holdfast.ledger.embedded import EmbeddedLedger
    from holdfast.servers.client import ClientSettings, RemoteServers
    from holdfast.servers.log_codec import decode_configuration
    from holdfast.servers.placing import Target
    from holdfast.servers.port import initial_of, layout_of
    from holdfast.servers.recipe import settings_of
    from holdfast.trust.keys import Keys

    found = []
    with our_servers(3, 3) as servers:

        def open_ledger() -> EmbeddedLedger:
            return EmbeddedLedger(servers.directory / "l.sock", servers.secret)

        ledger = open_ledger()
        settings = ClientSettings(servers=3, replicas=3, slices=1)
        client = RemoteServers("w0", 1, "h", Keys.from_secret(servers.secret), open_ledger, settings)
        parameter = torch.nn.Parameter(torch.zeros(1_000_000))
        optimizer = torch.optim.SGD([parameter], 0.001)
        client.open(layout_of({"p": parameter}, optimizer), initial_of([parameter.data]), timeout_s=120)
        acknowledged: list[float] = []
        stopping = threading.Event()

        def push() -> None:
            clock = 0
            while not stopping.is_set():
                clock += 1
                client.push(
                    [torch.ones(1_000_000)], [settings_of(one) for one in optimizer.param_groups], clock=clock
                ).wait(60)
                acknowledged.append(time.monotonic())

        thread = threading.Thread(target=push, daemon=True)
        thread.start()
        for _ in range(kills):
            entry = ledger.get(KEY_SLICE + "parameters/0")
            assert entry is not None
            configuration = decode_configuration(decode_json(entry.value))
            name, before = configuration.primary, len(acknowledged)
            while len(acknowledged) < before + 5:
                time.sleep(0.01)
            process = servers.processes.pop(name)
            killed_at = time.monotonic()
            process.kill()
            process.wait()
            if told:
                ledger.put(KEY_DEAD_SERVERS + name, encode_json({"start": 1}))
            gone_by = time.monotonic()
            while not acknowledged or acknowledged[-1] < gone_by + 0.02:
                time.sleep(0.002)
            found.append(next(one for one in acknowledged if one > gone_by) - killed_at)
            end([process])
            new = servers.start(int(name[1:].partition(".")[0]))
            while ledger.get(KEY_SERVERS + new) is None:
                time.sleep(0.05)
            replicas = tuple(new if one == name else one for one in configuration.replicas)
            ledger.put(KEY_TARGETS + "parameters/0", Target(replicas).encode())
            while True:
                entry = ledger.get(KEY_SLICE + "parameters/0")
                assert entry is not None
                if set(decode_configuration(decode_json(entry.value)).replicas) == set(replicas):
                    break
                time.sleep(0.05)
        stopping.set()
        thread.join()
        client.close()
        ledger.close()
    return found


if __name__ == "__main__":
    sys.exit(main())
