"""Plots as SVG text: the page that holds them gives colours and sizes to their classes.

Drawn 360 wide, so that text is readable where a telephone shows one at its own size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 14, 12, 36
NUM_COLOURS = 6
_BAR = 17
"""Height of a horizontal bar, its gap included."""
_LABELS, _LETTER = 74, 6.8
"""Least width of the labels before horizontal bars, and of a letter in them."""
_NARROWEST_LABELLED = 20
"""Of upright bars: the labels of narrower ones would touch."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values under one name."""

    name: str
    values: Sequence[float]


def lines(
    title: str, x_label: str, names: Sequence[str], series: Sequence[Series], *, level: float | None = None
) -> str:
    """A line for each series over named, evenly spaced places; `level`: a dashed line to compare with."""
    shown = [value for one in series for value in one.values] + ([level] if level is not None else [])
    ticks = _ticks(max(shown, default=1.0))
    parts = [_grid(ticks), _x_labels(names, x_label, inset=0.5)]
    if level is not None:
        parts.append(_line(_LEFT, _y(level, ticks), _WIDTH - _RIGHT, _y(level, ticks), "level"))
    for number, one in enumerate(series):
        points = [(_x(i, len(names), 0.5), _y(value, ticks)) for i, value in enumerate(one.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line {_colour(number)}" points="{path}"/>')
        parts += [
            _dot(x, y, number, f"{one.name}, {x_label} {name}: {value:.2f}")
            for (x, y), name, value in zip(points, names, one.values, strict=True)
        ]
    return _framed(title, parts)


def scatter(
    title: str, x_label: str, y_label: str, groups: Sequence[tuple[str, Sequence[tuple[float, float, str]]]]
) -> str:
    """Points (x, y, what) in groups, from 0 in both directions, and the diagonal where both are equal."""
    ticks = _ticks(max((max(x, y) for _, points in groups for x, y, _ in points), default=1.0))
    most = ticks[-1]

    def place(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / most

    parts = [_grid(ticks), _line(place(0), _y(0, ticks), place(most), _y(most, ticks), "level")]
    parts += [_text(place(tick), _HEIGHT - _BOTTOM + 14, _number(tick), "middle") for tick in ticks]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, x_label, "middle"))
    parts.append(_text(_LEFT + 4, _TOP + 8, y_label, "start"))
    for number, (name, points) in enumerate(groups):
        parts += [_dot(place(x), _y(y, ticks), number, f"{name}, {what}: {x:.2f}, {y:.2f}") for x, y, what in points]
    return _framed(title, parts)


def columns(title: str, x_label: str, names: Sequence[str], series: Sequence[Series]) -> str:
    """Groups of upright bars of shares, from 0 to 1."""
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts = [_grid(ticks), _x_labels(names, x_label, inset=0.5)]
    space = (_WIDTH - _LEFT - _RIGHT) / max(len(names), 1)
    wide = min(space * 0.7 / max(len(series), 1), 34)
    for number, one in enumerate(series):
        for place, value in enumerate(one.values):
            x = _x(place, len(names), 0.5) + (number - len(series) / 2) * wide
            y = _y(value, ticks)
            parts.append(_rect(x, y, wide - 2, _y(0, ticks) - y, number, f"{one.name}, {names[place]}: {value:.0%}"))
            if wide >= _NARROWEST_LABELLED:
                parts.append(_text(x + wide / 2 - 1, y - 3, f"{value:.0%}", "middle", "small"))
    return _framed(title, parts)


def bars(title: str, names: Sequence[str], series: Sequence[Series], *, unit: str, level: float | None = None) -> str:
    """Horizontal bars, one for each name; those of several series stand behind one another, to be added up."""
    totals = [sum(one.values[i] for one in series) for i in range(len(names))]
    most = max([*totals, level or 0.0], default=0.0) or 1.0
    labels = max(_LABELS, 6 + _LETTER * max(map(len, names), default=0))
    room = _WIDTH - labels - 58

    def place(value: float) -> float:
        return labels + room * value / most

    parts = []
    for row, name in enumerate(names):
        y, done = _TOP + row * _BAR, 0.0
        parts.append(_text(labels - 6, y + 11, name, "end"))
        for number, one in enumerate(series):
            value = one.values[row]
            tip = f"{name}, {one.name}: {value:.2f} {unit}"
            parts.append(_rect(place(done), y, place(done + value) - place(done), _BAR - 4, number, tip))
            done += value
        parts.append(_text(place(done) + 4, y + 11, f"{done:.{2 if done < 10 else 1}f} {unit}", "start"))
    bottom = _TOP + len(names) * _BAR
    if level is not None:
        parts.append(_line(place(level), _TOP - 4, place(level), bottom, "level"))
    return _framed(title, parts, height=bottom + 6)


def _framed(title: str, parts: Sequence[str], *, height: float = _HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, about five."""
    most = most or 1.0
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(most / step * 0.999) + 1)]


def _x(place: int, count: int, inset: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + inset) / max(count - 1 + 2 * inset, 1e-9)


def _y(value: float, ticks: Sequence[float]) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / ticks[-1]


def _grid(ticks: Sequence[float]) -> str:
    rows = []
    for tick in ticks:
        rows.append(_line(_LEFT, _y(tick, ticks), _WIDTH - _RIGHT, _y(tick, ticks), "grid"))
        rows.append(_text(_LEFT - 5, _y(tick, ticks) + 4, _number(tick), "end"))
    return "\n".join(rows)


def _x_labels(names: Sequence[str], label: str, *, inset: float) -> str:
    each = [_text(_x(i, len(names), inset), _HEIGHT - _BOTTOM + 14, name, "middle") for i, name in enumerate(names)]
    return "\n".join([*each, _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, label, "middle")])


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, number: int, tip: str) -> str:
    return (
        f'<circle class="dot {_colour(number)}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(tip)}</title></circle>'
    )


def _rect(x: float, y: float, width: float, height: float, number: int, tip: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="bar {_colour(number)}" {where}><title>{escape(tip)}</title></rect>'


def _colour(number: int) -> str:
    return f"c{number % NUM_COLOURS}"


def _number(value: float) -> str:
    return f"{value:.4g}"
