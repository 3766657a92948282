"""`graphspec distill`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphspec.errors import GraphspecError

from .errors import UsageError
from .flags import Model
from .progress import bars

if TYPE_CHECKING:
    from graphspec.distill.pipeline import Distilled


def distill(
    *,
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DRAFT_DIR", help="Where the draft goes.")],
    method: Annotated[
        str,
        typer.Option("--method", metavar="eagle3|dflash|eagle|medusa", help="What kind of draft."),
    ] = "eagle3",
    draft_model_path: Annotated[
        str | None,
        typer.Option(
            "--draft-model-path",
            metavar="D",
            help="A draft of the same method that is trained on, with other data or longer; else a new one.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="F", help='Users\' messages, a {"prompt": TEXT} a line; the target answers.'),
    ] = None,
    self_synthesize: Annotated[
        int | None, typer.Option("--self-synthesize", min=1, metavar="N", help="The target makes up N messages too.")
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option("--work-dir", metavar="DIR", help="Keeps every stage, to go on there; else DRAFT_DIR.work."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Decides data and training.")] = 0,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab-size", min=1, metavar="N", help="Tokens the draft can say, by frequency; else 8192."
        ),
    ] = None,
    draft_intermediate_size: Annotated[
        int | None, typer.Option("--draft-intermediate-size", min=1, metavar="N", help="Else the target's.")
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option("--draft-layers", min=1, metavar="N", help="dflash: layers of the draft; else 2.")
    ] = None,
    anchors: Annotated[
        int | None,
        typer.Option(
            "--anchors", min=1, metavar="N", help="dflash, medusa: places taught of a text and epoch; else 64."
        ),
    ] = None,
    depth: Annotated[
        int, typer.Option("--depth", min=1, metavar="K", help="Drafts in a row that it is trained and measured for.")
    ] = 4,
    epochs: Annotated[int, typer.Option("--epochs", min=1, metavar="N", help="Passes over the data.")] = 4,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Conversations in a batch.")] = 4,
    learning_rate: Annotated[float, typer.Option("--learning-rate", metavar="X", help="At its highest.")] = 3e-4,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="float32|bfloat16",
            help="Of matrix products in training; bfloat16 is faster on CPUs with AMX.",
        ),
    ] = "float32",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=8, metavar="N", help="Tokens of an answer at most.")
    ] = 256,
    max_length: Annotated[
        int, typer.Option("--max-length", min=16, metavar="N", help="Tokens of prompt and answer at most.")
    ] = 1024,
    held_out_share: Annotated[
        float, typer.Option("--held-out-share", metavar="X", help="Conversations that are only measured on.")
    ] = 0.03,
    measured_prompts: Annotated[
        int, typer.Option("--measured-prompts", min=0, metavar="N", help="Held-out prompts for the engine at the end.")
    ] = 24,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Answers generated at once.")] = 16,
    workers: Annotated[
        int, typer.Option("--workers", min=1, metavar="N", help="Processes that generate, of one thread each.")
    ] = 1,
    threads: Annotated[
        int, typer.Option("--threads", min=1, metavar="N", help="Of training and of the measurement.")
    ] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another draft at DRAFT_DIR.")] = False,
) -> None:
    """Makes data, trains, measures; repeated after an interruption, it goes on."""
    if (data is None) == (self_synthesize is None):
        raise UsageError("give --data F, or --self-synthesize N: one of the two")
    _require_training()
    from graphspec.distill.pipeline import DistillOptions
    from graphspec.distill.pipeline import distill as run
    from graphspec.distill.recipe import DraftShape, Recipe
    from graphspec.distill.synthesis import Synthesis

    recipe = Recipe(
        epochs=epochs,
        batch_size=batch_size,
        depth=depth,
        learning_rate=learning_rate,
        precision=precision,
        seed=seed,
        anchors=anchors,
    )
    options = DistillOptions(
        method=method,
        draft=draft_model_path,
        data=data,
        conversations=self_synthesize or sys.maxsize,
        draft_vocabulary=draft_vocab_size,
        held_out_share=held_out_share,
        measured_prompts=measured_prompts,
        shape=DraftShape(intermediate=draft_intermediate_size, layers=draft_layers),
        recipe=recipe,
        synthesis=Synthesis(count=0, most_answer_tokens=max_new_tokens),
        max_length=max_length,
        rows=rows,
        workers=workers,
        threads=threads,
    )
    # Of the whole path: "." has no name.
    work = work_dir or Path(f"{os.path.abspath(out)}.work")
    with bars() as (stage, progress):
        result = run(model, out, work, options, overwrite=overwrite, on_stage=stage, on_progress=progress)
    typer.echo(_line(out, result))


def _require_training() -> None:
    """Before any work: the command's own modules import torch."""
    from graphspec.building import require_libraries

    try:
        require_libraries()
    except GraphspecError as error:
        raise type(error)(str(error).replace("[build,cpu]", "[train,cpu]")) from None


def _line(out: Path, result: Distilled) -> str:
    text = f"{out}: trained on {result.tokens:,} tokens of {result.conversations:,} conversations"
    if unused := result.asked - result.conversations - result.held_out:
        text += f" ({unused:,} of {result.asked:,} were of no use: too long or short, or repeated)"
    measured = result.measurement
    if result.estimate is None:
        return f"{text}; none was held out to measure on"
    if measured is None:
        return f"{text}; {result.estimate:.2f} tokens/step estimated on the {result.held_out:,} held out"
    return (
        f"{text}; held out ({measured.prompts} prompts, greedy, width {measured.width}): "
        f"{measured.acceptance.mean_tokens_per_step:.2f} tokens/step incl bonus, "
        f"{measured.tokens_per_second:.1f} tokens/s, {measured.plain_tokens_per_second:.1f} at width 0"
    )
