"""`holdfast ledger`: a real etcd that is started, looked at and ended by the commands that a person types."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import adopt, find_etcd
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError
from holdfast.ledger.etcd import open_etcd
from tests.harness import etcd_faults

pytestmark = [pytest.mark.xdist_group("etcd"), pytest.mark.processes]

HOLDFAST = (sys.executable, "-m", "holdfast")
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("HOLDFAST_LEDGER", raising=False)
    return tmp_path / "home"


@pytest.fixture
def etcd() -> str:
    try:
        return find_etcd()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def background(etcd: str, home: Path) -> Iterator[str]:
    """The URL of three members that run in the background until the test is over."""
    try:
        yield url_in(said("ledger", "start", "--background"))
    finally:
        cluster = adopt(home / "etcd")
        if cluster is not None:
            cluster.stop(patience_s=0.0)


def holdfast(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output, errors. Members must be the children of another process than ours, the rest may be quick."""
    if arguments[:2] == ("ledger", "start"):
        done = subprocess.run([*HOLDFAST, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)
        return done.returncode, done.stdout, done.stderr
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    return code, output.getvalue(), errors.getvalue()


def said(*arguments: str, code: int = 0) -> str:
    found, output, errors = holdfast(*arguments)
    assert (found, errors) == (code, ""), output + errors
    return output


def refusal(*arguments: str) -> str:
    """Expects exit code 2, one sentence and one hint; gives the sentence."""
    code, output, errors = holdfast(*arguments)
    assert code == 2, output + errors
    first, second = errors.splitlines()
    assert second.startswith("  hint: ")
    return first.removeprefix("holdfast: ")


def url_in(text: str) -> str:
    match = re.search(r"--ledger (etcd://\S+)", text)
    assert match, text
    return match[1]


def pids(home: Path) -> list[int]:
    cluster = adopt(home / "etcd")
    assert cluster is not None
    return [member.pid for member in cluster.members if member.alive]


def test_from_start_to_stop(background: str, home: Path) -> None:
    assert background.count("127.0.0.1:") == 3
    first = pids(home)
    assert len(first) == 3
    status = said("ledger", "status")
    assert re.match(r"ledger: 3 of 3 members answer, e\d leads, revision \d+\n", status)
    assert status.count("follows, reads in") == 2
    assert status.count("leads, reads in") == 1
    assert said("ledger", "runs") == "no runs in this ledger\n"
    assert "already runs there" in refusal("ledger", "start")
    assert "already runs there" in refusal("ledger", "start", "--background")

    with closing(open_etcd(background, "digits")) as ledger:
        ledger.put("config", b"{}")
        assert re.fullmatch(r"digits +stopped +0 hosts, 0 workers, 1 keys\n", said("ledger", "runs"))
        assert "ended 3 members; their data stays" in said("ledger", "stop")
        assert pids(home) == []
        assert "no ledger runs in" in refusal("ledger", "stop")

        assert "has 3 members, not 1" in refusal("ledger", "start", "--background", "--members", "1")
        assert url_in(said("ledger", "start", "--background")) == background
        assert not set(first) & set(pids(home))
        entry = ledger.get("config")  # a client of before, and the data of before
        assert entry is not None and entry.value == b"{}"


def test_a_run_is_forgotten_when_nobody_takes_part(background: str) -> None:
    with closing(open_etcd(background, "digits")) as ledger, closing(open_etcd(background, "digits2")) as neighbour:
        neighbour.put("config", b"{}")
        lease = ledger.grant(60.0)
        ledger.put("config", b"{}")
        for key in ("worker/w0.1@a", "host/a"):
            ledger.put(key, b"{}", lease=lease)
            assert "run digits is not over" in refusal("ledger", "forget", "digits")
            assert ledger.delete(key)
        ledger.put("done", b"{}")
        assert re.search(r"^digits +finished ", said("ledger", "runs", "--ledger", background), re.MULTILINE)
        assert said("ledger", "forget", "digits", "--ledger", background) == "forgot run digits\n"
        assert ledger.read("").entries == ()
        assert re.fullmatch(r"digits2 +stopped .*\n", said("ledger", "runs"))
        assert "there is no run digits in this ledger" in refusal("ledger", "forget", "digits")
        assert neighbour.get("config") is not None


def test_status_tells_of_members_that_are_lost(background: str, home: Path) -> None:
    cluster = adopt(home / "etcd")
    assert cluster is not None
    cluster.kill(0)
    etcd_faults.leader(cluster)
    status = said("ledger", "status")
    assert status.startswith("ledger: 2 of 3 members answer, ")
    assert re.search(rf"{re.escape(cluster.address(0))} +unreachable: connection refused", status)
    cluster.kill(1)
    start = time.monotonic()
    status = said("ledger", "status", code=1)
    assert time.monotonic() - start < 20.0
    assert status.startswith("ledger: no majority of its members answers\n")
    assert status.count("unreachable: connection refused") == 2
    assert said("ledger", "start", "--background")  # brings back whoever is missing
    assert said("ledger", "status").startswith("ledger: 3 of 3 members answer, ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_until_it_is_ended(etcd: str, home: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*HOLDFAST, "ledger", "start", "--members", "1"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        url = url_in("".join(lines))
        (member,) = pids(home)
        with closing(open_etcd(url, "r")) as ledger:
            ledger.put("a", b"")
        assert said("ledger", "status").startswith("ledger: 1 of 1 members answer, e1 leads")
        assert "another `holdfast ledger start` is at work" in refusal("ledger", "start")
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number
    assert not Path(f"/proc/{member}").exists()


def test_members_end_with_a_foreground_that_is_killed(etcd: str, home: Path) -> None:
    process = subprocess.Popen(
        [*HOLDFAST, "ledger", "start", "--members", "1"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        url_in("".join(process.stdout.readline() for _ in range(3)))
        (member,) = pids(home)
        process.kill()
    deadline = time.monotonic() + WAIT_S
    while pids(home):
        assert time.monotonic() < deadline, f"etcd {member} outlives the command that ran it"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["start", "--members", "0"], "a cluster of 0 members is asked for"),
        (["start", "--members", "10"], "a cluster of 10 members is asked for"),
        (["start", "--members", "two"], "--members is 'two', which is not a whole number"),
        (["start", "--dir", "/proc/nowhere"], "cannot write to /proc/nowhere/etcd"),
        (["stop"], "no ledger runs in"),
        (["status"], "it is not said which ledger"),
        (["runs"], "it is not said which ledger"),
        (["forget", "r"], "it is not said which ledger"),
        (["status", "--ledger", "http://a"], "'http://a' does not name a ledger"),
        (["runs", "--ledger", "etcd://a:0"], "is not HOST or HOST:PORT"),
        (["forget", "a/b", "--ledger", "etcd://127.0.0.1:9"], "'a/b' cannot be the name of a run"),
        (["forget", "--ledger", "etcd://a"], "RUN is missing"),
        ([], "ACTION is missing"),
        (["fly"], "there is no command holdfast ledger fly"),
    ],
)
def test_what_cannot_be(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].startswith("  hint: ")
    assert part in lines[0]


def test_a_password_in_the_url_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "status", "--ledger", "etcd://me:hunter2@a:2379"]) == 2
    said = capsys.readouterr()
    assert "must not contain a user or password" in said.err
    assert "hunter2" not in said.err + said.out


