"""RobustStrategy: Flower's strategy for clients that nobody vouches for, and for a server that may be killed.

It owns the loop over rounds, which belongs to the server app's only thread: choose clients (`reputation.py`), let the
combiner hold the round with them (`combining.py`), judge how they behaved, evaluate, and save (`server_state.py`).
Nothing that a client does ends the run: its worst is a place in the round. A round with too few good answers leaves the
model as it was. A server app that is started again goes on after the last round in storage, with the same numbers.

`configure_train` and `aggregate_train` do the same for others who own the loop, such as Flower's own wrappers for
differential privacy; these have neither deadlines for stragglers nor checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from holdfast.byzantine.rules.port import Rule
from holdfast.byzantine.rules.words import parse
from holdfast.checkpoint.saving.retention import Keep
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError
from holdfast.integrations.flower.combining import ARRAYS, CONFIG, Answers, ByRule, Combiner, RoundOutcome
from holdfast.integrations.flower.desk import GridDesk, read_reply
from holdfast.integrations.flower.model_record import Model
from holdfast.integrations.flower.replies import Refusal, medians, read_metrics, read_update
from holdfast.integrations.flower.reputation import Choice, Conduct, Quarantine, ReputationBook
from holdfast.integrations.flower.rounds import Rounds
from holdfast.integrations.flower.server_state import ServerState, StateKeeper

Evaluate = Callable[[int, ArrayRecord], "MetricRecord | None"]
TOLD_MAX = 20  # clients that a line of the log names


class RobustStrategy(Strategy):
    """`aggregator`: a rule of holdfast.byzantine, its words (`nnm+trimmed-mean`), or a Combiner of one's own.

    `f`: so many of those who answer may be hostile, where the rule itself does not say. `checkpoints`: a path or URI;
    without, a killed server loses the run. `run`: whose the checkpoints are. `evaluate`: clients evaluate too.
    """

    def __init__(
        self,
        aggregator: Rule | str | Combiner,
        *,
        f: int | None = None,
        rounds: Rounds | None = None,
        quarantine: Quarantine | None = None,
        checkpoints: str | Storage | None = None,
        run: str = "flower",
        keep: int = 2,
        weighted_by: str = "num-examples",
        weighted: bool = True,
        evaluate: bool = False,
    ) -> None:
        self._rounds = (rounds or Rounds()).validate()
        rule = parse(aggregator) if isinstance(aggregator, str) else aggregator
        if isinstance(rule, Rule):
            rule = ByRule(
                rule,
                f=f,
                answers_min=self._rounds.answers_min,
                weighted_by=weighted_by,
                weighted=weighted,
                seed=self._rounds.seed,
            )
        elif f is not None and f != rule.f:
            raise ConfigError(f"f={f} is not that of {rule}", hint="give f to the combiner alone")
        self.combiner: Combiner = rule
        self.book = ReputationBook(quarantine or Quarantine())
        self._weighted_by, self._evaluates = weighted_by, evaluate
        self._keeper: StateKeeper | None = None
        if checkpoints:
            storage = open_storage(checkpoints) if isinstance(checkpoints, str) else checkpoints
            self._keeper = StateKeeper(storage, run=run, keep=Keep(last=keep))
        self._model: Model | None = None  # of the round, for those who own the loop
        self._chosen: Choice | None = None
        few = self._rounds.clients
        if few is not None and few < rule.needed():
            said = f"{rule} needs {rule.needed()} clients, and {few} are asked in a round"
            raise ConfigError(said, hint="ask more, or choose a smaller f")

    def summary(self) -> None:
        log(INFO, "\t├── Combining: %s; at least %d clients", self.combiner, self.combiner.needed())
        late = "a round ends after %.0f s, or %.0f s after all but %d have answered"
        log(INFO, f"\t└── Waiting: {late}", self._rounds.deadline_s, self._rounds.late_s, self.combiner.f)

    # -- the loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """As Flower's own, but for `timeout`: how long a round may take is `Rounds.deadline_s`, if that is shorter."""
        self.summary()
        model = Model.of(initial_arrays)
        state = self._resumed(model, num_rounds)
        if state is None:
            state = ServerState(0, model.state, str(self.combiner))
            _measure(state.server, 0, evaluate_fn, model)
        first = state.number + 1
        for number in range(first, num_rounds + 1):
            began_s = time.monotonic()
            desk = self.open_desk(grid, number, timeout)
            self._hold(desk, state, train_config, first=number == first)
            model = Model(state.model)
            if self._evaluates:
                self._let_clients_evaluate(desk, state, evaluate_config)
            _measure(state.server, number, evaluate_fn, model)
            said = "round %d of %d took %.1f s: model %s %s"
            measured = {**state.train.get(number, {}), **state.server.get(number, {})}
            log(INFO, said, number, num_rounds, time.monotonic() - began_s, model.digest(), _words(measured))
            if self._keeper is not None:
                self._keeper.save(state, must=number == num_rounds)
        return _result(state)

    def open_desk(self, grid: Grid, number: int, within_s: float) -> GridDesk:
        """For one round; those who test with time of their own make another one."""
        return GridDesk(grid, number, self._rounds, within_s=within_s)

    def _resumed(self, model: Model, num_rounds: int) -> ServerState | None:
        if self._keeper is None:
            return None
        self._keeper.claim()
        state = self._keeper.newest()
        if state is None:
            return None
        if Model(state.model).specs != model.specs:
            raise ConfigError("the checkpoint is of another model", hint="choose another place, or the model as it was")
        if state.combiner != str(self.combiner):
            log(
                WARNING,
                "rounds up to %d were combined by %s, from now on by %s",
                state.number,
                state.combiner,
                self.combiner,
            )
            state.combiner = str(self.combiner)
        self.book.load_state_dict(state.reputation)
        self.combiner.load_state_dict(state.combining)
        log(INFO, "goes on after round %d of %d, from storage", state.number, num_rounds)
        return state

    def _hold(self, desk: GridDesk, state: ServerState, config: ConfigRecord | None, *, first: bool) -> None:
        """One round: `state` is what it was, or what the round made of it."""
        model, number = Model(state.model), desk.number
        hoped = (self._rounds.available_min or 0) if first else 0
        # Where the run goes on, some of them may be gone for good.
        hope_s = self._rounds.deadline_s if number == 1 else self._rounds.late_s
        chosen = self._choose(number, desk.available(self.combiner.needed(), hoped, hope_s))
        if len(chosen.asked) < self.combiner.needed():
            few = f"{len(chosen.asked)} clients are there, and {self.combiner} needs {self.combiner.needed()}"
            outcome = RoundOutcome(None, {}, few)
        else:
            told = ConfigRecord({**(config or {}), "server-round": number})
            outcome = self.combiner.hold(model, told, chosen.asked, desk)
        self._judge(number, outcome)
        state.number = number
        state.reputation, state.combining = self.book.state_dict(), self.combiner.state_dict()
        if outcome.model is None:
            state.left_out.append(number)
            return
        state.model = outcome.model.state
        if outcome.metrics:
            state.train[number] = dict(outcome.metrics)

    def _choose(self, number: int, there: Sequence[int]) -> Choice:
        chosen = self.book.choose(there, number, self.combiner.needed())
        if chosen.recalled:
            said = "round %d: asked although they should rest, since %d clients are needed: %s"
            log(INFO, said, number, self.combiner.needed(), _listed(chosen.recalled))
        return Choice(self._rounds.drawn(number, chosen.asked), chosen.resting, chosen.recalled)

    def _judge(self, number: int, outcome: RoundOutcome) -> None:
        """Tells what became of whom, and remembers it."""
        conducts = outcome.conducts
        for client in sorted(outcome.reasons):
            log(
                WARNING,
                "round %d without client %d, %s: %s",
                number,
                client,
                conducts[client].value,
                outcome.reasons[client],
            )
        if outcome.model is None:
            log(WARNING, "round %d is left out, and the model stays as it was: %s", number, outcome.reason)
        left_out = [client for client in sorted(conducts) if conducts[client] is Conduct.LEFT_OUT]
        trusted = sum(conduct is Conduct.TRUSTED for conduct in conducts.values())
        said = "round %d: %d of %d clients trusted; left out by the rule: %s"
        log(INFO, said, number, trusted, len(conducts), _listed(left_out))
        for sentence in self.book.count(number, conducts):
            log(WARNING, "round %d: %s", number, sentence)

    def _let_clients_evaluate(self, desk: GridDesk, state: ServerState, config: ConfigRecord | None) -> None:
        """The medians of what clients measure; a reply that cannot be used is only told."""
        chosen = self._choose(desk.number, desk.available(1))
        told = ConfigRecord({**(config or {}), "server-round": desk.number})
        content = RecordDict({ARRAYS: Model(state.model).record(), CONFIG: told})
        answers = desk.ask(
            dict.fromkeys(chosen.asked, content),
            lambda reply: read_metrics(reply, self._weighted_by)[1],
            kind=MessageType.EVALUATE,
            late=self.combiner.f,
        )
        for client, refusal in sorted(answers.refused.items()):
            log(WARNING, "evaluation of round %d without client %d: %s", desk.number, client, refusal.reason)
        if answers.good and (found := medians(answers.good)):
            state.evaluate[desk.number] = found

    # -- for others who own the loop

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._model = Model.of(arrays)
        desk = self.open_desk(grid, server_round, self._rounds.deadline_s)
        self._chosen = self._choose(server_round, desk.available(self.combiner.needed()))
        return self._messages(server_round, arrays, config, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if not isinstance(self.combiner, ByRule):
            raise ConfigError(f"{self.combiner} asks clients itself", hint="call strategy.start")
        if self._model is None or self._chosen is None:
            raise ConfigError("there are replies, and nobody was asked", hint="call configure_train first")
        model, good = self._model, dict[int, Any]()
        refused = {client: Refusal(Conduct.SILENT, "no answer") for client in self._chosen.asked}
        for reply in replies:
            client = reply.metadata.src_node_id
            if client not in refused or refused[client].conduct is not Conduct.SILENT:
                continue  # not asked, or heard already
            found = read_reply(reply, lambda content: read_update(content, model, self._weighted_by))
            if isinstance(found, Refusal):
                refused[client] = found
            else:
                good[client] = found.value
                del refused[client]
        outcome = self.combiner.combine(model, Answers(good, refused), server_round)
        self._judge(server_round, outcome)
        if outcome.model is None:
            return None, None
        return outcome.model.record(), MetricRecord(dict(outcome.metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._messages(server_round, arrays, config, MessageType.EVALUATE) if self._evaluates else []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        found = {}
        for reply in replies:
            read = read_reply(reply, lambda content: read_metrics(content, self._weighted_by)[1])
            if isinstance(read, Refusal):
                log(WARNING, "evaluation without client %d: %s", reply.metadata.src_node_id, read.reason)
            else:
                found[reply.metadata.src_node_id] = read.value
        return MetricRecord(dict(medians(found))) if found else None

    def _messages(self, number: int, arrays: ArrayRecord, config: ConfigRecord, kind: str) -> list[Message]:
        asked = self._chosen.asked if self._chosen is not None else ()
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**config, "server-round": number})})
        return [Message(content, client, kind, group_id=str(number)) for client in asked]


def _measure(server: dict[int, dict[str, float]], number: int, evaluate_fn: Evaluate | None, model: Model) -> None:
    found = evaluate_fn(number, model.record()) if evaluate_fn is not None else None
    if found:
        server[number] = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


def _result(state: ServerState) -> Result:
    named = {
        "train_metrics_clientapp": state.train,
        "evaluate_metrics_clientapp": state.evaluate,
        "evaluate_metrics_serverapp": state.server,
    }
    records = {
        name: {number: MetricRecord(dict(values)) for number, values in history.items()}
        for name, history in named.items()
    }
    return Result(arrays=Model(state.model).record(), **records)


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _listed(clients: Sequence[int]) -> str:
    named = ", ".join(str(client) for client in clients[:TOLD_MAX])
    return (named + (f" and {len(clients) - TOLD_MAX} more" if len(clients) > TOLD_MAX else "")) or "nobody"
