"""`graphspec bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphspec.errors import ConfigError

from .errors import UsageError
from .flags import RequireSignature, refuse_unhashed_signature, schedule_of
from .help import ENDS, MACHINE, OUTPUT, PROMPT, SAMPLING, SPECULATION
from .progress import bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from graphspec.runtime.bench.results import CaseResult, Report
    from graphspec.runtime.width_policy import Width


def bench(
    *,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="builtin|F",
            help="Our own prompts, or a file: Spec-Bench's question.jsonl, ShareGPT's .json.",
            rich_help_panel=PROMPT,
        ),
    ] = "builtin",
    category: Annotated[
        list[str] | None,
        typer.Option("--category", metavar="NAME", help="Prompts of it only. Repeatable.", rich_help_panel=PROMPT),
    ] = None,
    num_prompts: Annotated[
        int,
        typer.Option(
            "--num-prompts", min=1, metavar="N", help="At most, of all categories alike.", rich_help_panel=PROMPT
        ),
    ] = 24,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=2, metavar="N", help="Of each answer at most.", rich_help_panel=ENDS),
    ] = 128,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="1,2,4,8",
            help="Answers at once; else those of 1, 2, 4 and 8 that the bundle holds.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            "--widths",
            metavar="2,4,auto",
            help="Beside 0; else all of the bundle, and auto. 1:4,8:0 is one of them too: a schedule, as of run.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    synthetic_acceptance_rate: Annotated[
        float | None,
        typer.Option(
            "--synthetic-acceptance-rate",
            metavar="R",
            help="Replace the drafts by such that this share of them is accepted, from 0 to 1: what such a draft would "
            "bring. The answers stay the same.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="X", help="0: the likeliest token.", rich_help_panel=SAMPLING),
    ] = 0.0,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, metavar="N", help="As of generate.", rich_help_panel=MACHINE),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Trust the bundle's files.", rich_help_panel=MACHINE)
    ] = False,
    require_signature: RequireSignature = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="OUT.html", help="A report with plots, one file.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT.json", help="Every figure.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """A table on stdout; exit status 1 where an answer depends on the width or the batch size."""
    refuse_unhashed_signature(no_verify, require_signature)
    batches, asked_widths = _numbers("--batch", batch, least=1), _widths(widths)
    if synthetic_acceptance_rate is not None and not 0 <= synthetic_acceptance_rate <= 1:
        raise UsageError(f"--synthetic-acceptance-rate is {synthetic_acceptance_rate}: give a share from 0 to 1")
    for path in (plot, as_json):
        if path is not None and not path.parent.is_dir():  # before the minutes that it takes
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder; name a file in it")
    from graphspec.runtime.bench.benchmark import Options, benchmark
    from graphspec.runtime.bench.prompts import in_turn, read_prompts
    from graphspec.runtime.bench.report import html
    from graphspec.runtime.generate import load

    prompts = in_turn(read_prompts(dataset), category or ())
    options = Options(
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batches=batches,
        widths=asked_widths,
        synthetic_acceptance_rate=synthetic_acceptance_rate,
    )
    with bars() as (stage, progress):
        stage(f"loading {bundle}")
        with load(
            bundle,
            max_batch_size=max(batches, default=None),
            num_threads=threads,
            verify=not no_verify,
            require_signature=require_signature,
        ) as loaded:
            found = benchmark(
                loaded,
                prompts,
                options,
                dataset=Path(dataset).name,
                on_progress=lambda done, total: progress("measuring", done, total, ""),
            )
    show(found)
    if as_json is not None:
        as_json.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    if plot is not None:
        plot.write_text(html(found), encoding="utf-8")
    found.outputs.check()


def show(report: Report) -> None:
    """The report as tables and sentences on stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    for name, value in report.about.items():
        console.print(f"{name:13} {value}", markup=False)
    console.print(_cases(report))
    for case in report.cases:
        if case.width and case.batch == report.cases[0].batch:
            print(_positions(case))
    if report.categories and report.widest:
        console.print(_categories(report))
    if report.synthetic is not None:
        print(report.synthetic.sentence())
    for one in report.recommendations:
        print(one.sentence())
    if report.outputs.equal:  # else it is the error at the end
        print(report.outputs.sentence())


def _cases(report: Report) -> Table:
    """One line for each batch size and width."""
    headings = (
        "batch",
        "width",
        "tok/s",
        "speed-\nup",
        "geo.\nmean",
        "pre-\ndicted",
        "tok/step\n+ bonus",
        "with-\nout",
    )
    table = _table([*headings, "ms/\nstep", "de-\nvice", "host", "TTFT\nms"])
    for case in report.cases:
        figures = [f"{case.tokens_per_second:.1f}", f"{case.speedup:.2f}", _or_dash(case.geometric_mean_speedup)]
        figures += [_or_dash(case.predicted_speedup), f"{case.tokens_per_step:.2f}"]
        figures += [f"{case.acceptance['acceptance_length_without_bonus']:.2f}", f"{case.step_ms:.1f}"]
        figures += [_or_dash(case.device_ms, 1), _or_dash(case.host_ms, 1), f"{case.ttft_ms:.0f}"]
        is_last = case.width == report.cases[-1].width
        table.add_row(str(case.batch), str(case.width).replace(",", ",\n"), *figures, end_section=is_last)
    return table


def _positions(case: CaseResult) -> str:
    """Acceptance by position, unconditional and conditional."""
    accepted = case.acceptance
    both = zip(accepted["joint_acceptance_per_position"], accepted["conditional_acceptance_per_position"], strict=True)
    rates = ", ".join(f"p{i}={joint:.0%} ({conditional:.0%})" for i, (joint, conditional) in enumerate(both))
    return f"accepted at width {case.width}, by position (if all before it were): {rates}"


def _categories(report: Report) -> Table:
    """Each category at the fastest width that drafts, at batch 1."""
    drafting = [case for case in report.cases if case.batch == 1 and case.width]
    width = max(drafting, key=lambda case: case.tokens_per_second).width
    table = _table([f"category\nwidth {width}", "prompts", "tok/s", "speed-\nup", "tok/step\n+ bonus", "accepted"])
    for row in report.categories:
        if row.width == width:
            rate = row.acceptance["acceptance_rate"]
            figures = [
                f"{row.tokens_per_second:.1f}",
                f"{row.speedup:.2f}",
                f"{row.tokens_per_step:.2f}",
                f"{rate:.0%}",
            ]
            table.add_row(row.category, str(row.prompts), *figures)
    return table


def _table(headings: Sequence[str]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=0)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _or_dash(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _widths(text: str | None) -> list[Width]:
    """Likewise, and auto, and schedules, each from its 1:W on. Raises UsageError."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    numbers = [word for word in words if word != "auto" and ":" not in word]
    found: list[Width] = [*_numbers("--widths", ",".join(numbers) if numbers else None, least=0)]
    schedules = list[list[str]]()
    for word in words:
        if ":" in word:
            if word.startswith("1:") or not schedules:
                schedules.append([])
            schedules[-1].append(word)
    found += [schedule_of("--widths", ",".join(schedule)) for schedule in schedules]
    if "auto" in words:
        found.append("auto")
    return found


def _numbers(flag: str, text: str | None, *, least: int) -> list[int]:
    """The numbers of a list with commas; none where the flag is not given. Raises UsageError."""
    words = [] if text is None else text.split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    if len(numbers) != len(words) or any(number < least for number in numbers):
        raise UsageError(f"{flag} is {text!r}: give whole numbers from {least} with commas, such as 1,2,4")
    return numbers
