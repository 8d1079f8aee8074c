"""The process of a parameter server, as an agent starts it: its place, its event log, the slices that it may serve.

`python -m holdfast.placement.server_process`, with the variables of server_environment.py. It ends at SIGTERM.
"""

from __future__ import annotations

import socket

from holdfast.core.options.run import DISK
from holdfast.events import EventLog
from holdfast.ledger.port import Ledger
from holdfast.placement import late_dynamo
from holdfast.placement.ledger import open_ledger
from holdfast.placement.server_environment import ServerEnvironment
from holdfast.servers.server import ServerSettings
from holdfast.servers.serving import ServerPlace, serve
from holdfast.servers.units_state import KIND, UnitsState
from holdfast.tables.serving import KINDS
from holdfast.trust.keys import Keys, load_keys


def main() -> None:
    environment = ServerEnvironment.from_variables()
    late_dynamo.install()
    keys = load_keys(environment.keys) if environment.keys else Keys.from_secret(environment.secret())
    events = EventLog(environment.run_dir / "events" / f"{environment.server}.jsonl", environment.server)
    place = ServerPlace(
        id=environment.server,
        host=environment.host or socket.gethostname(),
        listen=environment.listen or "127.0.0.1",
        advertise=environment.advertise,
        socket=environment.socket,
        start=environment.start,
    )
    directory = environment.run_dir / "servers" / environment.server if environment.durable == DISK else None
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)

    def ledger() -> Ledger:
        return open_ledger(environment.ledger, environment.run, environment.ledger_socket, keys.secret)

    try:
        serve(
            place,
            keys,
            ledger,
            ServerSettings(lease_s=environment.lease_s, directory=directory),
            kinds={**KINDS, KIND: UnitsState},
            tell=lambda name, decision, reason: events.write("slice", slice=name, decision=decision, reason=reason),
        )
    finally:
        events.close()


if __name__ == "__main__":
    main()
