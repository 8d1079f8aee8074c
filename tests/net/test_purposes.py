"""A purpose that is added from outside: the code of docs/how-to/add-a-connection-purpose.md runs."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import PeerError
from holdfast.core.words import Registration
from holdfast.net.dialling import dial_service
from holdfast.net.greeting import Hello
from holdfast.net.listener import Listener
from holdfast.net.sockets import open_tcp
from holdfast.trust.keys import Keys

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-connection-purpose.md"
WAIT_S = 10.0


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(code, PAGE.name, "exec"), names)
    return names


def test_the_page_adds_a_purpose(page: dict[str, Any], keys: Keys, other_keys: Keys) -> None:
    server, address = open_tcp("127.0.0.1")
    other = Registration(id="w0.1@a", host="a", pid=1, pid_started=1, address=address, fingerprint="")
    with closing(Listener([server], keys, "w0.1@a", page["PURPOSES"])):
        assert page["ask_load"](other, "b", keys, "w0.1@b") >= 0.0
        with pytest.raises(PeerError):
            page["ask_load"](other, "b", other_keys, "w0.1@b")
        with closing(dial_service(other, "b", keys, Hello("secrets", 0, "w0.1@b"))) as sock:
            sock.settimeout(WAIT_S)
            assert sock.recv(1) == b"", "nobody registered that"
