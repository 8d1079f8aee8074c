"""RobustStrategy over rounds: hostile clients, stragglers, too few answers, reputations; in virtual time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from holdfast.byzantine import Bulyan, Mean, TrimmedMean
from holdfast.core.errors import ConfigError
from holdfast.integrations.flower import Quarantine, RobustStrategy, Rounds
from holdfast.integrations.flower.combining import RoundDesk, RoundOutcome
from holdfast.integrations.flower.model_record import Model, Unfit
from holdfast.integrations.flower.reputation import Conduct
from tests.harness.flower_grid import Client, ScriptedGrid
from tests.integrations.flower.training import InVirtualTime, honest, hostile, model, tensors

QUICK = Rounds(deadline_s=30.0, late_s=5.0)


def far_off(content: RecordDict) -> None:
    arrays = content.array_records["arrays"]
    content["arrays"] = ArrayRecord(
        {name: Array(np.asarray(one.numpy() + 50, dtype=one.numpy().dtype)) for name, one in arrays.items()}
    )


def silent(message: Message) -> None:
    return None


def told(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="flwr")


def test_two_of_ten_hostile_clients_do_not_move_the_model_far() -> None:
    def bias(hostiles: int, rule: str, f: int) -> float:
        clients: dict[int, Client] = {number: honest(number) for number in range(10 - hostiles)}
        clients |= {number: hostile(number, far_off) for number in range(10 - hostiles, 10)}
        result = InVirtualTime(rule, f=f, rounds=QUICK).start(ScriptedGrid(clients), model(), num_rounds=3)
        return float(result.arrays["bias"].numpy())

    clean = bias(0, "mean", 0)
    assert abs(bias(2, "nnm+trimmed-mean", 2) - clean) < 0.2
    assert bias(2, "mean", 2) > clean + 20, "the test could fail"


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    def digest(late_s: Mapping[int, float]) -> str:
        grid = ScriptedGrid({number: honest(number) for number in range(6)}, dict(late_s))
        result = InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=2)
        return Model.of(result.arrays).digest()

    assert digest({}) == digest({0: 3.0, 1: 2.0, 2: 1.0}) == digest({5: 4.0, 3: 0.3})


def test_a_straggler_holds_the_others_up_for_late_s_and_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({number: honest(number) for number in range(5)}, late_s={4: 20.0})
    InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=1)
    assert 5.0 <= grid.now_s < 6.0
    assert told(caplog, "round 1 without client 4, silent: no answer within 5 s")


def test_one_that_is_only_a_little_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({number: honest(number) for number in range(5)}, late_s={4: 4.0})
    InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=1)
    assert not told(caplog, "without client") and 4.0 <= grid.now_s <= 5.0


def test_a_reply_that_was_announced_and_never_comes_whole_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """Flower itself waits for its parts, for hours."""
    let_go = threading.Event()

    class Stuck(ScriptedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            wanted = list(message_ids)
            if wanted == ["m5"]:
                let_go.wait(60.0)
            return super().pull_messages(wanted)

    grid = Stuck({number: honest(number) for number in range(5)})
    began_s = time.monotonic()
    InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=1)
    assert time.monotonic() - began_s < 30.0
    let_go.set()
    assert told(caplog, "round 1 without client 4, silent: no answer within 5 s")


def test_more_drop_outs_than_f_end_a_round_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    clients: dict[int, Client] = {number: honest(number) for number in range(4)}
    grid = ScriptedGrid({**clients, 7: silent, 8: silent})
    InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=1)
    assert 30.0 <= grid.now_s < 31.0 and told(caplog, "round 1: 4 of 6 clients trusted")


def test_a_round_with_too_few_answers_is_left_out_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    there = {"silent": True}
    sometimes: Callable[[int], Client] = lambda number: (  # noqa: E731
        lambda message: None if there["silent"] else honest(number)(message)
    )
    grid = ScriptedGrid({1: honest(1), 2: sometimes(2), 3: sometimes(3)})
    grid.clients[1] = lambda message: (
        there.update(silent=message.metadata.group_id == "1"),
        honest(1)(message),
    )[1]
    result = InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=2)
    (sentence,) = told(caplog, "is left out")
    assert "round 1 is left out, and the model stays as it was: 1 of 3 clients sent something of use" in sentence
    assert "trimmed-mean with f=1 needs 3" in sentence
    assert float(result.arrays["bias"].numpy()) == pytest.approx(1.5, abs=0.3), "one round's worth"


def test_a_round_without_enough_clients_is_left_out_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({1: honest(1), 2: honest(2)})
    result = InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=2)
    assert told(caplog, "2 clients are there, and trimmed-mean with f=1 needs 3")
    assert grid.now_s == pytest.approx(60.0) and not grid.asked
    assert tensors(result.arrays)["bias"] == 0.5


def test_answers_min_is_asked_for_on_top_of_what_the_rule_needs(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({1: honest(1), 2: honest(2), 3: honest(3), 4: silent, 5: silent})
    rounds = Rounds(deadline_s=30.0, late_s=5.0, answers_min=4)
    InVirtualTime(TrimmedMean(f=1), rounds=rounds).start(grid, model(), num_rounds=1)
    assert told(caplog, "3 of 5 clients sent something of use, and 4 must")


def test_malformed_answers_were_among_the_f(caplog: pytest.LogCaptureFixture) -> None:
    """Bulyan with f=2 needs 11. One of 11 sends nonsense: of the other ten at most one is hostile, and 7 would do."""
    clients: dict[int, Client] = {number: honest(number) for number in range(10)}
    nonsense = hostile(10, lambda content: content.__delitem__("arrays"))
    InVirtualTime(Bulyan(f=2), rounds=QUICK).start(ScriptedGrid({**clients, 10: nonsense}), model(), num_rounds=1)
    assert not told(caplog, "is left out")
    caplog.clear()
    quiet = InVirtualTime(Bulyan(f=2), rounds=QUICK)
    quiet.start(ScriptedGrid({**clients, 10: silent}), model(), num_rounds=1)
    assert told(caplog, "is left out"), "one that says nothing was not one of the f"


def test_a_client_that_is_malformed_again_and_again_rests_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({number: honest(number) for number in range(4)})
    grid.clients[9] = hostile(9, lambda content: content.__delitem__("metrics"))
    strategy = InVirtualTime(TrimmedMean(f=1), rounds=QUICK, quarantine=Quarantine(strikes=2, rounds=3))
    strategy.start(grid, model(), num_rounds=8)
    assert [number for number, client in grid.asked if client == 9] == ["1", "2", "6", "7"]
    assert told(caplog, "round 2: client 9 is not asked in rounds 3 to 5: it brought nothing of use for 2 rounds")
    assert told(caplog, "client 9 is not asked in rounds 8 to 13")


def test_an_attacker_that_is_always_left_out_rests(caplog: pytest.LogCaptureFixture) -> None:
    grid = ScriptedGrid({number: honest(number) for number in range(8)})
    grid.clients |= {number: hostile(number, far_off) for number in (8, 9)}
    InVirtualTime("nnm+trimmed-mean", f=2, rounds=QUICK).start(grid, model(), num_rounds=10)
    assert told(caplog, "client 8 is not asked") and told(caplog, "client 9 is not asked")
    assert not told(caplog, "client 3 is not asked")


def test_only_so_many_clients_are_asked_and_the_seed_says_which() -> None:
    asked = []
    for _ in range(2):
        grid = ScriptedGrid({number: honest(number) for number in range(9)})
        rounds = Rounds(clients=5, deadline_s=30.0, seed=4)
        InVirtualTime(TrimmedMean(f=1), rounds=rounds).start(grid, model(), num_rounds=3)
        asked.append(grid.asked)
    assert asked[0] == asked[1] and len(asked[0]) == 15 and len({client for _, client in asked[0]}) > 5


def test_clients_evaluate_too_and_the_median_counts(caplog: pytest.LogCaptureFixture) -> None:
    def evaluating(client: int, accuracy: float) -> Client:
        def reply(message: Message) -> Message | None:
            if message.metadata.message_type == "train":
                return honest(client)(message)
            return Message(RecordDict({"m": MetricRecord({"num-examples": 5, "accuracy": accuracy})}), reply_to=message)

        return reply

    accuracies = {1: 0.5, 2: 0.6, 3: 0.7, 4: 1e9}
    grid = ScriptedGrid({client: evaluating(client, accuracy) for client, accuracy in accuracies.items()})
    result = InVirtualTime(TrimmedMean(f=1), rounds=QUICK, evaluate=True).start(grid, model(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(0.65)
    assert result.train_metrics_clientapp[1]["loss"] == 1.0


def test_those_who_own_the_loop_get_the_same_model() -> None:
    grid = ScriptedGrid({number: honest(number) for number in range(4)})
    grid.clients[9] = hostile(9, lambda content: content.__delitem__("metrics"))
    theirs = InVirtualTime(TrimmedMean(f=1), rounds=QUICK)
    arrays = model()
    for number in (1, 2):
        messages = list(theirs.configure_train(number, arrays, ConfigRecord(), grid))
        found, metrics = theirs.aggregate_train(number, grid.send_and_receive(messages))
        assert found is not None and metrics is not None
        arrays = found
        assert list(theirs.configure_evaluate(number, arrays, ConfigRecord(), grid)) == []
    assert theirs.book.standings[9].strikes == 2
    ours = InVirtualTime(TrimmedMean(f=1), rounds=QUICK).start(grid, model(), num_rounds=2)
    assert Model.of(arrays).digest() == Model.of(ours.arrays).digest()


class InTwoQuestions:
    """A combiner of one's own, as one that masks updates would be: it asks twice, and keeps a state."""

    f = 0

    def __init__(self) -> None:
        self.held = 0

    def needed(self) -> int:
        return 2

    def hold(self, model: Model, config: ConfigRecord, clients: Sequence[int], desk: RoundDesk) -> RoundOutcome:
        first = desk.ask(dict.fromkeys(clients, RecordDict({"config": config})), self._key, kind="train.keys")
        shown = ConfigRecord(
            {"keys": [first.good[client] for client in sorted(first.good)], "server-round": desk.number}
        )
        second = desk.ask(dict.fromkeys(first.good, RecordDict({"config": shown})), self._key, kind="train.sums")
        self.held += 1
        conducts = dict.fromkeys(second.good, Conduct.TRUSTED)
        conducts |= {client: refusal.conduct for client, refusal in {**first.refused, **second.refused}.items()}
        moved = {name: torch.full_like(one, sum(second.good.values())) for name, one in model.state.items()}
        return RoundOutcome(model.moved(moved), conducts)

    def _key(self, content: RecordDict) -> int:
        if "answer" not in content.config_records:
            raise Unfit("it has no answer")
        return int(content.config_records["answer"]["number"])  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held = int(state["held"])

    def __str__(self) -> str:
        return "two questions"


