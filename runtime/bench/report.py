"""The HTML report: one file that needs no other, nor a script."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from . import svg
from .results import CaseResult, Report, WidthName
from .svg import Series


@dataclass(frozen=True, slots=True)
class _Plot:
    title: str
    note: str
    drawing: Markup
    legend: tuple[str, ...] = ()


def html(report: Report) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return template.render(report=report, plots=_plots(report))


def _plots(report: Report) -> list[_Plot]:
    batches = list(dict.fromkeys(case.batch for case in report.cases))
    widths = [case.width for case in report.cases if case.batch == batches[0]]
    found = {(case.batch, case.width): case for case in report.cases}
    per_batch = [(f"batch {batch}", [found[batch, width] for width in widths]) for batch in batches]
    telling = {0, report.widest, *(one.width for one in report.recommendations)}
    told_apart = widths if len(widths) <= svg.NUM_COLOURS else [width for width in widths if width in telling]
    plots = [_speedups(per_batch, widths), _speeds(found, batches, told_apart)]
    if report.widest:
        plots += [_predictions(per_batch), _acceptance(found[batches[0], report.widest])]
    plots.append(_milliseconds(report.cases))
    if report.categories and report.widest:
        plots.append(_by_category(report))
    return plots


def _speedups(per_batch: list[tuple[str, list[CaseResult]]], widths: list[WidthName]) -> _Plot:
    title = "Speedup by width"
    series = [Series(name, [case.speedup for case in cases]) for name, cases in per_batch]
    drawing = svg.lines(title, "width", [str(width) for width in widths], series, level=1.0)
    return _Plot(title, "Over width 0 of the same batch size (dashed).", Markup(drawing), _names(series))


def _speeds(found: dict[tuple[int, WidthName], CaseResult], batches: list[int], widths: list[WidthName]) -> _Plot:
    title = "Tokens a second by batch size"
    series = [Series(f"width {w}", [found[batch, w].tokens_per_second for batch in batches]) for w in widths]
    drawing = svg.lines(title, "batch", [str(batch) for batch in batches], series)
    return _Plot(title, "Of all rows together, after the first token of each answer.", Markup(drawing), _names(series))


def _predictions(per_batch: list[tuple[str, list[CaseResult]]]) -> _Plot:
    title = "Observed speedup against predicted"
    groups = [
        (
            name,
            [
                (case.predicted_speedup, case.speedup, f"width {case.width}")
                for case in cases
                if case.width and case.predicted_speedup is not None
            ],
        )
        for name, cases in per_batch
    ]
    drawing = svg.scatter(title, "predicted", "observed", groups)
    note = "Predicted: tokens a step × milliseconds of a step alone at width 0 / at this width. Dashed: both are equal."
    return _Plot(title, note, Markup(drawing), tuple(name for name, _ in groups))


def _acceptance(case: CaseResult) -> _Plot:
    title = f"Acceptance by position, width {case.width}"
    joint, conditional = (
        case.acceptance["joint_acceptance_per_position"],
        case.acceptance["conditional_acceptance_per_position"],
    )
    series = [Series("of all drafts there", joint), Series("where all before it were accepted", conditional)]
    drawing = svg.columns(title, "position of the draft", [str(i) for i in range(len(joint))], series)
    return _Plot(title, f"At batch {case.batch}. The first draft has position 0.", Markup(drawing), _names(series))


def _milliseconds(cases: list[CaseResult]) -> _Plot:
    title = "Milliseconds a step"
    names = [f"{case.batch} × width {case.width}" for case in cases]
    if any(case.device_ms is None for case in cases):
        series = [Series("device and host", [case.step_ms for case in cases])]
    else:
        series = [
            Series("device", [case.device_ms or 0.0 for case in cases]),
            Series("host", [case.host_ms or 0.0 for case in cases]),
        ]
    note = "By batch size and width. Verifying and drafting are one graph: the device's time is of both."
    return _Plot(title, note, Markup(svg.bars(title, names, series, unit="ms")), _names(series))


def _by_category(report: Report) -> _Plot:
    best = {one.batch: one.width for one in report.recommendations}[1] or report.widest
    rows = [row for row in report.categories if row.width == best]
    title = f"Speedup by category, width {best}"
    values = [Series("speedup", [row.speedup for row in rows])]
    drawing = svg.bars(title, [row.category for row in rows], values, unit="×", level=1.0)
    return _Plot(title, "At batch 1, over width 0 (dashed).", Markup(drawing))


def _names(series: list[Series]) -> tuple[str, ...]:
    return tuple(one.name for one in series)
