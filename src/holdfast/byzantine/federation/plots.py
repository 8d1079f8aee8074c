"""Accuracy over rounds as a PNG: one panel for each attack, one line for each aggregator. Drawn with Pillow."""

from __future__ import annotations

from pathlib import Path

from holdfast.byzantine.federation.choices import Choices
from holdfast.core.errors import ConfigError

PANEL_WIDTH, PANEL_HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 34, 28
LEGEND_LINE = 18
COLUMNS_MAX = 4
# Told apart also by who sees few colours, and by dashes where they come round again.
COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#8c8c00")


def draw(choices: Choices, path: Path) -> None:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ConfigError("--plot needs Pillow", hint="pip install 'holdfast[federate]'") from None
    columns = min(COLUMNS_MAX, len(choices.attacks))
    rows = -(-len(choices.attacks) // columns)
    per_line = max(1, columns * PANEL_WIDTH // 200)
    legend = LEGEND_LINE * -(-len(choices.aggregators) // per_line) + 30
    image = Image.new("RGB", (columns * PANEL_WIDTH, rows * PANEL_HEIGHT + legend), "white")
    pen = ImageDraw.Draw(image)
    about = choices.settings
    spread = "alike" if about.dirichlet is None else f"Dirichlet {about.dirichlet:g}"
    pen.text(
        (LEFT, 8),
        f"{choices.data}, {about.clients} clients, {about.byzantine} hostile, data {spread}: accuracy over rounds",
        fill="black",
    )
    for number, aggregator in enumerate(choices.aggregators):
        x, y = LEFT + number % per_line * 200, 28 + number // per_line * LEGEND_LINE
        _line(pen, [(x, y + 6), (x + 24, y + 6)], number)
        pen.text((x + 30, y), aggregator, fill="black")
    for number, attack in enumerate(choices.attacks):
        at = (number % columns * PANEL_WIDTH, legend + number // columns * PANEL_HEIGHT)
        _panel(pen, choices, attack, at)
    unfinished = path.with_name(path.name + ".tmp")
    image.save(unfinished, format="PNG")
    unfinished.replace(path)


def _panel(pen, choices: Choices, attack: str, at: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    left, right = at[0] + LEFT, at[0] + PANEL_WIDTH - RIGHT
    top, bottom = at[1] + TOP, at[1] + PANEL_HEIGHT - BOTTOM
    pen.text((left, at[1] + 14), attack, fill="black")
    for tick in range(0, 101, 25):
        y = bottom - (bottom - top) * tick / 100
        pen.line([(left, y), (right, y)], fill="#dddddd")
        pen.text((at[0] + 8, y - 6), f"{tick} %", fill="#555555")
    rounds = choices.settings.rounds
    for tick in sorted({0, rounds // 2, rounds}):
        x = left + (right - left) * tick / max(1, rounds)
        pen.text((x - 8, bottom + 6), str(tick), fill="#555555")
    for number, aggregator in enumerate(choices.aggregators):
        curve = choices.curve(aggregator, attack)
        points = [
            (left + (right - left) * (index + 1) / max(1, rounds), bottom - (bottom - top) * value)
            for index, value in enumerate(curve)
        ]
        if len(points) > 1:
            _line(pen, points, number)


def _line(pen, points: list[tuple[float, float]], number: int) -> None:  # type: ignore[no-untyped-def]
    colour, turn = COLOURS[number % len(COLOURS)], number // len(COLOURS)
    if turn == 0:
        pen.line(points, fill=colour, width=2)
        return
    for index in range(0, len(points) - 1, 2 + turn):  # dashes
        pen.line(points[index : index + 2], fill=colour, width=2)
