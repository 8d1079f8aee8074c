"""Hosts with a network between them that can be cut: network namespaces on a bridge, on this machine.

Each host is a namespace with one interface; all interfaces end at a bridge in a namespace of its own. What is dropped
is decided there, by rules on pairs of ports, so neither side gets an error: packets just do not arrive, as with a
pulled cable or a switch that fails. Needs root, `ip` and `nft`.

    with Switchboard(["a", "b", "c"]) as board:
        subprocess.Popen([*board.command("a"), "holdfast", "run", ...])
        board.cut("a", "b")         # both ways; board.cut_one_way("a", "b") drops only what a sends to b
        board.heal()
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from itertools import permutations

_RULES = """
table bridge holdfast {
  set cut { type ifname . ifname; }
  chain forward {
    type filter hook forward priority 0; policy accept;
    iifname . oifname @cut drop
  }
  chain loss { }
}
"""


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: iproute2, nftables)"
    name = f"hf-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    try:
        tried = subprocess.run(
            ["ip", "netns", "exec", name, "nft", "-f", "-"], input=_RULES, capture_output=True, text=True
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return f"the kernel does not filter on bridges: {tried.stderr.strip()}" if tried.returncode else ""


class Switchboard:
    """Everything it makes has a random mark in its name, and goes when it is closed."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._mark = secrets.token_hex(2)
        self._switch = f"hf{self._mark}sw"

    def __enter__(self) -> Switchboard:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        _do("ip", "netns", "add", self._switch)
        self._in_switch("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
        self._in_switch("ip", "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts, start=1):
            space, port = self.namespace(host), _port(number)
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", port, "netns", self._switch, "type", "veth", "peer", "eth0", "netns", space)
            self._in_switch("ip", "link", "set", port, "master", "bridge", "up")
            self._in(space, "ip", "link", "set", "lo", "up")
            self._in(space, "sysctl", "-qw", "net.ipv6.conf.eth0.accept_dad=0")
            self._in(space, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._in(space, "ip", "-6", "addr", "add", f"{self.address6(host)}/64", "dev", "eth0", "nodad")
            self._in(space, "ip", "link", "set", "eth0", "up")
        self._nft(_RULES)

    def namespace(self, host: str) -> str:
        return f"hf{self._mark}{host}"

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def address6(self, host: str) -> str:
        return f"fd77::{self.hosts.index(host) + 1:x}"

    def command(self, host: str) -> list[str]:
        """What to put before a command that is to run on `host`. It keeps its process id."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def cut_one_way(self, sender: str, receiver: str) -> None:
        self._nft(f"add element bridge holdfast cut {{ {self._pair(sender, receiver)} }}")

    def cut(self, *groups: str | Iterable[str]) -> None:
        """Let nothing pass between the groups. A group is a host, or several that still reach each other."""
        sides = [[group] if isinstance(group, str) else list(group) for group in groups]
        pairs = [self._pair(a, b) for one, other in permutations(sides, 2) for a in one for b in other]
        self._nft(f"add element bridge holdfast cut {{ {', '.join(pairs)} }}")

    def isolate(self, host: str) -> None:
        """Cut a host off from all others."""
        self.cut(host, [other for other in self.hosts if other != host])

    def heal(self) -> None:
        self._nft("flush set bridge holdfast cut")

    def lose(self, percent: int) -> None:
        """Drop so many of a hundred packets on their way, at random; 0 ends it."""
        self._nft("flush chain bridge holdfast forward\nadd rule bridge holdfast forward iifname . oifname @cut drop")
        if percent:
            self._nft(f"add rule bridge holdfast forward numgen random mod 100 < {percent} drop")

    def slow(self, host: str, rate: str) -> None:
        """Let what goes to `host` through at `rate` only, as in `8mbit`; an empty rate ends it."""
        port = _port(self.hosts.index(host) + 1)
        self._in_switch("tc", "qdisc", "del", "dev", port, "root", check=False)
        if rate:
            limit = ("burst", "64kb", "latency", "400ms")
            self._in_switch("tc", "qdisc", "add", "dev", port, "root", "tbf", "rate", rate, *limit)

    def unplug(self, host: str) -> None:
        """Pull the cable."""
        self._in_switch("ip", "link", "set", _port(self.hosts.index(host) + 1), "down")

    def plug(self, host: str) -> None:
        self._in_switch("ip", "link", "set", _port(self.hosts.index(host) + 1), "up")

    def close(self) -> None:
        for space in (*map(self.namespace, self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _pair(self, sender: str, receiver: str) -> str:
        ports = [_port(self.hosts.index(host) + 1) for host in (sender, receiver)]
        return f'"{ports[0]}" . "{ports[1]}"'

    def _nft(self, rules: str) -> None:
        _do(*self._inside(self._switch), "nft", "-f", "-", stdin=rules)

    def _in_switch(self, *command: str, check: bool = True) -> None:
        self._in(self._switch, *command, check=check)

    def _in(self, space: str, *command: str, check: bool = True) -> None:
        _do(*self._inside(space), *command, check=check)

    @staticmethod
    def _inside(space: str) -> list[str]:
        return ["ip", "netns", "exec", space]


def _port(number: int) -> str:
    return f"port{number}"


def _do(*command: str, stdin: str = "", check: bool = True) -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
