"""The processes of parameter_server.py: servers and workers of ours, of torch's rpc, of Ray, and of bare sockets.

    python benchmarks/parameter_server_worker.py ROLE '{"words": "as JSON"}'

A worker says `ready`, waits for a line, pushes and pulls, and prints the seconds that it took.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Words = dict[str, Any]


def timed(words: Words, once: Callable[[], None]) -> None:
    for _ in range(words["warm_up"]):
        once()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    for _ in range(words["rounds"]):
        once()
    print(json.dumps({"began": began, "ended": time.monotonic()}), flush=True)
    sys.stdin.readline()  # stay until all are done


# ---- ours


def ours_server(words: Words) -> None:
    from holdfast.ledger.embedded import EmbeddedLedger
    from holdfast.servers.server import ServerSettings
    from holdfast.servers.serving import ServerPlace, serve
    from holdfast.trust.keys import Keys

    secret = bytes.fromhex(words["secret"])
    place = ServerPlace(id=words["id"], host=words["host"], socket=Path(words["socket"]))
    settings = ServerSettings(log_bytes_max=words["log_bytes_max"])
    serve(place, Keys.from_secret(secret), lambda: EmbeddedLedger(Path(words["ledger"]), secret), settings)


def ours_worker(words: Words) -> None:
    from holdfast.ledger.embedded import EmbeddedLedger
    from holdfast.servers.client import ClientSettings, RemoteServers
    from holdfast.servers.port import initial_of, layout_of
    from holdfast.servers.recipe import settings_of
    from holdfast.trust.keys import Keys

    secret = bytes.fromhex(words["secret"])
    shared = words["path"] == "shared memory"
    settings = ClientSettings(servers=words["servers"], replicas=words["replicas"])
    host = "h" if shared else "elsewhere"  # which has no unix socket here, and so dials TCP
    client = RemoteServers(
        words["id"], 1, host, Keys.from_secret(secret), lambda: EmbeddedLedger(Path(words["ledger"]), secret), settings
    )
    parameters = {str(n): torch.nn.Parameter(torch.zeros(words["elements"] // 8)) for n in range(8)}
    optimizer = getattr(torch.optim, words.get("optimizer", "SGD"))(parameters.values(), 0.001)
    values = [one.data for one in parameters.values()]
    client.open(layout_of(parameters, optimizer), initial_of(values), timeout_s=120)
    gradients = [torch.ones_like(one) for one in values]
    groups = [settings_of(group) for group in optimizer.param_groups]
    clock = 0

    def once() -> None:
        nonlocal clock
        clock += 1
        client.push(gradients, groups, clock=clock, copy=False).wait(120)
        client.pull(values).wait(120)
        if words.get("captures"):
            captured = client.capture(timeout_s=60)
            for _ in captured.pieces():
                pass
            captured.close()

    timed(words, once)
    client.close()


def train(words: Words) -> None:
    """A script for `holdfast run`, which notes the peak of its memory."""
    import resource

    import holdfast

    model = torch.nn.ParameterList(torch.zeros(words["elements"] // 8) for _ in range(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    mode: Any = holdfast.Exact() if words["mode"] == "exact" else holdfast.Async(staleness=4)
    samples = torch.utils.data.TensorDataset(torch.ones(64))
    run = holdfast.join(model, optimizer, samples, batch_size=4, shards=2, mode=mode)
    for step in run.steps(words["rounds"]):
        for (x,) in step:
            loss = sum((parameter * x.mean()).sum() for parameter in model)
            loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(words["notes"], f"{os.getpid()}.peak").write_text(str(peak))


# ---- torch.distributed.rpc

PARAMETERS = torch.zeros(0)


def rpc_push(gradient: torch.Tensor) -> None:
    PARAMETERS.sub_(gradient, alpha=0.001)


def rpc_pull() -> torch.Tensor:
    return PARAMETERS


def _rpc(words: Words) -> Any:
    import torch.distributed.rpc as rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(words["port"]))
    kinds = {} if words["path"] == "shared memory" else {"_transports": ["uv"], "_channels": ["basic"]}
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=120, **kinds)
    rpc.init_rpc(words["id"], rank=words["rank"], world_size=words["world"], rpc_backend_options=options)
    return rpc


def rpc_server(words: Words) -> None:
    global PARAMETERS
    PARAMETERS = torch.zeros(words["elements"])
    _rpc(words).shutdown()


def rpc_worker(words: Words) -> None:
    rpc = _rpc(words)
    gradient, values = torch.ones(words["elements"]), torch.empty(words["elements"])

    def once() -> None:
        rpc.rpc_sync("server", rpc_push, (gradient,))
        values.copy_(rpc.rpc_sync("server", rpc_pull))

    timed(words, once)
    rpc.shutdown()


# ---- Ray


def ray_all(words: Words) -> None:
    """One process that starts Ray, its actor and its workers, and prints as one worker does."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)

    @ray.remote
    class Server:
        def __init__(self, elements: int) -> None:
            self.parameters = torch.zeros(elements)

        def push(self, gradient: Any) -> None:  # an array in Ray's store, which is not copied
            self.parameters.sub_(torch.from_numpy(gradient), alpha=0.001)

        def pull(self) -> Any:
            return self.parameters.numpy()

    @ray.remote
    class Worker:
        def __init__(self, server: Any, elements: int) -> None:
            self.server, self.gradient, self.values = server, torch.ones(elements), torch.empty(elements)

        def work(self, rounds: int) -> None:
            for _ in range(rounds):
                ray.get(self.server.push.remote(self.gradient.numpy()))
                self.values.copy_(torch.from_numpy(ray.get(self.server.pull.remote())))

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    server = Server.remote(words["elements"])
    workers = [Worker.remote(server, words["elements"]) for _ in range(words["workers"])]
    ray.get([worker.work.remote(words["warm_up"]) for worker in workers])
    once = {"warm_up": 0, "rounds": 1}
    timed(once, lambda: ray.get([worker.work.remote(words["rounds"]) for worker in workers]))
    ray.shutdown()


# ---- bare sockets


def raw_server(words: Words) -> None:
    listener = socket.create_server(("127.0.0.1", words["port"]))
    for _ in range(words["workers"] - 1):  # a process for each worker: the limit of the machine, not of one thread
        if os.fork() == 0:
            break
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(words["elements"] * 4))
    while _receive(sock, memory):
        sock.sendall(memory)


def raw_worker(words: Words) -> None:
    sock = socket.create_connection(("127.0.0.1", words["port"]))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(words["elements"] * 4))

    def once() -> None:
        sock.sendall(memory)
        _receive(sock, memory)

    timed(words, once)


def _receive(sock: socket.socket, memory: memoryview) -> bool:
    while memory:
        got = sock.recv_into(memory)
        if not got:
            return False
        memory = memory[got:]
    return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](json.loads(sys.argv[2]))
