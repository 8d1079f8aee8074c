"""Flower's grid in one process: the twin of the real one, with clients that are functions, and time that is not real.

Messages are Flower's own, and go through its serialization both ways, so that what a hostile client can send is what
Flower would deliver. A client that returns None does not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import tomllib
import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from holdfast.integrations.flower.model_record import Model
from tests.harness import ROOT

Client = Callable[[Message], "Message | None"]


class ScriptedGrid(Grid):
    """`late_s`: how long a client takes to answer, in the time that `sleep` makes pass."""

    def __init__(self, clients: dict[int, Client], late_s: dict[int, float] | None = None) -> None:
        self.clients = clients
        self.late_s = late_s or {}
        self.now_s = 0.0
        self.asked: list[tuple[str, int]] = []  # (round, client)
        self._replies: dict[str, tuple[float, str, dict[str, bytes]]] = {}
        self._sent = 0
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
            1,
            1,
            1,
        )  # who sends, as Flower's runtime has it

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._pushed(message) for message in messages]

    def _pushed(self, message: Message) -> str:
        self._sent += 1
        message_id, client = f"m{self._sent}", message.metadata.dst_node_id
        self.asked.append((message.metadata.group_id, client))
        came = _travelled(message)
        came.metadata.__dict__["_message_id"] = message_id
        try:
            reply = self.clients[client](came)
        except Exception as error:  # as Flower's own runtime of clients does
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"), reply_to=came)
        if reply is not None:
            contents = {key: one.deflate() for key, one in get_all_nested_objects(reply).items()}
            self._replies[message_id] = (self.now_s + self.late_s.get(client, 0.0), reply.object_id, contents)
        return message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for message_id in message_ids:
            if message_id in self._replies and self._replies[message_id][0] <= self.now_s:
                _, object_id, contents = self._replies.pop(message_id)
                found.append(_inflated(object_id, contents))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def _travelled(message: Message) -> Message:
    return _inflated(message.object_id, {key: one.deflate() for key, one in get_all_nested_objects(message).items()})


def _inflated(object_id: str, contents: dict[str, bytes]) -> Message:
    found = inflate_object_from_contents(object_id, dict(contents))
    assert isinstance(found, Message)
    return found


@contextmanager
def example_app() -> Iterator[Any]:
    """The package of examples/flower, as Flower would load it."""
    place, threads = str(ROOT / "examples" / "flower"), torch.get_num_threads()
    sys.path.insert(0, place)
    try:
        torch.set_num_threads(1)  # as the example does where it is imported first
        for name in ("client_app", "server_app", "task"):
            import_module(f"digits.{name}")
        yield import_module("digits")
    finally:
        sys.path.remove(place)
        torch.set_num_threads(threads)


def example_settings() -> dict[str, Any]:
    with (ROOT / "examples" / "flower" / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
    return found


def trained_here(
    clients: dict[int, dict[str, Any]], strategy: Any, *, rounds: int, **settings: Any
) -> list[tuple[str, float]]:
    """The example in this process, with these nodes: the model's digest and its accuracy after every round."""
    seen: list[tuple[str, float]] = []
    config = {**example_settings(), **settings}
    with example_app() as digits:
        grid = ScriptedGrid({node: example_client(digits, node, clients[node], config) for node in clients})
        model = digits.task.network(int(config["seed"]))

        def evaluate(number: int, arrays: ArrayRecord) -> None:
            model.load_state_dict(arrays.to_torch_state_dict())
            if number:
                seen.append((Model.of(arrays).digest(), digits.task.accuracy(model)))

        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds, evaluate_fn=evaluate)
    return seen


def example_client(digits: Any, node: int, config: dict[str, Any], run_config: dict[str, Any]) -> Client:
    """A client of the example, with a state of its own that stays."""
    context = Context(
        run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=run_config, series_id=1
    )
    return lambda message: digits.client_app.app(message, context)
