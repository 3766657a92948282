"""From a target to a trained draft: `graphspec distill`.

    bundle ─▶ conversations ─▶ features ─▶ vocabulary ─▶ training ─▶ draft ─▶ acceptance by the engine

Every stage leaves its result in the work directory, and a repeated command goes on behind the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphspec.architecture import Resolution
from graphspec.architectures.blocks.decoder import DecoderConfig
from graphspec.architectures.target import DecoderTarget
from graphspec.building import build, require_libraries, resolve_pair
from graphspec.checkpoints import fingerprint, open_checkpoint
from graphspec.errors import ConfigError, UnsupportedError
from graphspec.registry import registered

from .beginning import Beginning, begin_anew, check_depth, go_on
from .conversations import Conversation, read_conversations, split, usable
from .drafts import usual_taps
from .features import FeatureStore
from .measuring import Measurement, measure
from .messages import read_messages
from .methods import METHODS, find_method
from .padding import LENGTHS, round_up
from .places import RECORD, check_places, publish
from .plan import check_plan
from .recipe import DraftShape, Recipe
from .synthesis import Synthesis
from .training import Lesson, Progress, train
from .vocabulary import check_vocabulary_size, choose_vocabulary, coverage
from .workers import synthesise_in_workers

DEFAULT_DRAFT_VOCABULARY = 8192

OnStage = Callable[[str], None]
OnProgress = Callable[[str, int, int, str], None]
"""Called with a label, how many are done, of how many, and a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """What a distillation is asked, besides its target and where things go."""

    method: str = "eagle3"
    draft: str | None = None
    """A draft whose training goes on; None: a new one."""
    data: Path | None = None
    """Messages of users, one JSON object a line; None: the target makes them up."""
    conversations: int = 2000
    """How many to make up, or to take of `data`."""
    draft_vocabulary: int | None = None
    """Tokens that the draft can say; None: DEFAULT_DRAFT_VOCABULARY, of methods that say less than all."""
    held_out_share: float = 0.03
    measured_prompts: int = 24
    """Held-out prompts that the engine answers in the end; 0: none."""
    shape: DraftShape = field(default_factory=DraftShape)
    recipe: Recipe = field(default_factory=Recipe)
    synthesis: Synthesis = field(default_factory=lambda: Synthesis(count=0))
    max_length: int = 1024
    """Tokens of the longest conversation."""
    rows: int = 16
    """Conversations that the engine answers at once."""
    workers: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        find_method(self.method).refuse_unused(
            {
                "--draft-vocab-size": self.draft_vocabulary,
                "--draft-intermediate-size": self.shape.intermediate,
                "--draft-layers": self.shape.layers,
                "--anchors": self.recipe.anchors,
                "heads": self.shape.heads,
                "kv_heads": self.shape.kv_heads,
            }
        )
        if self.draft is not None and (self.draft_vocabulary, self.shape) != (None, DraftShape()):
            raise ConfigError(
                "--draft-model-path names a draft that has its sizes; leave out --draft-vocab-size, "
                "--draft-intermediate-size and --draft-layers"
            )
        if not 0 < self.held_out_share < 1:
            raise ConfigError(f"--held-out-share {self.held_out_share} must be above 0 and below 1")
        if self.recipe.depth >= self.max_length:
            raise ConfigError(f"--depth {self.recipe.depth}: a conversation has --max-length {self.max_length} tokens")
        if min(self.conversations, self.rows, self.workers, self.threads) < 1:
            raise ConfigError("--self-synthesize, --rows, --workers and --threads must each be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """What came out."""

    conversations: int
    tokens: int
    """Of the answers trained on."""
    coverage: float
    """Share of them that the draft's vocabulary holds."""
    held_out: int
    """Conversations that are only measured on."""
    asked: int
    """Conversations that were to be made; those missing did not fit, were too short, or only repeated themselves."""
    estimate: float | None
    """Tokens per step on the held-out conversations, as training estimates it; None: there are none."""
    measurement: Measurement | None


def distill(
    model: str,
    out: Path,
    work: Path,
    options: DistillOptions,
    *,
    overwrite: bool = False,
    on_stage: OnStage = lambda _: None,
    on_progress: OnProgress = lambda *_: None,
) -> Distilled:
    """Writes a draft for `model` to the directory `out`. Raises GraphspecError; `work` keeps what was done."""
    check_places(out, work, model=model, draft=options.draft, overwrite=overwrite)
    require_libraries()
    torch.set_num_threads(options.threads)
    pair = _trainable(model, options)
    if options.draft is not None:
        on_stage("checking the draft")  # what takes the weights to find, before hours of answers
        go_on(METHODS[options.method], pair, _target(pair, options), depth=options.recipe.depth)
    made, asked = converse(model, work, options, on_stage=on_stage, on_progress=on_progress)
    training, held_out = split(made, options.held_out_share)
    if not training:
        raise ConfigError(
            f"no conversation is left to train on: of {asked} asked for {len(made)} are of use (the others do not fit "
            f"--max-length {options.max_length}, have too short an answer, or repeat), and {len(held_out)} of those "
            f"are held out (--held-out-share {options.held_out_share:g}); give more"
        )
    on_stage("loading the target")
    lesson, begun = _lesson(pair, work, options, training, held_out)
    lesson.store.compute(lesson.target, made, _counted(on_progress, "features", len(made)))

    def show(progress: Progress) -> None:
        note = f"loss {progress.loss:.3f}"
        if progress.tokens_per_step is not None:
            note += f", held out {progress.tokens_per_step:.2f} tokens/step (estimated)"
        on_progress("training", progress.step, progress.steps, note)

    identity = _identity(pair, options, training)
    folder = work / _training_name(pair, options)
    estimate = train(lesson, options.recipe, folder, identity=identity, on_step=show)
    draft = folder / "draft"
    lesson.method.save(draft, lesson.drafter, begun.config)
    measurement = _measured(model, folder, options, held_out, on_stage)
    result = Distilled(
        conversations=len(training),
        held_out=len(held_out),
        asked=asked,
        tokens=sum(len(conversation.answer) for conversation in training),
        coverage=coverage(training, begun.kept),
        estimate=estimate,
        measurement=measurement,
    )
    (draft / RECORD).write_text(json.dumps(_record(model, options, result), indent=2) + "\n")
    publish(draft, out)
    return result


def converse(
    model: str,
    work: Path,
    options: DistillOptions,
    *,
    on_stage: OnStage = lambda _: None,
    on_progress: OnProgress = lambda *_: None,
) -> tuple[list[Conversation], int]:
    """→ the conversations worth training on, made as far as they are missing, and how many were asked for."""
    messages = () if options.data is None else read_messages(options.data)
    plan = _plan(options, messages)
    folder = work / "conversations"
    target = fingerprint(open_checkpoint(model))
    check_plan(folder, plan, model=model, target=target, max_length=options.max_length)
    done = read_conversations(folder)
    if len([c for c in done if c.index < plan.count]) < plan.count:
        on_stage("building the bundle that answers")
        bundle = work / "bundle"
        build(
            model=model,
            out=bundle,
            num_speculative_tokens=1,
            speculative_method="ngram",
            max_length=options.max_length,
            max_batch_size=options.rows,
            overwrite=bundle.exists(),
            on_stage=on_stage,
        )
        synthesise_in_workers(
            bundle,
            folder,
            plan,
            rows=options.rows,
            workers=options.workers,
            on_progress=lambda count, tokens: on_progress("conversations", count, plan.count, f"{tokens:,} tokens"),
        )
    return usable(c for c in read_conversations(folder) if c.index < plan.count), plan.count


def _plan(options: DistillOptions, messages: Sequence[str]) -> Synthesis:
    values = asdict(options.synthesis) | {"seed": options.recipe.seed, "messages": tuple(messages)}
    count = min(options.conversations, len(messages)) if messages else options.conversations
    return Synthesis(**{**values, "count": count})


def _trainable(model: str, options: DistillOptions) -> Resolution:
    """The pair, of which such drafts can be made: what can be told without weights is told before any work."""
    method, depth = options.method, options.recipe.depth
    if options.draft is not None:
        pair = resolve_pair(model, options.draft, method=method)
        if pair.architecture.drafter.name != method:
            made = pair.architecture.drafter
            raise ConfigError(f"draft '{options.draft}' is {made.label}: --method {made.name} trains it on")
        check_depth(pair, depth)
        return pair
    pair = resolve_pair(model)
    kinds = {a.drafter.name for a in registered(()) if a.target.name == pair.architecture.target.name}
    if method not in kinds:
        raise UnsupportedError(f"there is no architecture of {pair.architecture.target.label} with {method} drafts")
    size = _vocabulary_size(options, DecoderConfig.read(pair.target.config).vocabulary)
    METHODS[method].draft_config(pair.target.config, options.shape, size, depth)
    return pair


def _target(pair: Resolution, options: DistillOptions) -> DecoderTarget:
    capacity = round_up(options.max_length, LENGTHS) + options.recipe.depth + 1
    target: DecoderTarget = pair.architecture.target.load(pair.target, capacity=capacity)
    return target


def _lesson(
    pair: Resolution,
    work: Path,
    options: DistillOptions,
    training: list[Conversation],
    held_out: list[Conversation],
) -> tuple[Lesson, Beginning]:
    method, depth = METHODS[options.method], options.recipe.depth
    target = _target(pair, options)
    if options.draft is not None:
        begun = go_on(method, pair, target, depth=depth)
    else:
        size = _vocabulary_size(options, target.config.vocabulary)
        kept = choose_vocabulary(training, size, target.config.vocabulary)
        begun = begin_anew(method, pair, target, options.shape, kept, depth=depth, seed=options.recipe.seed)
    drafter = begun.drafter
    store = FeatureStore(
        work / "features",
        pair.target,
        drafter.taps,
        options.recipe.precision,
        others=usual_taps(target.config.layers) or (),
    )
    lesson = Lesson(method=method, target=target, drafter=drafter, store=store, training=training, held_out=held_out)
    return lesson, begun


def _vocabulary_size(options: DistillOptions, of_target: int) -> int:
    if "--draft-vocab-size" not in METHODS[options.method].options:
        return of_target
    size = options.draft_vocabulary or min(DEFAULT_DRAFT_VOCABULARY, of_target)
    check_vocabulary_size(size, of_target)
    return size


def _counted(on_progress: OnProgress, label: str, total: int) -> Callable[[int], None]:
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_progress(label, done, total, "")

    return count


def _identity(pair: Resolution, options: DistillOptions, training: Sequence[Conversation]) -> str:
    shape = [asdict(options.shape), options.draft_vocabulary]
    draft = [] if pair.draft is None else [fingerprint(pair.draft)]
    facts = [options.method, fingerprint(pair.target), *shape, *draft, [c.tokens for c in training]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _training_name(pair: Resolution, options: DistillOptions) -> str:
    """Of the folder of a training; one that goes on from a draft has another than that which made the draft."""
    return options.method if pair.draft is None else f"{options.method}-from-{fingerprint(pair.draft)[:8]}"


def _measured(
    model: str, folder: Path, options: DistillOptions, held_out: Sequence[Conversation], on_stage: OnStage
) -> Measurement | None:
    prompts = [conversation.prompt for conversation in held_out[: options.measured_prompts]]
    if not prompts:
        return None
    on_stage("building the bundle with the draft")
    bundle, depth = folder / "bundle", options.recipe.depth
    build(
        model=model,
        draft_model_path=folder / "draft",
        out=bundle,
        speculative_method=options.method,
        num_speculative_tokens=depth,
        max_length=options.max_length,
        max_batch_size=1,
        overwrite=bundle.exists(),
        on_stage=on_stage,
    )
    on_stage(f"answering {len(prompts)} held-out prompts")
    return measure(bundle, prompts, max_new_tokens=options.synthesis.most_answer_tokens, num_threads=options.threads)


def _record(model: str, options: DistillOptions, result: Distilled) -> dict[str, Any]:
    """What the model card needs."""
    measured = result.measurement
    return {
        "target": Path(model).name,
        "method": options.method,
        **({} if options.draft is None else {"went_on_from": Path(options.draft).name}),
        "recipe": asdict(options.recipe),
        "conversations": result.conversations,
        "answer_tokens": result.tokens,
        "vocabulary_coverage": round(result.coverage, 4),
        "estimated_tokens_per_step": None if result.estimate is None else round(result.estimate, 3),
        "measured": None
        if measured is None
        else {
            "prompts": measured.prompts,
            "width": measured.width,
            "tokens_per_second": round(measured.tokens_per_second, 2),
            "tokens_per_second_at_width_0": round(measured.plain_tokens_per_second, 2),
            **measured.acceptance.to_json(),
        },
    }
