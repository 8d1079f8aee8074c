"""Which lines of a script may change what does not travel to a joiner."""

from __future__ import annotations

from textwrap import dedent

from holdfast.drills.suspicion import LINES_MAX, lines_to_look_at

SCRIPT = dedent(
    """\
    import time
    import torch, holdfast
    from collections import deque
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Scheduler(optimizer)
    scale, recent = 1.0, deque()
    rng = torch.Generator().manual_seed(1)
    meter = Meter()
    run = holdfast.join(model, optimizer, data, batch_size=8, extras={"meter": meter})
    for step in run.steps(100):
        total = 0.0
        for x, y in step:
            loss = criterion(model(x), y) * scale
            total += loss
            loss.backward()
        optimizer.step()
        scheduler.step()
        meter.update(step.metrics["loss"])
        scale *= 0.99
        recent.append(step.metrics["loss"])
        noise = torch.randn(3, generator=rng)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        print(time.time())
    scale = 2.0
    """
)


def numbers(source: str) -> list[int]:
    return [int(line.partition(":")[2].partition(" ")[0]) for line in lines_to_look_at(source, "train.py")]


def test_what_the_loop_changes_and_join_was_not_given() -> None:
    assert numbers(SCRIPT) == [18, 20, 21, 22, 25]
    assert lines_to_look_at(SCRIPT, "train.py")[1] == "train.py:20 (scale *= 0.99)"


def test_what_join_was_given_is_not_looked_at() -> None:
    given = SCRIPT.replace('"meter": meter', '"meter": meter, "s": scheduler, "r": recent, "g": rng')
    assert numbers(given.replace("scale *= 0.99", "pass").replace("print(time.time())", "pass")) == [
        22
    ]  # the generator


def test_a_loop_in_a_function_is_found() -> None:
    source = "def main(average, run):\n    for step in run.epochs(3):\n        average.update(1)\n"
    assert numbers(source) == [3]


def test_a_script_that_is_none_has_no_lines() -> None:
    assert lines_to_look_at("for step in", "train.py") == [] and lines_to_look_at("", "train.py") == []


def test_lines_are_bounded() -> None:
    source = "a = 0\nfor step in run.steps(9):\n" + "    a += 1\n" * 50
    assert len(lines_to_look_at(source, "train.py")) == LINES_MAX
