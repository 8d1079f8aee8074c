"""What a function of a notebook's cells becomes, without a notebook: cells are kept as IPython keeps them."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.launching.session_source import written_of


class Session:
    """Cells that are run one after the other, in one namespace."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._paths: list[str] = []

    def run(self, text: str) -> None:
        path = f"<cell {len(self._paths)} of {id(self)}>"
        self._paths.append(path)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        exec(compile(text, path, "exec", dont_inherit=True), self.names)

    def again(self, name: str) -> Any:
        """The function as a worker would have it."""
        written = written_of(self.names[name])
        names: dict[str, Any] = {"__name__": "__main__", "value": written.values.__getitem__}
        exec(compile(written.text(), "<written>", "exec", dont_inherit=True), names)
        return names[name]


@pytest.fixture
def session() -> Any:
    session = Session()
    yield session
    for path in session._paths:
        linecache.cache.pop(path)


def test_it_comes_with_what_it_needs_and_nothing_else(session: Session) -> None:
    session.run("import math\nimport os.path as paths\nfrom collections import OrderedDict as Ordered\nsecret = open")
    session.run("factor = 3\nnames = ['a', 'b']\nnan = float('nan')")
    session.run("def twice(x):\n    return x * two()\n\ndef two():\n    return 2")
    session.run("class Base:\n    scale = factor")
    session.run("class Model(Base):\n    def go(self, x):\n        return twice(x) * self.scale")
    session.run(
        "def train(x, mark=names):\n"
        "    unused = [secret_name for secret_name in mark]\n"
        "    return Model().go(x), math.floor(2.5), paths.basename('a/b'), Ordered(a=1)['a'], nan != nan, unused"
    )
    assert session.again("train")(5) == session.names["train"](5) == (30, 2, "b", 1, True, ["a", "b"])
    assert "secret = " not in written_of(session.names["train"]).text()


def test_the_newest_definition_counts(session: Session) -> None:
    session.run("def step():\n    return 1\n\ndef train():\n    return step()")
    session.run("def step():\n    return 2")
    assert session.again("train")() == 2


def test_decorators_dataclasses_and_recursion(session: Session) -> None:
    session.run("from dataclasses import dataclass\nimport functools")
    session.run("@dataclass\nclass Config:\n    width: int = 4\n")
    session.run(
        "def loud(fn):\n    @functools.wraps(fn)\n    def inner(*words):\n        return fn(*words) + 1\n"
        "    return inner"
    )
    session.run("def even(n):\n    return n == 0 or odd(n - 1)\n\ndef odd(n):\n    return n != 0 and even(n - 1)")
    session.run("@loud\ndef train(n):\n    return Config().width + even(n)")
    assert session.again("train")(4) == 6


def test_tensors_go_as_data(session: Session) -> None:
    session.names["weights"] = torch.arange(6.0).reshape(2, 3)
    session.run("def train():\n    return weights.sum().item()")
    assert session.again("train")() == 15.0
    assert list(written_of(session.names["train"]).values) == ["weights"]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("model = torch.nn.Linear(2, 2)\ndef train():\n    return model", "train uses model, a Linear of this session"),
        (
            "def inner():\n    return files\nfiles = open('/dev/null')\ndef train():\n    inner()",
            "inner uses files, a ",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(session: Session, cell: str, said: str) -> None:
    session.names["torch"] = torch
    session.run(cell)
    try:
        with pytest.raises(ConfigError, match=said) as caught:
            written_of(session.names["train"])
    finally:
        getattr(session.names.get("files"), "close", lambda: None)()
    assert "make it inside" in caught.value.hint


def test_a_session_that_keeps_no_source_is_told(session: Session) -> None:
    exec(compile("def train():\n    return 1", "<stdin>", "exec"), session.names)
    with pytest.raises(ConfigError, match="the source of train is not kept by this session"):
        written_of(session.names["train"])
