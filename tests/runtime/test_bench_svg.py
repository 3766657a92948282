"""Plots: where their marks stand."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from graphspec.runtime.bench import svg
from graphspec.runtime.bench.svg import Series


def marks(drawing: str, tag: str, kind: str) -> list[dict[str, str]]:
    return [e.attrib for e in ElementTree.fromstring(drawing).iter(tag) if kind in e.get("class", "").split()]


def test_bars_are_as_long_as_their_values() -> None:
    drawing = svg.bars("t", ["a", "b"], [Series("x", [1.0, 3.0]), Series("y", [1.0, 0.5])], unit="ms")
    widths = [float(mark["width"]) for mark in marks(drawing, "rect", "bar")]
    unit = widths[0]
    assert widths == pytest.approx([unit, unit, 3 * unit, unit / 2], abs=0.2)
    second = marks(drawing, "rect", "c1")
    assert float(second[0]["x"]) == pytest.approx(float(marks(drawing, "rect", "c0")[0]["x"]) + unit, abs=0.2)


def test_names_before_bars_are_not_cut_off() -> None:
    name = "16 × width 1:4,8:2,16:0"
    drawing = svg.bars("t", [name, "b"], [Series("x", [1.0, 3.0])], unit="ms")
    (text,) = (e for e in ElementTree.fromstring(drawing).iter("text") if e.text == name)
    assert float(text.attrib["x"]) > 6 * len(name), "of 11 pixels a letter has six"


def test_equal_predictions_stand_on_the_diagonal() -> None:
    drawing = svg.scatter("t", "predicted", "observed", [("b", [(0.5, 0.5, "p"), (2.0, 2.0, "q"), (1.0, 2.0, "r")])])
    (line,) = marks(drawing, "line", "level")
    slope = (float(line["y2"]) - float(line["y1"])) / (float(line["x2"]) - float(line["x1"]))
    above = []
    for dot in marks(drawing, "circle", "dot"):
        on_line = float(line["y1"]) + slope * (float(dot["cx"]) - float(line["x1"]))
        above.append(on_line - float(dot["cy"]))
    assert above[:2] == pytest.approx([0, 0], abs=0.2)
    assert above[2] > 20


def test_a_line_goes_through_its_values_and_the_level_lies_where_it_should() -> None:
    drawing = svg.lines("t", "width", ["0", "2"], [Series("a", [1.0, 2.0]), Series("b", [1.0, 0.0])], level=1.0)
    (level,) = marks(drawing, "line", "level")
    first, second = marks(drawing, "circle", "c0"), marks(drawing, "circle", "c1")
    assert float(first[0]["cy"]) == float(second[0]["cy"]) == float(level["y1"])
    assert float(first[1]["cy"]) - float(level["y1"]) == pytest.approx(
        float(level["y1"]) - float(second[1]["cy"]), abs=0.2
    )
    assert float(first[1]["cy"]) < float(level["y1"]) - 20


def test_columns_stand_on_the_axis() -> None:
    drawing = svg.columns("t", "position", ["0", "1"], [Series("a", [1.0, 0.25]), Series("b", [0.5, 0.0])])
    heights = [float(mark["height"]) for mark in marks(drawing, "rect", "bar")]
    assert heights == pytest.approx([heights[0], heights[0] / 4, heights[0] / 2, 0], abs=0.2)
    feet = {round(float(mark["y"]) + float(mark["height"])) for mark in marks(drawing, "rect", "bar")}
    assert len(feet) == 1


def test_names_are_text_and_values_of_nothing_are_drawn() -> None:
    drawing = svg.bars("<t>", ["<a>"], [Series("&", [0.0])], unit="ms")
    assert "<a>" in [element.text for element in ElementTree.fromstring(drawing).iter("text")]
    for empty in (svg.lines("t", "x", ["0"], [Series("a", [0.0])]), svg.scatter("t", "x", "y", [])):
        ElementTree.fromstring(empty)
