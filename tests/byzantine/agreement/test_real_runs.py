"""Real servers in processes of their own, one of which lies, with cuts and kills: all honest ones publish the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.byzantine.agreement.aggregating import Aggregation, decode_state, encode_state
from holdfast.byzantine.agreement.canonical import digest_of, pack
from holdfast.byzantine.agreement.chain_file import FILE
from holdfast.byzantine.agreement.links import CLIENTS, SERVERS, dial
from holdfast.byzantine.agreement.machine import Timing
from holdfast.byzantine.agreement.misbehaving import KINDS
from holdfast.byzantine.agreement.processes import Nursery, RoundSettings, ServerGroup, one_round, run_rounds
from holdfast.byzantine.agreement.server import ServerSettings
from holdfast.byzantine.agreement.server import main as server_main
from holdfast.byzantine.agreement.signing import PrivateKey
from holdfast.byzantine.agreement.verifying import chains_in, compare, verify_chain
from holdfast.core.errors import ConfigError, PeerError, RoundOver
from holdfast.net.framing import frame
from holdfast.net.sockets import open_tcp
from holdfast.trust.keys import Keys, create_keys
from tests.harness.cut_wires import CutWires

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("agreement")]
ROUNDS = 3
WAIT_S = 120.0
QUICK = Timing(collect_s=2.0, timeout_s=0.6, resend_s=0.2)
FIRST = {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "bias": torch.zeros(2)}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as one:
        yield one


def update(client: int, round: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * round + client)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in FIRST.items()}


def rounds_of(group: ServerGroup, name: str) -> int:
    path = group.directory_of(name) / FILE
    return len(verify_chain(path).rounds) if path.exists() else 0


def wait_until_all_have(group: ServerGroup, rounds: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(rounds_of(group, name) < rounds for name in group.honest):
        assert time.monotonic() < deadline, {name: rounds_of(group, name) for name in group.honest}
        time.sleep(0.05)


def output_of(group: ServerGroup) -> str:
    return "\n".join(path.read_text() for path in sorted(group.settings.directory.glob("servers/*/output")))


@pytest.mark.parametrize("number", range(10))
def test_honest_servers_publish_the_same_model(number: int, nursery: Nursery, tmp_path: Path) -> None:
    """One run for each kind of lie, and two without: a server is cut off in round 2, another killed in round 3."""
    liars = {number % 4: KINDS[number]} if number < len(KINDS) else {}
    settings = RoundSettings(directory=tmp_path / "run", liars=liars, timing=QUICK)
    aggregation = Aggregation(settings.rule, settings.hostile, encode_state(FIRST))
    expected = encode_state(FIRST)
    with ExitStack() as stack:
        wires = stack.enter_context(CutWires())
        group = stack.enter_context(ServerGroup(settings, FIRST, nursery, routes=wires.route))
        clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        cut, killed = group.honest[number % 3], group.honest[(number + 1) % 3]
        for round in range(1, ROUNDS + 1):
            if round == 2:
                wires.isolate(cut)
            for place, client in enumerate(clients):
                client.submit(round, update(place, round), timeout_s=WAIT_S)
            if round == 2 and liars:
                wires.heal()  # without it and without the liar the others are too few
            if round == 3:
                group.end(killed)
                group.start(killed)
            models = {client.await_model_bytes(round, timeout_s=WAIT_S) for client in clients}
            expected, _ = aggregation.combine(
                expected, [encode_state(update(place, round)) for place in range(len(clients))]
            )
            assert models == {expected}, f"round {round}, {liars}\n{output_of(group)}"
            wires.heal()
        wait_until_all_have(group, ROUNDS)
        verdicts = [verify_chain(group.directory_of(name) / FILE, group.federation) for name in group.honest]
        compare(verdicts)
        assert {verdict.rounds[-1].header.model for verdict in verdicts} == {digest_of(expected)}
        assert "Traceback" not in output_of(group)


def test_rounds_by_one_call(nursery: Nursery, tmp_path: Path) -> None:
    seen: list[int] = []
    settings = RoundSettings(directory=tmp_path / "run", rounds=2, clients=4, rule="median", timing=QUICK)
    model = run_rounds(
        settings,
        FIRST,
        lambda client, round, model: {name: torch.ones_like(tensor) for name, tensor in model.items()},
        on_round=lambda round, model: seen.append(round),
        nursery=nursery,
    )
    assert seen == [1, 2]
    assert torch.equal(model["bias"], torch.full((2,), 2.0))
    assert torch.equal(decode_state(encode_state(model))["weight"], FIRST["weight"] + 2)
    assert len(chains_in(settings.directory)) == 4


def test_a_client_that_is_late_takes_the_model_of_the_others_and_part_in_the_next_round(
    nursery: Nursery, tmp_path: Path
) -> None:
    settings = RoundSettings(
        directory=tmp_path / "run", clients=4, absent=1, rule="median", timing=replace(QUICK, collect_s=0.5)
    )
    with ExitStack() as stack:
        group = stack.enter_context(ServerGroup(settings, FIRST, nursery))
        clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        for place, client in enumerate(clients[1:], start=1):
            client.submit(1, update(place, 1), timeout_s=WAIT_S)
        model = clients[1].await_model(1, timeout_s=WAIT_S)
        wait_until_all_have(group, 1)
        with pytest.raises(RoundOver, match="client 'c0' was late: round 1"):
            clients[0].submit(1, update(0, 1), timeout_s=WAIT_S)
        taken = one_round(clients, 1, dict(FIRST), lambda client, round, model: update(client, round), WAIT_S)
        assert torch.equal(taken["bias"], model["bias"]) and not torch.equal(model["bias"], FIRST["bias"])
        after = one_round(clients, 2, taken, lambda client, round, model: update(client, round), WAIT_S)
        assert not torch.equal(after["bias"], taken["bias"])


def test_servers_end_with_whoever_started_them(tmp_path: Path) -> None:
    """Also if that is killed: nothing is left running."""
    settings = RoundSettings(directory=tmp_path / "run", clients=4, rule="median", timing=QUICK)
    nursery = Nursery()
    group = ServerGroup(settings, FIRST, nursery)
    with group:
        running = dict(group._processes)
        nursery.close()
        deadline = time.monotonic() + WAIT_S
        while any(Path(f"/proc/{process}").exists() for process in running.values()):
            assert time.monotonic() < deadline, running
            time.sleep(0.02)


def test_a_server_of_another_host_over_tcp_with_certificates(nursery: Nursery, tmp_path: Path) -> None:
    settings = RoundSettings(
        directory=tmp_path / "run", servers=1, f=0, clients=3, rule="median", timing=QUICK, round_timeout_s=WAIT_S
    )
    group = ServerGroup(settings, FIRST, nursery)
    directory = group.directory_of("s0")
    listening, address = open_tcp("127.0.0.1")
    listening.close()
    replace(ServerSettings.load(directory), listen=address).save(directory)
    keys = create_keys(directory / "keys")
    group.addresses["s0"], group._keys = address, keys
    with ExitStack() as stack:
        stack.enter_context(group)
        clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        model = one_round(clients, 1, dict(FIRST), lambda client, round, model: update(client, round), WAIT_S)
        assert not torch.equal(model["bias"], FIRST["bias"])


def test_a_server_with_another_key_says_so_and_ends(
    tmp_path: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ServerGroup(RoundSettings(directory=tmp_path / "run", timing=QUICK), FIRST, nursery)
    directory = group.directory_of("s0")
    (directory / "key").unlink()
    PrivateKey.create().save(directory / "key")
    assert server_main([str(directory)]) == 2
    assert "the key of server 's0' is not the one that is registered in the federation" in capsys.readouterr().err
    assert server_main([str(tmp_path)]) == 2 and server_main([]) == 2
    with group:
        pass


def test_nonsense_costs_its_connection_and_nothing_else(nursery: Nursery, tmp_path: Path) -> None:
    """From one that knows the federation's secret, in the names of servers and clients; and from a stranger."""
    settings = RoundSettings(directory=tmp_path / "run", clients=4, rule="median", timing=QUICK)
    with ExitStack() as stack:
        group = stack.enter_context(ServerGroup(settings, FIRST, nursery))
        clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        clients[0].submit(1, update(0, 1), timeout_s=WAIT_S)  # all of them listen
        for address in group.addresses.values():
            for purpose in (SERVERS, CLIENTS):
                for body in (b"", b"nonsense", pack(("Vote", 1)), pack(("Ballot", 1)), pack(("Ask", 2**63 - 1))):
                    send_to(address, group._keys, purpose, frame(body))
                send_to(address, group._keys, purpose, b"\xff\xff\xff\xff")
            with pytest.raises(PeerError):
                dial(address, Keys.from_secret(b"another secret, long enough"), CLIENTS, "c0")
        for place, client in enumerate(clients[1:], start=1):
            client.submit(1, update(place, 1), timeout_s=WAIT_S)
        assert len({client.await_model_bytes(1, timeout_s=WAIT_S) for client in clients}) == 1
        wait_until_all_have(group, 1)
        assert "Traceback" not in output_of(group)