def test_a_combiner_of_ones_own_asks_as_often_as_it_needs(caplog: pytest.LogCaptureFixture) -> None:
    def answering(client: int) -> Client:
        def reply(message: Message) -> Message:
            keys = message.content.config_records["config"].get("keys", [])
            number = client if message.metadata.message_type == "train.keys" else len(keys)  # type: ignore[arg-type]
            return Message(RecordDict({"answer": ConfigRecord({"number": number})}), reply_to=message)

        return reply

    grid = ScriptedGrid({1: answering(1), 2: answering(2), 3: answering(3)})
    grid.clients[4] = hostile(4, lambda content: None)
    combiner = InTwoQuestions()
    result = InVirtualTime(combiner, rounds=QUICK).start(grid, model(), num_rounds=1)
    assert float(result.arrays["bias"].numpy()) == 0.5 + 3 * 3 and combiner.held == 1
    assert told(caplog, "round 1: 3 of 4 clients trusted")


def test_wrong_arguments_get_one_sentence() -> None:
    with pytest.raises(ConfigError, match="not told how many clients may be hostile"):
        RobustStrategy("median")
    with pytest.raises(ConfigError, match="there is no rule"):
        RobustStrategy("medain", f=1)
    with pytest.raises(ConfigError, match="needs 11 clients, and 8 are asked"):
        RobustStrategy(Bulyan(f=2), rounds=Rounds(clients=8))
    with pytest.raises(ConfigError, match="no times to wait"):
        RobustStrategy(Mean(f=0), rounds=Rounds(deadline_s=0.0))
    with pytest.raises(ConfigError, match="nobody was asked"):
        RobustStrategy(Mean(f=0)).aggregate_train(1, [])
    with pytest.raises(ConfigError, match="is not that of"):
        RobustStrategy(InTwoQuestions(), f=3)


def test_holdfast_starts_without_flower_and_says_what_to_install() -> None:
    code = """
import sys
sys.modules["flwr"] = None
import holdfast, holdfast.cli.main, holdfast.integrations.flower as flower
from holdfast.core.errors import ConfigError
assert flower.Quarantine(strikes=2).strikes == 2
try:
    flower.RobustStrategy
except ConfigError as error:
    print(__import__("json").dumps([error.message, error.hint]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    message, hint = json.loads(done.stdout), done.stderr
    assert "needs Flower 1.41" in message[0] and message[1] == "pip install 'holdfast[flower]'", hint


def test_neither_the_package_nor_the_mod_for_clients_imports_what_it_does_not_need() -> None:
    code = """
import sys, warnings
import holdfast, holdfast.cli.main, holdfast.integrations.flower
assert "flwr" not in sys.modules and "torch" not in sys.modules
warnings.simplefilter("ignore")
from holdfast.integrations.flower import ClientMomentum
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
