"""`graphspec run`."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphspec.errors import ConfigError

from .errors import UsageError
from .flags import RequireSignature, WidthFlag, refuse_unhashed_signature, width_of
from .help import MACHINE
from .progress import stages

if TYPE_CHECKING:
    from graphspec.runtime.answer_format import AnswerFormat
    from graphspec.runtime.generate import LoadedBundle
    from graphspec.runtime.width_policy import Width

NETWORK, LIMITS, ANSWERS = "Network", "Limits", "Answers to chats"
MEGABYTE = 1024 * 1024
log = logging.getLogger(__name__)


def run(
    *,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    host: Annotated[
        str, typer.Option("--host", metavar="H", help="The address to listen on.", rich_help_panel=NETWORK)
    ] = "0.0.0.0",
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65535, help="0: any free one.", rich_help_panel=NETWORK)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="What clients must send.", rich_help_panel=NETWORK),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model; else the bundle's folder. Repeatable.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", metavar="B", min=1, help="Requests in one step.", rich_help_panel=LIMITS),
    ] = None,
    max_queue_size: Annotated[
        int,
        typer.Option(
            "--max-queue-size", metavar="N", min=1, help="Requests that may wait; then 429.", rich_help_panel=LIMITS
        ),
    ] = 256,
    prefix_store_mb: Annotated[
        int | None,
        typer.Option(
            "--prefix-store-mb",
            metavar="N",
            min=0,
            help="Memory for prompts that rows held before others took them; 256 where the backend can, 0: none.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            "--request-timeout",
            metavar="S",
            min=0.001,
            help="Seconds that a request may take; its field timeout may ask for fewer.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            metavar="S",
            min=0,
            help="How long running requests may go on after SIGTERM or Ctrl-C; a second one ends them.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            "--tool-call-parser",
            metavar="hermes|llama3_json|pythonic|none",
            help="How the model writes calls of tools; else what its chat template says.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            help="Refuse to serve a model whose calls cannot be read. (Where they can, tools are always taken.)",
            rich_help_panel=ANSWERS,
        ),
    ] = False,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            "--reasoning-parser",
            metavar="think|none",
            help="Whether reasoning stands in <think> tags; else what the chat template says.",
            rich_help_panel=ANSWERS,
        ),
    ] = None,
    width: WidthFlag = None,
    no_overlap: Annotated[
        bool,
        typer.Option("--no-overlap", help="Read each step before the next is launched.", rich_help_panel=MACHINE),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="Of the backend; at most the target's key/value heads.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not hash the bundle's files.", rich_help_panel=MACHINE)
    ] = False,
    require_signature: RequireSignature = None,
) -> None:
    """Serves a bundle to OpenAI's clients until Ctrl-C or SIGTERM."""
    from graphspec.runtime.answer_format import AnswerFormat
    from graphspec.runtime.generate import load
    from graphspec.runtime.server.app import Serving
    from graphspec.runtime.server.metrics import Metrics
    from graphspec.runtime.server.model import Model, start
    from graphspec.runtime.server.serve import Address, Service

    refuse_unhashed_signature(no_verify, require_signature)
    verified = width_of(width)
    _refuse_empty("--api-key", [] if api_key is None else [api_key])
    _refuse_empty("--served-model-name", served_model_name or [])
    AnswerFormat.chosen(None, tools=tool_call_parser, reasoning=reasoning_parser)  # wrong names are told at once
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    names = served_model_name or [bundle.resolve().name]
    prefix_store = None if prefix_store_mb is None else prefix_store_mb * MEGABYTE
    metrics = Metrics(names[0])

    def opened() -> Model:
        with stages() as stage:
            stage(f"loading {bundle}")
            loaded = load(
                bundle,
                max_batch_size=max_batch_size,
                num_threads=threads,
                verify=not no_verify,
                require_signature=require_signature,
            )
        try:
            answers = AnswerFormat.chosen(
                loaded.tokenizer.chat_template, tools=tool_call_parser, reasoning=reasoning_parser
            )
            if enable_auto_tool_choice and answers.tools is None:
                raise ConfigError(
                    "--enable-auto-tool-choice: how this model writes calls is unknown; name it with --tool-call-parser"
                )
            model = start(
                loaded,
                metrics,
                max_queue_size=max_queue_size,
                overlap=not no_overlap,
                width=verified,
                answers=answers,
                request_timeout=request_timeout,
                prefix_store=prefix_store,
                say=log.info,
            )
        except BaseException:
            loaded.close()
            raise
        for line in [*_banner(loaded, names, verified), _memory(loaded, prefix_store), _parsers(answers)]:
            _say(line)
        return model

    serving = Serving(names=names, api_key=api_key, metrics=metrics)
    service = Service(serving, Address(host=host, port=port), opened, drain=drain_seconds, say=_say)
    if api_key is None and not _loopback(host):
        log.warning("Listening on %s without --api-key: whoever reaches this machine may use the model", host)
    service.run()
    if service.loading:
        # Libraries abort when the interpreter ends under them: "terminate called without an active exception".
        atexit.register(_end_at_once)


def _refuse_empty(flag: str, values: list[str]) -> None:
    """What a script makes of a variable that is not set."""
    if not all(value.strip() for value in values):
        raise UsageError(f"{flag} is empty: give one, or leave it out")


def _end_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody may read it any more
            stream.flush()
    os._exit(0)


def _banner(bundle: LoadedBundle, names: list[str], width: Width | None) -> list[str]:
    manifest = bundle.manifest
    widths = ", ".join(map(str, manifest.widths))
    return [
        f"model         {', '.join(names)}",
        f"architecture  {manifest.architecture}",
        f"backend       {manifest.backend.name} {manifest.backend.version}, {manifest.backend.device_class}",
        f"widths        {widths}; {bundle.checked_width(width)} in use",
        f"capacity      {bundle.engine.num_slots} requests of {manifest.max_length} tokens",
    ]


def _memory(bundle: LoadedBundle, prefix_store: int | None) -> str:
    from graphspec.runtime.scheduler import bytes_per_token, store_bytes

    manifest, engine = bundle.manifest, bundle.engine
    weights = sum(entry.size for name, entry in manifest.files.items() if name.startswith("weights/"))
    a_token = bytes_per_token(manifest)
    caches = a_token * manifest.capacity * engine.num_slots
    store = store_bytes(bundle, prefix_store) // MEGABYTE
    return (
        f"memory        {weights / MEGABYTE:,.0f} MB of weights; up to {caches / MEGABYTE:,.0f} MB of caches, "
        f"{a_token / 1024:,.1f} KB a token; up to {store:,} MB of prefixes"
    )


def _parsers(answers: AnswerFormat) -> str:
    return f"parsers       tool calls: {answers.tools or 'none'}; reasoning: {'think' if answers.reasoning else 'none'}"


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say(line: str) -> None:
    print(line, flush=True)
