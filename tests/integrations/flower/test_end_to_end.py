"""A real federation: SuperLink, SuperNodes, `flwr run`, one hostile client, and the server app killed in a round.

The commands are those of docs/how-to/flower.md. What must come out is computed in this process, without any kill.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.integrations.flower import RobustStrategy
from tests.harness.flower_federation import federation
from tests.harness.flower_grid import trained_here

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("flower"), pytest.mark.timeout(900)]
CLIENTS, ROUNDS, ATTACK = 4, 3, "sign-flip"
PATIENT = {"deadline_s": 400.0, "late_s": 400.0}  # every client is heard in every round, however busy the machine is


def test_a_killed_server_app_goes_on_at_its_round_with_the_same_bits(tmp_path: Path) -> None:
    nodes = {}
    place = str(tmp_path / "state")
    with federation(tmp_path / "federation") as flower:
        for number in range(CLIENTS):
            flower.start_client(number, CLIENTS, ATTACK if number == CLIENTS - 1 else "none")
        first = flower.run("first", rounds=ROUNDS, clients=CLIENTS, checkpoints=place, **PATIENT)
        first.until_round(1, timeout_s=400.0)
        flower.until(lambda: bool(flower.members("client-0", "flwr-clientapp")), "client 0 is in the next round", 200.0)
        flower.kill_server_app()
        second = flower.run("second", rounds=ROUNDS, clients=CLIENTS, checkpoints=place, **PATIENT)
        accuracy = second.accuracy(timeout_s=600.0)
        nodes = {flower.node(number): number for number in range(CLIENTS)}
        attackers = flower.node(CLIENTS - 1)
    went_on = re.search(r"goes on after round (\d) of 3, from storage", second.text)
    assert went_on is not None and 1 <= int(went_on[1]) < ROUNDS
    assert sorted(second.rounds()) == list(range(int(went_on[1]) + 1, ROUNDS + 1))

    configs = {
        node: {"partition-id": number, "num-partitions": CLIENTS, "attack": ATTACK if node == attackers else "none"}
        for node, number in nodes.items()
    }
    expected = trained_here(configs, RobustStrategy("nnm+trimmed-mean", f=1), rounds=ROUNDS)
    digests = {number + 1: digest for number, (digest, _) in enumerate(expected)}
    assert {**first.rounds(), **second.rounds()} == digests, "as a run that nobody killed"
    assert f"left out by the rule: {attackers}" in second.text
    honest = {node: config for node, config in configs.items() if node != attackers}
    clean = trained_here(honest, RobustStrategy("mean", f=0), rounds=ROUNDS)
    assert accuracy >= clean[-1][1] - 0.03