def test_nobody_at_home(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the ledger; nothing listens there."""
    monkeypatch.setenv("HOLDFAST_LEDGER", "etcd://127.0.0.1:9")
    assert main(["ledger", "status"]) == 1
    assert "127.0.0.1:9  unreachable: connection refused" in capsys.readouterr().out
    start = time.monotonic()
    assert main(["ledger", "runs"]) == 1
    assert time.monotonic() - start < 10.0
    assert "the ledger does not answer (127.0.0.1:9: connection refused)" in capsys.readouterr().err


def test_without_etcd_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_ETCD", str(tmp_path / "etcd"))
    assert main(["ledger", "start"]) == 2
    assert f"{tmp_path / 'etcd'}, which cannot be run" in capsys.readouterr().err
    monkeypatch.delenv("HOLDFAST_ETCD")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("holdfast.agent.hosts.etcd_member.CHECKOUT_BINARY", Path("nowhere"))
    assert main(["ledger", "start"]) == 2
    said = capsys.readouterr().err
    assert "there is no etcd on this host" in said
    assert "apt install etcd-server" in said


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf"])
def test_without_grpc_it_says_what_to_install(missing: str) -> None:
    code = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {missing!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import holdfast.cli.main as m\n"
        "sys.exit(m.main(['ledger', 'runs', '--ledger', 'etcd://127.0.0.1:9']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        "holdfast: a ledger on etcd needs grpcio and protobuf, which are not installed",
        "  hint: pip install 'holdfast[hosts]'",
    ]


def test_help_starts_without_torch_and_grpc() -> None:
    code = (
        "import sys, holdfast.cli.main as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'grpc', 'google.protobuf'} & sys.modules.keys()"
    )
    for arguments in (["ledger", "--help"], ["ledger", "start", "--help"], ["ledger", "stop"]):
        command = [sys.executable, "-c", code, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
