"""Simulated federated learning with real server processes, some of which lie: the training, the command, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from holdfast.byzantine.agreement.client import Client
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.processes import Compute, Nursery
from holdfast.byzantine.agreement.signing import PrivateKey
from holdfast.byzantine.agreement.verifying import chains_in, compare, verify_chain
from holdfast.byzantine.federation import by_servers
from holdfast.byzantine.federation.by_servers import ServerChoice
from holdfast.byzantine.federation.data import load
from holdfast.byzantine.federation.rounds import RoundSeen, Settings, train
from holdfast.cli.main import main
from holdfast.core.errors import IntegrityError, PeerError
from holdfast.trust.keys import Keys

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("agreement")]
WAIT_S = 120.0
FEW = Settings(clients=6, byzantine=1, rounds=4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as one:
        yield one


@pytest.mark.parametrize(("lie", "attack"), [("lying", "sign-flip"), ("equivocating", "nan"), ("silent", "none")])
def test_a_training_is_the_same_with_a_server_that_lies(
    lie: str, attack: str, nursery: Nursery, tmp_path: Path
) -> None:
    choice = ServerChoice(byzantine=1, lie=lie, directory=tmp_path / "chains", round_timeout_s=WAIT_S)
    choice.validate()
    rounds: list[RoundSeen] = []
    found, alone = (
        train(load("digits"), FEW, aggregator="trimmed-mean", attack=attack, seed=3, **more)
        for more in ({"combining": choice.combining(nursery), "each_round": rounds.append}, {})
    )
    assert [one.rounds for one in rounds] == [1, 2, 3, 4]
    assert found.trusted == alone.trusted
    assert found.accuracies == pytest.approx(alone.accuracies, abs=0.01)  # a client adds, a server's rule divides
    paths = chains_in(tmp_path / "chains")
    verdicts = [verify_chain(path) for path in paths if path.parent.name != "s3"]
    compare(verdicts)
    assert len(verdicts) == 3 and max(len(one.rounds) for one in verdicts) == FEW.rounds
    clients = 5 if attack == "none" else 6
    assert all(len(one.updates) == clients and len(one.signers) >= 2 for one in verdicts[0].rounds)


def test_a_signed_model_that_the_updates_do_not_come_to_ends_the_training(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if more servers lied than are borne: one bit of one weight in round 2."""
    honest = by_servers.one_round

    def one_round(
        clients: Sequence[Client], round: int, model: dict[str, torch.Tensor], compute: Compute, timeout_s: float
    ) -> dict[str, torch.Tensor]:
        signed = honest(clients, round, model, compute, timeout_s)
        if round == 2:
            signed["weights"].view(torch.int32)[7] ^= 1
        return signed

    monkeypatch.setattr(by_servers, "one_round", one_round)
    with pytest.raises(IntegrityError, match="signed in round 2 is not what the updates come to"):
        train(
            load("digits"),
            FEW,
            aggregator="median",
            attack="none",
            seed=0,
            combining=ServerChoice().combining(nursery),
        )


def test_the_command_keeps_chains_that_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chains, kept, drawn = tmp_path / "chains", tmp_path / "f.json", tmp_path / "f.png"
    words = ["federate", "--clients", "6", "--byzantine", "1", "--rounds", "3", "--aggregator", "mean,median"]
    words += ["--attack", "alie", "--servers", "4", "--byzantine-servers", "1", "--json", str(kept)]
    assert main([*words, "--chains", str(chains), "--plot", str(drawn)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 servers, 1 of them lying" in lines[0] and lines[1].split() == ["alie"] and len(lines) == 5
    assert drawn.read_bytes().startswith(b"\x89PNG") and json.loads(kept.read_text())["how"]
    assert main(["federate", "verify", str(chains)]) == 0
    printed = capsys.readouterr().out
    assert "1-mean-alie-0, 4 servers" in printed and "2-median-alie-0, 4 servers" in printed
    assert main(words) == 0  # from the file: nothing is trained again
    capsys.readouterr()
    chain = chains / "1-mean-alie-0" / "servers" / "s0" / "rounds.chain"
    content = bytearray(chain.read_bytes())
    content[len(content) // 2] ^= 1
    chain.write_bytes(content)
    assert main(["federate", "verify", str(chains)]) == 1
    assert str(chain) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "3"], "one of 4 servers may lie"),
        (["--servers", "1000"], "--servers 1000 cannot be"),
        (["--servers", "4", "--byzantine-servers", "2"], "2 of 4 servers cannot lie: 1 may"),
        (["--servers", "4", "--byzantine-servers", "-1"], "-1 of 4 servers cannot lie"),
        (["--servers", "4", "--byzantine-servers", "1", "--lie", "fibbing"], "there is no lie 'fibbing'"),
        (["--servers", "4", "--lie", "lying"], "says how servers lie, and none does"),
        (["--servers", "4", "--chains", __file__], "is not an empty directory"),
        (["--servers", "4", "--chains", str(Path(__file__).parent)], "is not an empty directory"),
        (["--byzantine-servers", "1"], "is about servers, and there are none"),
        (["--lie", "silent"], "is about servers, and there are none"),
        (["--chains", "somewhere"], "is about servers, and there are none"),
    ],
)
def test_a_mistake_gets_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed


def test_results_with_and_without_servers_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["federate", "--rounds", "2", "--clients", "6", "--byzantine", "1", "--attack", "none"]
    words += ["--aggregator", "mean", "--json", str(tmp_path / "f.json")]
    assert main(words) == 0
    assert main([*words, "--servers", "4"]) == 2
    assert "other settings" in capsys.readouterr().err


def processes_with(scratch: Path) -> list[int]:
    """Whoever has this directory in its environment, which children inherit."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("after", ["at the start", "in a round"])
def test_ctrl_c_leaves_no_process(after: str, tmp_path: Path) -> None:
    chains, scratch = tmp_path / "chains", tmp_path / "scratch"
    scratch.mkdir()
    words = ["federate", "--servers", "4", "--rounds", "5000", "--attack", "none", "--chains", str(chains)]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    deadline = time.monotonic() + WAIT_S

    def has_come() -> bool:
        if after == "at the start":
            return len(processes_with(scratch)) > 1
        return any(path.stat().st_size > 20_000 for path in chains.glob("*/servers/s0/rounds.chain"))

    try:
        while not has_come():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130 and "Traceback" not in said, said
        assert processes_with(scratch) == []
        assert list(scratch.iterdir()) == []
    finally:
        for left in processes_with(scratch):
            os.kill(left, signal.SIGKILL)
        process.wait()


def test_a_client_that_is_closed_waits_no_longer() -> None:
    """Nobody listens at its servers' addresses."""
    key = PrivateKey.create()
    servers = {f"s{number}": PrivateKey.create().public for number in range(4)}
    federation = Federation(
        name="none",
        f=1,
        servers=servers,
        clients={"c0": key.public},
        rule="mean",
        hostile=0,
        updates_min=1,
        model=bytes(32),
    )
    addresses = {name: f"unix:/nowhere/{name}" for name in servers}
    client = Client("c0", key, federation, addresses, Keys.from_secret(bytes(32)), public=key.public)
    timer = threading.Timer(0.2, client.close)
    timer.start()
    with client, pytest.raises(PeerError, match="was closed before"):
        client.submit(1, {"weights": torch.zeros(1)}, timeout_s=WAIT_S)
    timer.join()
