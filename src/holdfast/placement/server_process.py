"""The process of a parameter server: it listens, registers, and serves its slices until it is told to end.

`python -m holdfast.placement.server_process`, started by an agent with the variables of server_environment.py.
"""

from __future__ import annotations

import os
import signal
import socket

import torch

from holdfast.core.words import Registration
from holdfast.events import EventLog
from holdfast.ledger.port import Ledger
from holdfast.net.sockets import open_tcp, open_unix
from holdfast.placement import late_dynamo
from holdfast.placement.ledger import open_ledger
from holdfast.placement.proc import process_started
from holdfast.placement.server_environment import ServerEnvironment
from holdfast.servers.parameter_slice import ParameterSlice
from holdfast.servers.server import ServerSettings, SliceServer
from holdfast.servers.units_state import KIND, UnitsState
from holdfast.tables.serving import TABLE
from holdfast.tables.table_slice import TableSlice
from holdfast.trust.keys import Keys, load_keys

KINDS = {"parameters": ParameterSlice, KIND: UnitsState, TABLE: TableSlice}


def main() -> None:
    environment = ServerEnvironment.from_variables()
    late_dynamo.install()
    torch.set_num_threads(1)
    _warm_up()
    keys = load_keys(environment.keys) if environment.keys else Keys.from_secret(environment.secret())
    sockets, address, local = _listen(environment)
    events = EventLog(environment.run_dir / "events" / f"{environment.server}.jsonl", environment.server)
    registration = Registration(
        id=environment.server,
        host=environment.host or socket.gethostname(),
        pid=os.getpid(),
        pid_started=process_started(os.getpid()) or 0,
        address=address,
        fingerprint="",
        local=local,
    )

    def ledger() -> Ledger:
        return open_ledger(environment.ledger, environment.run, environment.ledger_socket, keys.secret)

    server = SliceServer(
        registration,
        sockets,
        keys,
        ledger,
        KINDS,
        ServerSettings(lease_s=environment.lease_s),
        tell=lambda name, decision, reason: events.write("slice", slice=name, decision=decision, reason=reason),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    try:
        server.run()
    finally:
        environment.socket.unlink(missing_ok=True)
        events.close()


def _warm_up() -> None:
    """The first update of a process takes long, and nobody must wait for it: before it registers."""
    parameter = torch.nn.Parameter(torch.zeros(16))
    parameter.grad = torch.ones(16)
    torch.optim.AdamW([parameter], fused=True).step()


def _listen(environment: ServerEnvironment) -> tuple[list[socket.socket], str, str]:
    """The sockets, the address for processes of other hosts, and the one for those of this."""
    near, local = open_unix(environment.socket)
    if not environment.ledger and not environment.listen:
        return [near], local, ""
    far, address = open_tcp(environment.listen or "127.0.0.1", environment.advertise)
    return [far, near], address, local


if __name__ == "__main__":
    main()
