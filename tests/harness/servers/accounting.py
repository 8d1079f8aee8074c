"""Workers that push what can be counted, readers that read it back, and the accounts of both.

Each slice has one parameter of zeros. A push adds 1 to one element of every slice, and no two pushes use the same
element: so the parameters say which pushes are in them, and how often. With SGD and a rate of 1 all of this is exact.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict

import torch

from holdfast.core.errors import PeerError
from holdfast.servers.client import RemoteServers
from holdfast.servers.port import Layout, initial_of, layout_of
from holdfast.servers.recipe import settings_of
from tests.harness.linearizability import BITS, Operation, explain
from tests.harness.servers.fleet import Fleet

WAIT_S = 60.0


class Accounts:
    """What workers were told. Shared by their threads; `_lock` guards it."""

    def __init__(self, fleet: Fleet, *, slices: int, pushes_max: int, pace_s: float = 0.005) -> None:
        self._fleet = fleet
        self._slices = slices
        self._pushes_max = pushes_max
        self._pace_s = pace_s  # between a worker's pushes, and between a reader's reads
        self._lock = threading.Lock()
        self._next = 0
        self.acknowledged: set[int] = set()
        self.acknowledged_at: list[float] = []
        self.history: dict[int, list[Operation]] = defaultdict(list)
        self.troubles: list[str] = []
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._clients: list[RemoteServers] = []

    # ---- the model

    def _model(self) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, Layout]:
        parameters = [torch.nn.Parameter(torch.zeros(self._pushes_max)) for _ in range(self._slices)]
        optimizer = torch.optim.SGD(parameters, 1.0)
        named = {f"slice{number}": parameter for number, parameter in enumerate(parameters)}
        return parameters, optimizer, layout_of(named, optimizer)

    def _open(self, name: str) -> tuple[RemoteServers, list[torch.Tensor], torch.optim.Optimizer]:
        parameters, optimizer, layout = self._model()
        client = self._fleet.client(name, slices=self._slices)
        values = [one.data for one in parameters]
        client.open(layout, initial_of(values), timeout_s=WAIT_S)
        self._clients.append(client)
        return client, values, optimizer

    # ---- what they do

    def start(self, *, workers: int, readers: int) -> None:
        self._open("opener")
        for number in range(workers):
            self._begin(self._work, f"w{number}")
        for number in range(readers):
            self._begin(self._read, f"r{number}")

    def _begin(self, act: object, name: str) -> None:
        def run() -> None:
            try:
                act(name)  # type: ignore[operator]
            except Exception as error:  # told at the end
                self.troubles.append(f"{name}: {error!r}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, name: str) -> None:
        client, values, optimizer = self._open(name)
        client.join(0)
        gradients = [torch.zeros_like(one) for one in values]
        settings = [settings_of(group) for group in optimizer.param_groups]
        clock = 0
        while not self._stopping.is_set():
            with self._lock:
                element = self._next
                self._next += 1
            if element >= self._pushes_max:
                return
            clock += 1
            for gradient in gradients:
                gradient[element] = -1.0
            called_at = time.monotonic()
            try:
                client.push(gradients, settings, clock=clock).wait(WAIT_S)
            except PeerError:
                self._note(name, ("add", 1 << element), called_at, math.inf)
                raise
            returned_at = time.monotonic()
            self._note(name, ("add", 1 << element), called_at, returned_at)
            with self._lock:
                self.acknowledged.add(element)
                self.acknowledged_at.append(returned_at)
            for gradient in gradients:
                gradient[element] = 0.0
            time.sleep(self._pace_s)

    def _read(self, name: str) -> None:
        client, values, _ = self._open(name)
        while not self._stopping.is_set():
            called_at = time.monotonic()
            client.pull(values).wait(WAIT_S)
            returned_at = time.monotonic()
            for number, value in enumerate(values):
                outcome = self._bits(value)
                self._note(name, ("read",), called_at, returned_at, outcome, only=number)
            time.sleep(self._pace_s)

    def _note(
        self,
        name: str,
        call: tuple[object, ...],
        called_at: float,
        returned_at: float,
        outcome: object = None,
        only: int | None = None,
    ) -> None:
        with self._lock:
            for number in range(self._slices) if only is None else [only]:
                self.history[number].append(Operation(name, call, called_at, returned_at, outcome))

    def _bits(self, value: torch.Tensor) -> int:
        """Which pushes are in it. Each is in it once or not at all."""
        counts = value.to(torch.int64)
        twice = counts[(counts != 0) & (counts != 1)]
        if twice.numel():
            self.troubles.append(f"elements with {sorted(set(twice.tolist()))[:5]} where 0 or 1 belongs")
        return sum(1 << int(element) for element in counts.nonzero().flatten())

    # ---- the end

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=2 * WAIT_S)
            assert not thread.is_alive(), f"{thread.name} waits for ever"

    def check(self) -> None:
        """Nothing acknowledged is lost, nothing is there twice, and every read fits an order of all that happened."""
        client, values, _ = self._open("auditor")
        client.pull(values).wait(WAIT_S)
        expected = sum(1 << element for element in self.acknowledged)
        for number, value in enumerate(values):
            missing = expected & ~self._bits(value)
            assert not missing, f"slice {number} has lost {missing.bit_count()} acknowledged updates"
            self._note("auditor", ("read",), time.monotonic(), time.monotonic(), self._bits(value), only=number)
        assert not self.troubles, self.troubles
        for number in range(self._slices):
            trouble = explain(self.history[number], BITS)
            assert not trouble, f"the history of slice {number} is not linearizable: {trouble[:2000]}"

    def close(self) -> None:
        self._stopping.set()
        for client in self._clients:
            client.close()
