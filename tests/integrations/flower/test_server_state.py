"""A server that is killed at any point goes on at the same round, with the same numbers; two never go on at once."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from holdfast.byzantine import Krum, TrimmedMean
from holdfast.checkpoint.format.owner import Owner, create_owner
from holdfast.checkpoint.restoring.reading import list_checkpoints
from holdfast.checkpoint.saving.retention import Keep
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError, IntegrityError, StorageError, StorageRefused, StorageUnavailable
from holdfast.integrations.flower import Quarantine, Rounds
from holdfast.integrations.flower.model_record import Model
from holdfast.integrations.flower.server_state import ServerState, StateKeeper
from tests.harness.flower_grid import ScriptedGrid
from tests.harness.memory_storage import CALLS, MemoryStorage
from tests.integrations.flower.training import InVirtualTime, honest, hostile, model

ROUNDS = 3


class Killed(BaseException):
    """The process is gone: nothing catches this."""


class MortalStorage(MemoryStorage):
    """Ends the process instead of its Nth call, which is right after the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.dies_at = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        def called(*arguments: Any, **words: Any) -> Any:
            self.calls += 1
            if self.dies_at == self.calls:
                raise Killed
            return found(*arguments, **words)

        return called


def grid() -> ScriptedGrid:
    made = ScriptedGrid({number: honest(number) for number in range(5)})
    made.clients[9] = hostile(9, lambda content: content.__delitem__("metrics"))
    return made


def trained(storage: Storage | None, rounds: int = ROUNDS, **more: Any) -> tuple[str, Any, InVirtualTime]:
    strategy = InVirtualTime(
        more.pop("rule", TrimmedMean(f=1)),
        rounds=Rounds(deadline_s=30.0, late_s=5.0, clients=5, seed=2),
        quarantine=Quarantine(strikes=2, rounds=2),
        checkpoints=storage,
        **more,
    )

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"bias": float(arrays["bias"].numpy())})

    result = strategy.start(grid(), model(), num_rounds=rounds, evaluate_fn=evaluate)
    return Model.of(result.arrays).digest(), result, strategy


def test_killed_between_any_two_calls_to_storage_it_ends_with_the_same_numbers() -> None:
    digest, result, strategy = trained(None)
    counting = MortalStorage()
    assert trained(counting)[0] == digest
    assert counting.calls > 8 * ROUNDS
    for call in range(1, counting.calls + 1):
        storage = MortalStorage()
        storage.dies_at = call
        with pytest.raises(Killed):
            trained(storage)
        storage.dies_at = 0
        again, resumed, strategy_again = trained(storage)
        assert again == digest, f"killed before call {call}"
        assert resumed.evaluate_metrics_serverapp == result.evaluate_metrics_serverapp
        assert resumed.train_metrics_clientapp == result.train_metrics_clientapp
        assert strategy_again.book.state_dict() == strategy.book.state_dict()


def test_it_goes_on_after_the_last_round_and_asks_nobody_for_what_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="flwr")
    place = str(tmp_path / "state")
    trained(place, rounds=2)  # type: ignore[arg-type]
    whole, _, _ = trained(None)
    assert trained(place)[0] == whole  # type: ignore[arg-type]
    assert "goes on after round 2 of 3, from storage" in caplog.text
    again = grid()
    strategy = InVirtualTime(TrimmedMean(f=1), rounds=Rounds(clients=5, seed=2), checkpoints=place)
    result = strategy.start(again, model(), num_rounds=ROUNDS)
    assert not again.asked and Model.of(result.arrays).digest() == whole, "a finished run is finished"


def test_a_run_that_goes_on_does_not_wait_for_clients_that_are_gone_for_good() -> None:
    storage, rounds = MemoryStorage(), Rounds(deadline_s=1000.0, late_s=5.0, available_min=6)
    InVirtualTime(TrimmedMean(f=1), rounds=rounds, checkpoints=storage).start(grid(), model(), num_rounds=1)
    fewer = grid()
    del fewer.clients[9]
    result = InVirtualTime(TrimmedMean(f=1), rounds=rounds, checkpoints=storage).start(fewer, model(), num_rounds=2)
    assert 5.0 <= fewer.now_s < 10.0 and len(fewer.asked) == 5
    assert set(result.train_metrics_clientapp) == {1, 2}


