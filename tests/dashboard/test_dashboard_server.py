"""The dashboard's server: what it tells, to whom, and what it makes of requests that make no sense."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards import Stream, Writers, ask, shown

from holdfast.cli.main import main
from holdfast.core.errors import ConfigError
from holdfast.dashboard import server
from holdfast.dashboard.page_handler import encode
from holdfast.dashboard.server import Dashboard

TOKEN = "a-token-of-this-test"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    made = Writers(tmp_path)
    made.begin()
    yield made
    made.close()


@pytest.fixture
def dashboard(writers: Writers) -> Iterator[Dashboard]:
    with shown(writers.directory) as made:
        yield made


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """One for all that only ask."""
    made = Writers(tmp_path_factory.mktemp("quiet"))
    made.begin()
    with shown(made.directory) as dashboard:
        yield dashboard
    made.close()


def test_the_page_and_its_parts(quiet: Dashboard) -> None:
    status, headers, body = ask(quiet, "GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    assert b"http://" not in body.replace(b"http://www.w3.org", b"") and b"https://" not in body
    for name in ("style.css", "page.js", "story.js", "icon.svg"):
        assert name.encode() in body or name == "story.js"
        assert ask(quiet, "GET", f"/static/{name}")[0] == 200
    assert ask(quiet, "HEAD", "/")[::2] == (200, b"")


def test_the_numbers(quiet: Dashboard) -> None:
    status, headers, body = ask(quiet, "GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"\nholdfast_step " in body


def test_the_story(quiet: Dashboard) -> None:
    Stream(quiet).until(lambda picture: "header" in picture)
    status, headers, body = ask(quiet, "GET", "/story.json")
    story = json.loads(body)
    assert status == 200 and headers["Cache-Control"] == "no-store"
    assert story["run"]["name"] == "r" and story["header"]["step"] == 1
    assert [lane["name"] for lane in story["lanes"]] == ["w0", "w1"]
    assert story["header"]["state"] == "stopped"  # the log says that it runs, but there is no process


def test_the_stream_goes_on_where_it_was(dashboard: Dashboard, writers: Writers) -> None:
    stream = Stream(dashboard)
    first = stream.until(lambda picture: "header" in picture)
    assert first["since"] == 0 and stream.answer.headers["Content-Type"] == "text/event-stream"
    writers.progress(2)
    change = stream.until(lambda picture: picture["header"]["step"] == 2)
    assert change["since"] == first["number"] and change["lanes"] == [] and len(change["events"]) == 1
    stream.close()

    writers.write("agent", "worker_exited", worker="w1.1", pid=2, signal=9, reason="killed")
    again = Stream(dashboard, last=stream.id)
    resumed = again.until(lambda picture: picture["header"]["failures"] == 1)
    assert resumed["since"] >= change["number"]
    assert [lane["name"] for lane in resumed["lanes"]] == ["w1"]
    again.close()
    for strange in ("deadbeef-5", "x", "-", f"{dashboard.keeper.epoch}-99999999", f"{dashboard.keeper.epoch}--1"):
        other = Stream(dashboard, last=strange)
        assert other.next()["since"] == 0
        other.close()


def test_a_finished_run_is_shown_as_it_was(writers: Writers) -> None:
    writers.finish()
    with shown(writers.directory) as dashboard:
        picture = Stream(dashboard).until(lambda picture: "header" in picture)
        assert picture["header"]["state"] == "finished" and picture["header"]["digest"] == "xxh3:abc"
        assert picture["header"]["now"] == round(picture["header"]["last"], 3)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1:8642@evil", ""]
)
def test_other_names_for_this_machine_are_refused(quiet: Dashboard, host: str) -> None:
    for path in ("/", "/story.json", "/events", "/actions/stop"):
        assert ask(quiet, "POST" if "actions" in path else "GET", path, headers={"Host": host})[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "[::1]:80", "127.0.0.1"])
def test_a_tunnel_may_have_another_port(quiet: Dashboard, host: str) -> None:
    assert ask(quiet, "GET", "/", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
def test_other_sites_are_refused(quiet: Dashboard, headers: dict[str, str]) -> None:
    assert ask(quiet, "GET", "/story.json", headers=headers)[0] == 403


ABSURD = {
    "no path": b"GET\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "a version to come": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "not a version": b"GET / FTP/1.0\r\nHost: localhost\r\n\r\n",
    "a strange method": b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "put": b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    "up and away": b"GET /static/../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "up, in disguise": b"GET /static/%2e%2e/server.py HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long address": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a broken address": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    + b"".join(b"X-%d: 1\r\n" % n for n in range(200))
    + b"\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    "bytes": bytes(range(128, 256)) + b"\r\n\r\n",
    "a body that is none": b"POST /actions/stop HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    "a body without end": b"POST /actions/stop HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n",
    "posting the page": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    "getting an action": b"GET /actions/stop HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "heading a stream": b"HEAD /events HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", ABSURD.values(), ids=ABSURD)
def test_absurd_requests(quiet: Dashboard, request_bytes: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(quiet.server_address, timeout=20) as sock:
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.makefile("rb").read(64)
    assert answer.startswith((b"HTTP/1.1 4", b"{")), answer
    assert ask(quiet, "GET", "/")[0] == 200
    assert capfd.readouterr().err == "" and quiet.keeper.trouble == ""


def post(dashboard: Dashboard, action: str, body: object, headers: dict[str, str]) -> tuple[int, str]:
    status, _, said = ask(dashboard, "POST", f"/actions/{action}", json.dumps(body).encode(), {**JSON, **headers})
    return status, str(json.loads(said).get("error", ""))


def test_it_is_read_only_unless_told_otherwise(quiet: Dashboard) -> None:
    for token in ("", TOKEN, "None"):
        status, said = post(quiet, "stop", {}, {server.TOKEN_HEADER: token})
        assert status == 403 and "--actions" in said


def test_actions_need_the_token_and_sense(writers: Writers) -> None:
    with shown(writers.directory, token=TOKEN) as dashboard:
        assert dashboard.url.endswith(f"#token={TOKEN}")
        for wrong in ("", "x", TOKEN + "x", TOKEN[:-1], "ü"):
            assert post(dashboard, "stop", {}, {server.TOKEN_HEADER: wrong.encode().decode("latin-1")})[0] == 403
        assert post(dashboard, "stop", {}, {})[0] == 403
        right = {server.TOKEN_HEADER: TOKEN}
        assert post(dashboard, "explode", {}, right) == (404, "there is no such action")
        assert post(dashboard, "drain", {}, right) == (400, "which worker?")
        assert post(dashboard, "drain", {"worker": 5}, right)[0] == 400
        assert post(dashboard, "drain", {"worker": "w9.9"}, right) == (409, "there is no worker w9.9 here")
        assert post(dashboard, "stop", {}, right) == (409, "run r does not run")
        assert post(dashboard, "save", {}, right) == (409, "run r has no agent to ask for a checkpoint")
        assert post(dashboard, "stop", [], right)[0] == 400
        assert post(dashboard, "stop", {"x": "y" * 5000}, right)[0] == 413
        assert ask(dashboard, "POST", "/actions/stop", b"{", {**JSON, **right})[0] == 400
        assert ask(dashboard, "POST", "/actions/stop", b"{}", {"Content-Type": "text/plain", **right})[0] == 415


def test_so_many_browsers_and_no_more(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(dashboard) for _ in range(server.STREAMS_MAX)]
    for stream in streams:
        stream.next()
    assert ask(dashboard, "GET", "/events")[0] == 429
    assert ask(dashboard, "GET", "/")[0] == 200
    for stream in streams:
        stream.close()


def test_numbers_that_are_none_do_not_reach_the_browser() -> None:
    value = {"a": [1.0, float("nan")], "b": {"c": float("inf")}, "d": "ok"}
    assert json.loads(encode(value)) == {"a": [1.0, None], "b": {"c": None}, "d": "ok"}


def test_a_port_that_is_taken(dashboard: Dashboard, writers: Writers, capsys: pytest.CaptureFixture[str]) -> None:
    port = dashboard.server_address[1]
    with pytest.raises(ConfigError, match=f"cannot listen on port {port}"):
        Dashboard(writers.directory, port)
    home = str(writers.directory.home)
    assert main(["dashboard", "--dir", home, "--port", str(port), "r"]) == 2
    script = Path(home) / "train.py"
    script.write_text("")
    assert main(["run", "--dir", home, "--run", "other", "--workers", "1", "--dashboard", str(port), str(script)]) == 2
    said = capsys.readouterr()
    assert said.err.count("hint:") == 2 and "Traceback" not in said.err and said.out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dashboard", "nowhere"], "there is no run nowhere in"),
        (["dashboard", "--port", "70000", "r"], "70000 is not a port"),
        (["dashboard", "--port", "-1", "r"], "-1 is not a port"),
        (["dashboard", "--port", "x", "r"], "--port is 'x', which is not a whole number"),
        (
            ["run", "--workers", "1", "--dashboard", "99999", "train.py"],
            "--dashboard is 99999, but must be from 0 to 65535",
        ),
        (["run", "--workers", "1", "--dashboard", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "--workers", "1", "--dashboard"], "there is nothing to run"),
    ],
)
def test_wrong_words(writers: Writers, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([arguments[0], "--dir", str(writers.directory.home), *arguments[1:]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and sentence in lines[0] and lines[1].startswith("  hint: ")


def test_the_dashboard_starts_without_torch() -> None:
    code = "import sys, holdfast.dashboard.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command(writers: Writers) -> None:
    """It says where the page is, serves it, and ends in order on Ctrl-C."""
    command = [sys.executable, "-m", "holdfast", "dashboard", "--dir", str(writers.directory.home), "--port", "0"]
    process = subprocess.Popen([*command, "--actions", "r"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = re.fullmatch(r"run r: http://127\.0\.0\.1:(\d+)/#token=(\S{32,})\n", process.stdout.readline())
        assert said is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(said[1]), timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0 and err == ""
    finally:
        process.kill()
        process.communicate()
