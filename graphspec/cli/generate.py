"""`graphspec generate`."""

from __future__ import annotations

import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .answers import Answer, Writer, as_object, totals, write_json
from .errors import UsageError
from .flags import RequireSignature, WidthFlag, refuse_unhashed_signature, width_of
from .help import ENDS, MACHINE, OUTPUT, PROMPT, SAMPLING, SPECULATION
from .progress import stages
from .prompts import prompt_ids, read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphspec.runtime.answer import Piece


def generate(
    *,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="A prompt; - reads stdin. Repeatable: a batch.", rich_help_panel=PROMPT
        ),
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt-file",
            metavar="F",
            help="A UTF-8 file with a prompt; - reads stdin. Repeatable.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Through the chat template or not; else they do if there is one.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="The chat's system message.", rich_help_panel=PROMPT),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="X", help="0: the likeliest token.", rich_help_panel=SAMPLING),
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", help="The N likeliest tokens; 0: all.", rich_help_panel=SAMPLING)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", metavar="X", help="The likeliest tokens that make up this share.", rich_help_panel=SAMPLING
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", metavar="X", help="Tokens at least X times as likely as the likeliest.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Else a new one each time.", rich_help_panel=SAMPLING)
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", metavar="N", help="Or fewer, where the bundle ends.", rich_help_panel=ENDS),
    ] = 256,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", metavar="N", help="Nothing stops before.", rich_help_panel=ENDS)
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Ends before this text. Repeatable.", rich_help_panel=ENDS),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", metavar="ID", help="Ends at it. Repeatable.", rich_help_panel=ENDS),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.", rich_help_panel=ENDS)
    ] = False,
    width: WidthFlag = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="The same as --width 0.", rich_help_panel=SPECULATION)
    ] = False,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max-batch-size",
            min=1,
            metavar="B",
            help="Prompts in a step; else the bundle's.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            help="At most the fewer of this machine's cores and the target's key/value heads: with more, an "
            "answer would depend on what shares its steps. Else that many.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Trust the bundle's files.", rich_help_panel=MACHINE)
    ] = False,
    require_signature: RequireSignature = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="When all is done, print one line of JSON on stdout, and nothing else there.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Text on stdout as it is made; acceptance and speed on stderr."""
    if no_speculation and width is not None:
        raise UsageError("--no-speculation is --width 0: give one of the two")
    verified = 0 if no_speculation else width_of(width)
    refuse_unhashed_signature(no_verify, require_signature)
    prompts = read_prompts(prompt or (), prompt_file or ())
    started = time.monotonic()
    from graphspec.runtime.generate import load
    from graphspec.runtime.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    with stages() as stage:
        stage(f"loading {bundle}")
        loaded = load(
            bundle,
            max_batch_size=max_batch_size,
            num_threads=threads,
            verify=not no_verify,
            require_signature=require_signature,
        )
    with loaded:
        load_seconds = time.monotonic() - started
        asked = [prompt_ids(loaded, text, chat=chat, system=system) for text in prompts]
        writer = None if as_json else Writer(len(prompts))
        answers = _answers(loaded.stream(asked, params, width=verified), len(asked), writer)
    if as_json:
        objects = [as_object(answer, load_seconds) for answer in answers]
        write_json(objects[0] if len(objects) == 1 else objects)
        return
    for line in totals(answers, verified if isinstance(verified, int) else loaded.manifest.widths[-1]):
        print(line, file=sys.stderr)


def _answers(pieces: Iterator[Piece], count: int, writer: Writer | None) -> list[Answer]:
    """Runs the prompts to their ends, and gives each piece of text to the writer."""
    answers = [Answer(started=time.monotonic()) for _ in range(count)]
    with stages() as stage:
        stage("reading prompts")
        first = next(pieces)
    try:
        for piece in chain([first], pieces):
            answers[piece.index].take(piece)
            if writer is not None:
                writer.take(piece)
    finally:
        if writer is not None:
            writer.end()
    return answers