def test_a_newest_checkpoint_that_is_damaged_is_done_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, _, _ = trained(None)
    storage = MemoryStorage()
    trained(storage, rounds=2)
    (part,) = [one.name for one in storage.list("checkpoint-000000000002/") if "part" in one.name]
    data = bytearray(storage.read(part, 1 << 20))
    data[-1] ^= 1
    storage.write(part, memoryview(bytes(data)))
    assert trained(storage)[0] == whole
    assert "the checkpoint of step 2 cannot be used" in caplog.text
    assert [one.step for one in list_checkpoints(storage)] == [3, 2]


def test_where_none_verifies_it_says_so_and_begins_nothing(tmp_path: Path) -> None:
    storage = MemoryStorage()
    trained(storage, rounds=2)
    for one in storage.list("checkpoint-"):
        if "part" in one.name:
            storage.write(one.name, memoryview(b"nothing"))
    with pytest.raises(IntegrityError, match="none of the 2 checkpoints"):
        trained(storage)


def test_of_two_servers_the_later_one_goes_on_and_the_other_stops() -> None:
    storage = MemoryStorage()
    first = StateKeeper(storage, run="flower", keep=Keep(last=2))
    first.claim()
    state = ServerState(1, Model.of(model()).state, "median")
    assert first.save(state)
    second = StateKeeper(storage, run="flower", keep=Keep(last=2))
    second.claim()
    with pytest.raises(StorageRefused, match="another server app has taken over"):
        first.save(ServerState(2, Model.of(model()).state, "median"))
    found = second.newest()
    assert found is not None and found.number == 1
    assert second.save(ServerState(2, Model.of(model()).state, "median"))


def test_another_runs_place_another_model_and_another_kind_of_checkpoint_are_refused() -> None:
    storage = MemoryStorage()
    trained(storage, rounds=1)
    with pytest.raises(ConfigError, match="is the place of the run flower"):
        trained(storage, run="mine")
    strategy = InVirtualTime(TrimmedMean(f=1), checkpoints=storage)
    small = ArrayRecord({"bias": model()["bias"]})
    with pytest.raises(ConfigError, match="of another model"):
        strategy.start(grid(), small, num_rounds=3)
    from holdfast.checkpoint.library import save_to

    other = MemoryStorage()
    save_to(other, {"weights": 3}, step=1)
    create_owner(other, 1, Owner(run="flower", id="x"))
    with pytest.raises(ConfigError, match="not those of a Flower server"):
        trained(other)


def test_a_change_of_the_rule_is_told(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    trained(storage, rounds=1)
    trained(storage, rounds=2, rule=Krum(f=1))
    assert "rounds up to 1 were combined by trimmed-mean with f=1, from now on by krum with f=1" in caplog.text


class AwayFor(MemoryStorage):
    """It does not take anything while `away`."""

    def away(self, error: StorageError | None, calls: Collection[str] = ("write", "create")) -> None:
        self.fail_with(error, calls)


def test_rounds_go_on_while_storage_is_away_and_the_last_one_must_be_saved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="flwr")
    storage = AwayFor()
    keeper = StateKeeper(storage, run="flower", keep=Keep(last=2))
    keeper.claim()
    storage.away(StorageUnavailable("the disk is full"))
    state = ServerState(1, Model.of(model()).state, "median")
    assert not keeper.save(state)
    assert "round 1 is not in storage" in caplog.text
    with pytest.raises(StorageUnavailable):
        keeper.save(state, must=True)
    storage.away(None)
    assert keeper.save(ServerState(2, state.model, "median")) and "storage works again: round 2 is saved" in caplog.text