def send_to(address: str, keys: Keys, purpose: str, data: bytes) -> None:
    sock = dial(address, keys, purpose, "s1")
    with sock:
        sock.sendall(data)
        sock.settimeout(0.05)
        try:
            sock.recv(1)
        except OSError:
            pass


def test_what_is_refused_is_told_in_one_sentence(nursery: Nursery, tmp_path: Path) -> None:
    """A round that is over, another model, a second update: by real servers."""
    settings = RoundSettings(directory=tmp_path / "run", clients=4, rule="median", timing=QUICK)
    with ExitStack() as stack:
        group = stack.enter_context(ServerGroup(settings, FIRST, nursery))
        clients = [stack.enter_context(group.client(name)) for name in group.federation.clients]
        with pytest.raises(ConfigError, match="of another model than the federation's: 'more' is in one of them only"):
            clients[0].submit(1, {**update(0, 1), "more": torch.zeros(1)}, timeout_s=WAIT_S)
        with pytest.raises(ConfigError, match=r"'bias' is torch.float32 of \(3,\), and there it is .* of \(2,\)"):
            clients[0].submit(1, {**update(0, 1), "bias": torch.zeros(3)}, timeout_s=WAIT_S)
        with pytest.raises(ConfigError, match="updates are floating-point numbers"):
            clients[0].submit(1, {"steps": torch.zeros(1, dtype=torch.int64)}, timeout_s=WAIT_S)
        for place, client in enumerate(clients):
            client.submit(1, update(place, 1), timeout_s=WAIT_S)
        clients[0].await_model(1, timeout_s=WAIT_S)
        wait_until_all_have(group, 1)
        with pytest.raises(RoundOver, match="client 'c0' was late: round 1: it is over"):
            clients[0].submit(1, update(0, 1), timeout_s=WAIT_S)
        clients[1].submit(2, update(1, 2), timeout_s=WAIT_S)
        with pytest.raises(ConfigError, match="c1 signed two different updates for round 2"):
            clients[1].submit(2, update(1, 3), timeout_s=WAIT_S)
