"""Clearing up beside workers that may come at any moment."""

from __future__ import annotations

import socket
from pathlib import Path

from holdfast.placement.directory import RunDirectory


def test_what_somebody_listens_on_stays(tmp_path: Path) -> None:
    directory, place = RunDirectory(tmp_path / "home", "r"), tmp_path / "s"
    place.mkdir()
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(str(place / "ledger.sock"))
        dead.close()
        alive.bind(str(place / "w2.2.sock"))
        alive.listen()
        directory.remove_dead_sockets(place)
        assert [path.name for path in place.iterdir()] == ["w2.2.sock"]
    directory.remove_dead_sockets(place)
    assert not place.exists()
    directory.remove_dead_sockets(place)
