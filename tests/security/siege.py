"""A real run under attack: where it listens, what it holds, and that it goes on as if nothing had happened."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.core.words import KEY_WORKERS, Registration
from holdfast.ledger.port import Ledger
from holdfast.net.sockets import connect
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.ledger import open_ledger
from holdfast.testing.observed_run import ObservedHosts, ObservedRun
from holdfast.trust.keys import Keys, create_keys
from tests.soak.conducting import quiet_digest
from tests.soak.exactness import SCRIPT

STEPS = 100
PAUSE_S = 0.2  # for each of eight shards: the run outlasts the siege, and is then told to hurry
RUN = "r"
WAIT_S = 30.0
GROWTH_BYTES_MAX = 48 << 20  # of one process, at its peak


@dataclass(frozen=True)
class Port:
    """Where somebody of the run listens. `owner` is a worker, or "ledger"."""

    owner: str
    address: str
    tls: bool = False

    def connect(self) -> socket.socket:
        sock = connect(self.address, 5.0)
        sock.settimeout(5.0)
        return sock

    def __str__(self) -> str:
        return f"{self.owner} on {self.address}"


@dataclass(frozen=True)
class Held:
    """What a process has: bytes at its peak since we last asked, and descriptors."""

    bytes: int
    descriptors: int


class Besieged(ObservedHosts):
    """A run of two workers that trains slowly until `hurry`."""

    def __init__(self, home: Path, parts: Sequence[ObservedRun], url: str, keys: Keys | None) -> None:
        super().__init__(parts)
        self.home = home
        self.url = url
        self.given = keys
        self.registrations: dict[str, Registration] = {}

    @property
    def keys(self) -> Keys:
        if self.given is not None:
            return self.given
        (part,) = self.hosts.values()
        return Keys.from_secret(bytes.fromhex((part.directory.path / "secret").read_text().strip()))

    @property
    def socket_dirs(self) -> list[Path]:
        recorded = [part.directory.recorded_ledger_socket() for part in self.hosts.values()]
        return [path.parent for path in recorded if path is not None]

    def ledger(self) -> Ledger:
        return open_ledger(self.url, RUN, self.socket_dirs[0] / LEDGER_SOCKET, self.keys.secret)

    def ports(self) -> list[Port]:
        """All of ours, as they are now."""
        with closing(self.ledger()) as ledger:
            reading = ledger.read(KEY_WORKERS)
        found = [Registration.decode(entry.value) for entry in reading.entries]
        self.registrations = {one.id: one for one in found}
        places = [Port(one.id, one.address, tls=self.given is not None) for one in found]
        places += [Port(one.id, one.local) for one in found if one.local]
        sockets = [directory / LEDGER_SOCKET for directory in self.socket_dirs]
        return places + [Port("ledger", f"unix:{path}") for path in sockets if path.exists()]

    def processes(self) -> dict[str, int]:
        agents = {f"agent {name}": part.agent.pid for name, part in self.hosts.items() if part.agent is not None}
        return agents | self.pids

    def held(self) -> dict[str, Held]:
        """Of every process of the run; its peak counts from here on."""
        found = {}
        for name, pid in self.processes().items():
            with suppress(OSError):  # it may be ending
                status = Path(f"/proc/{pid}/status").read_text()
                peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
                found[name] = Held(peak, len(os.listdir(f"/proc/{pid}/fd")))  # noqa: PTH208
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        return found

    def applied(self) -> int:
        """The newest step that anyone has applied."""
        lines = [path.read_text().splitlines() for path in (self.home / "times").glob("*.times")]
        return max((int(one[-1].split()[1]) for one in lines if one), default=-1)

    def wait_more(self, steps: int) -> None:
        at = self.applied() + steps
        self.wait(lambda: self.applied() >= at, f"step {at}", WAIT_S)

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Nobody dies, no view changes, steps are applied; and no process holds more than before, then or after."""
        self.look()
        view, pids = self.view, self.pids
        self.held()
        before = self.held()
        yield
        self.wait_more(1)
        assert self.pids == pids and self.view == view
        self.holds_no_more(before)

    def holds_no_more(self, before: dict[str, Held], *, spare: int = 0) -> None:
        """But for so many descriptors."""
        after = self.held()
        for name in before.keys() & after.keys():
            grown = after[name].bytes - before[name].bytes
            assert grown < GROWTH_BYTES_MAX, f"{name} grew by {grown >> 20} MiB"
        few = {name: one.descriptors + spare for name, one in before.items() if name in after}
        self.wait(
            lambda: all(self.held()[name].descriptors <= count for name, count in few.items()),
            f"no more descriptors than {few}, now {self.held()}",
            WAIT_S,
        )

    def ends_exact(self) -> None:
        assert self.applied() < STEPS - 1, "it was over before the siege was"
        (self.home / "times" / "hurry").touch()
        # A quiet run on this machine says what is right: other processors give other bits.
        expected = quiet_digest(self.home, 1, [SCRIPT, "--steps", str(STEPS)])
        assert self.finish(60.0) == expected


@contextmanager
def besieged(home: Path, layout: str) -> Iterator[Besieged]:
    """`plain`: one host, its own ledger, TCP without certificates. `tls`: two hosts, etcd, certificates."""
    (home / "times").mkdir()
    script = [SCRIPT, "--steps", str(STEPS), "--pause", str(PAUSE_S), "--times", str(home / "times")]
    with ExitStack() as stack:
        if layout == "plain":
            options = ["--workers", "2", "--path", "network", "--listen", "127.0.0.1"]
            run = Besieged(home, [ObservedRun(home, RUN, options, script)], "", None)
        else:
            keys = create_keys(home / "keys")
            url = stack.enter_context(EtcdCluster(home / "etcd", members=1)).url
            options = ["--workers", "1", "--ledger", url, "--keys", str(home / "keys"), "--listen", "127.0.0.1"]
            run = Besieged(
                home, [ObservedRun(home, RUN, options, script, host=host) for host in ("alpha", "beta")], url, keys
            )
        stack.callback(run.end)
        run.start()
        run.wait(lambda: len(run.living_members()) == 2 and run.applied() >= 1, "two members that train", 60.0)
        try:
            yield run
        except BaseException:
            print(run.log())
            raise


def hung_up(sock: socket.socket, within_s: float = 4.0) -> bytes | None:
    """What the other side said before it closed the connection; None if it did not close it in time."""
    said = bytearray()
    deadline = time.monotonic() + within_s
    while (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        try:
            more = sock.recv(65536)
        except TimeoutError:
            return None
        except OSError:
            return bytes(said)
        if not more:
            return bytes(said)
        said += more
    return None


class Crowd:
    """So many connections to each port, idle and held: whoever is hung up on comes again at the next `tend`."""

    def __init__(self, ports: Callable[[], Sequence[Port]], count: int) -> None:
        self._ports = ports
        self._count = count
        self._held: list[socket.socket] = []
        self.turned_away = 0

    def tend(self) -> None:
        places = self._ports()
        staying = []
        for sock in self._held:
            try:
                gone = not sock.recv(1)
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                sock.close()
                self.turned_away += 1
            else:
                staying.append(sock)
        self._held = staying
        for number in range(len(staying), self._count):
            with suppress(OSError):  # the worker that was killed does not listen
                sock = connect(places[number % len(places)].address, 1.0)
                sock.setblocking(False)
                self._held.append(sock)

    def __len__(self) -> int:
        return len(self._held)

    def close(self) -> None:
        for sock in self._held:
            sock.close()
        self._held = []
