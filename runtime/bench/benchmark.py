"""One benchmark of a loaded bundle, from prompts to report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphspec.errors import ConfigError

from ..generate import LoadedBundle
from ..sampling import SamplingParams
from ..width_policy import AUTO, Width
from .about import about_bundle, about_machine
from .measuring import Case, Progress, fitting, measure, num_rounds, silent
from .prompts import Prompt
from .results import Report, report

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


def benchmark(
    bundle: LoadedBundle,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    dataset: str = "given",
    on_progress: Progress = silent,
) -> Report:
    """Answers the first prompts that fit, in every case. Raises ConfigError if none does or a batch is too large,
    RequestError for a width that the bundle has not."""
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
    params = SamplingParams(temperature=options.temperature, max_new_tokens=options.max_new_tokens)
    measured = measure(bundle, asked, cases, params, on_progress)
    categories = ", ".join(dict.fromkeys(each.prompt.category for each in asked))
    skipped = f"; {left_out} left out, too long for the bundle" if left_out else ""
    seeds = ", prompt number i with seed i" if options.temperature else ""
    settings = {
        "prompts": f"{dataset}, {len(asked)} of {categories}{skipped}",
        "answers": f"{options.max_new_tokens} tokens at most, temperature {options.temperature:g}{seeds}",
        "rounds": f"{num_rounds(len(asked), cases)}; in each, every width and batch in turn",
    }
    return report(measured, asked, about_bundle(bundle.manifest) | about | settings)
