"""The process of a parameter server, as an agent starts it: its place, its event log, the slices that it may serve.

`python -m holdfast.placement.server_process`, with the variables of server_environment.py. It ends at SIGTERM.
"""

from __future__ import annotations

import socket

from holdfast.detection.beat import Activity
from holdfast.detection.heartbeat import Heartbeat, Pulse
from holdfast.detection.pages import SERVER_BEATS
from holdfast.events import EventLog
from holdfast.ledger.port import Ledger
from holdfast.placement import late_dynamo
from holdfast.placement.ledger import open_ledger
from holdfast.placement.proc import started_here
from holdfast.placement.server_environment import ServerEnvironment
from holdfast.servers.server import ServerSettings
from holdfast.servers.serving import ServerPlace, serve
from holdfast.servers.units_state import KIND, UnitsState
from holdfast.tables.serving import KINDS, kinds_with_disk
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
        pid_started=started_here(),
        start=environment.start,
    )
    directory = environment.directory
    settings = ServerSettings(
        lease_s=environment.lease_s,
        directory=directory,
        started_over=environment.started_over if directory is not None else None,
    )

    def ledger() -> Ledger:
        return open_ledger(environment.ledger, environment.run, environment.ledger_socket, keys.secret)

    kinds = kinds_with_disk(environment.rows, environment.table_rows) if environment.table_rows else KINDS
    pulse = Pulse()
    heart = _heart(pulse, environment)
    try:
        serve(
            place,
            keys,
            ledger,
            settings,
            kinds={**kinds, KIND: UnitsState},
            on_turn=lambda: pulse.enter(Activity.WAITING, 0),
            tell=lambda name, decision, reason: events.write("slice", slice=name, decision=decision, reason=reason),
            report=lambda fields: events.write("serving", **fields),
        )
    finally:
        if heart is not None:
            heart.close()
        events.close()


def _heart(pulse: Pulse, environment: ServerEnvironment) -> Heartbeat | None:
    """Its agent sees by it whether the server's thread gets on. None: the system has no memory for it."""
    place = environment.run_dir / SERVER_BEATS
    try:
        place.mkdir(exist_ok=True)
        return Heartbeat(pulse, place, environment.server, started=started_here())
    except OSError:
        return None


if __name__ == "__main__":
    main()
