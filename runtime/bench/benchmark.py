"""One benchmark of a loaded bundle, from prompts to report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from graphspec.errors import ConfigError

from ..generate import LoadedBundle
from ..sampling import SamplingParams
from ..width_policy import AUTO, Width
from .about import about_bundle, about_machine
from .measuring import (
    Case,
    NewRecorder,
    Progress,
    fitting,
    measure,
    num_rounds,
    plain_recorder,
    silent,
    true_answers,
)
from .prompts import Prompt
from .results import Report, report
from .synthetic import SyntheticAcceptance, TakesDrafts, synthetic_acceptance, synthetic_recorder

DEFAULT_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is run."""

    num_prompts: int = 24
    max_new_tokens: int = 128
    temperature: float = 0.0
    batches: Sequence[int] = ()
    """None given: those of DEFAULT_BATCHES that the bundle has slots for."""
    widths: Sequence[Width] = ()
    """Beside 0; none: all of the bundle, and "auto"."""
    synthetic_acceptance_rate: float | None = None
    """Of drafts that are right at this rate, in place of the bundle's own; needs an engine that TakesDrafts."""


def benchmark(
    bundle: LoadedBundle,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    dataset: str = "given",
    on_progress: Progress = silent,
) -> Report:
    """Answers the first prompts that fit, in every case. Raises ConfigError if none does or a batch is too large, or
    for a synthetic acceptance rate that cannot be had; RequestError for a width that the bundle has not."""
    about = about_machine()
    slots = bundle.engine.num_slots
    if too_large := [size for size in options.batches if size > slots]:
        raise ConfigError(f"batch {too_large[0]}: the bundle is loaded with {slots} rows")
    batches = options.batches or [size for size in DEFAULT_BATCHES if size <= slots]
    asked_widths: Sequence[Width] = options.widths or [*bundle.manifest.widths, AUTO]
    widths = {0, *map(bundle.checked_width, asked_widths)}
    asked, left_out = fitting(bundle, prompts, options.max_new_tokens, options.num_prompts)
    if not asked:
        raise ConfigError(
            f"none of {left_out} prompts fits: with an answer of {options.max_new_tokens} tokens it may have "
            f"{bundle.manifest.max_length - options.max_new_tokens}; lower --max-new-tokens, or build with a larger "
            "--max-length"
        )
    cases = sorted(Case(batch, width) for batch in set(batches) for width in widths)
    synthetic = _synthetic(bundle, options.synthetic_acceptance_rate, cases)
    params = SamplingParams(temperature=options.temperature, max_new_tokens=options.max_new_tokens)
    new_recorder: NewRecorder = plain_recorder
    if synthetic is not None:
        new_recorder = partial(
            synthetic_recorder, synthetic, true_answers(bundle, asked, max(batches), params, on_progress)
        )
    measured = measure(bundle, asked, cases, params, on_progress, new_recorder)
    categories = ", ".join(dict.fromkeys(each.prompt.category for each in asked))
    skipped = f"; {left_out} left out, too long for the bundle" if left_out else ""
    seeds = ", prompt number i with seed i" if options.temperature else ""
    settings = {
        "prompts": f"{dataset}, {len(asked)} of {categories}{skipped}",
        "answers": f"{options.max_new_tokens} tokens at most, temperature {options.temperature:g}{seeds}",
        "rounds": f"{num_rounds(len(asked), cases)}; in each, every width and batch in turn",
    }
    return report(measured, asked, about_bundle(bundle.manifest) | about | settings, synthetic)


def _synthetic(bundle: LoadedBundle, rate: float | None, cases: Iterable[Case]) -> SyntheticAcceptance | None:
    """Raises ConfigError."""
    if rate is None:
        return None
    if not isinstance(bundle.engine, TakesDrafts):
        raise ConfigError(
            f"synthetic acceptance rate {rate:g}: rows of {bundle.manifest.backend.name} keep their drafts on the GPU, "
            "where a benchmark cannot replace them; leave it out, or measure a bundle for onnxruntime"
        )
    synthetic = synthetic_acceptance(rate, [case.width for case in cases], bundle.manifest.widths[-1])
    if not synthetic.bases:
        raise ConfigError(f"synthetic acceptance rate {rate:g}: width 0 accepts nothing; name another in --widths")
    return synthetic
