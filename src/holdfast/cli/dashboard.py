"""`holdfast dashboard`: a run in the browser."""

from __future__ import annotations

import argparse
import secrets
import threading

from holdfast.core.errors import ConfigError
from holdfast.core.options.kinds import PORT_MAX
from holdfast.core.options.run import DASHBOARD_PORT as PORT


def add_dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show a run in the browser, while it goes on or afterwards. On this machine only."
    parser.add_argument("--port", type=int, default=PORT, metavar="P", help=f"default: {PORT}; 0: any that is free")
    parser.add_argument(
        "--actions", action="store_true", help="let the page drain workers, save and stop; prints a secret address"
    )
    parser.set_defaults(command=show)


def show(options: argparse.Namespace) -> int:
    from holdfast.cli.control import find_run
    from holdfast.dashboard.server import Dashboard

    directory = find_run(options.run, options.dir)
    check_port(options.port)
    dashboard = Dashboard(directory, options.port, token=secrets.token_urlsafe(24) if options.actions else "")
    print(f"run {directory.name}: {dashboard.url}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    finally:
        dashboard.close()
    return 0


def check_port(port: int) -> None:
    if not 0 <= port <= PORT_MAX:
        raise ConfigError(f"{port} is not a port", hint=f"ports are from 1 to {PORT_MAX}; 0 is any that is free")
