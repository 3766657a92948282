"""What a user may set about speculation, and which settings exclude each other.

Field names, defaults and rules follow MAX's `SpeculativeConfig`; the methods eagle3, standalone, ngram and
medusa and the two ngram fields are ours.
"""

from __future__ import annotations

import difflib
import json
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from graphspec.errors import ConfigError
from graphspec.verify_width import (
    Count,
    VerifyWidthRange,
    adaptive_widths,
    parse_widths,
    schedule_triples,
    whole_number,
)

SpeculativeMethod = Literal["eagle", "eagle3", "mtp", "dflash", "dflash2", "dspark", "standalone", "ngram", "medusa"]
METHODS: tuple[str, ...] = get_args(SpeculativeMethod)
BLOCK_METHODS = frozenset({"dflash", "dflash2", "dspark", "medusa"})
"""Methods whose draft proposes a block of tokens in one pass."""
DEFAULT_NUM_SPECULATIVE_TOKENS: Mapping[str, int] = {
    "eagle": 2,
    "eagle3": 2,
    "mtp": 2,
    "standalone": 4,
    "ngram": 4,
}
"""K when nobody names one. A block draft is not here: its checkpoint was trained for one width."""
LONGEST_DRAFT = 128
"""The largest K: a graph holds every drafted token's pass, so what is far beyond any use would trace for hours."""
LONGEST_NGRAM = 8
METHOD_OF: Mapping[str, str] = {"ngram_min": "ngram", "ngram_max": "ngram"}
"""Settings that mean something to one method only."""
DEPENDS_ON: Mapping[str, str] = {
    "relaxed_topk": "use_relaxed_acceptance_for_thinking",
    "relaxed_delta": "use_relaxed_acceptance_for_thinking",
    "adaptive_speculative_min_batch_size": "adaptive_speculative_widths",
}
"""Settings that mean nothing unless another is set."""
_SCHEDULE_FORM = '[{"batch_start": 1, "batch_end": 8, "num_tokens": 3}, …]'
K = "num_speculative_tokens"
_BOUNDS: Mapping[str, tuple[float, float]] = {
    K: (1, LONGEST_DRAFT),
    "adaptive_speculative_min_batch_size": (1, inf),
    "num_speculative_tokens_mixed_batch": (0, inf),
    "synthetic_acceptance_rate": (0, 1),
    "relaxed_topk": (1, inf),
    "relaxed_delta": (0, 1),
}

Fraction = Annotated[float, BeforeValidator(whole_number)]


def _schedule_from_text(value: object) -> object:
    """The command line gives a schedule as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error}); write it as {_SCHEDULE_FORM}") from None
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(isinstance(item, Mapping | VerifyWidthRange) for item in cast("list[object]", value)):
        raise ValueError(f"{reprlib.repr(value)} is not a list of ranges; write it as {_SCHEDULE_FORM}")
    return value


Schedule = Annotated[tuple[VerifyWidthRange, ...], BeforeValidator(_schedule_from_text)]


class SpeculativeConfig(BaseModel):
    """Speculative decoding of one target: the method, how much to draft, and how drafts are accepted.

    Immutable. A setting that could have no effect is an error: a field counts as set when its value differs
    from its default. The constructor raises pydantic's ValidationError, `parse` and `from_file` ConfigError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    speculative_method: SpeculativeMethod | None = None
    """How drafts are made; unset, the pair decides. "eagle" covers every EAGLE generation."""
    num_speculative_tokens: Count | None = None
    """K, the tokens drafted per step. Unset: a default for methods that draft one token at a time, left to
    the draft checkpoint for block drafts."""
    num_speculative_tokens_per_batch_size: Schedule | None = None
    """How many of the K drafts are verified, by decode batch size:
    [{"batch_start": 1, "batch_end": 8, "num_tokens": 3}]. Gaps and the tail carry the previous count forward; counts
    are capped at K; a count of 0 needs an architecture with zero_draft_rows."""
    adaptive_speculative_widths: str | None = None
    """Widths a throughput controller chooses among: "1,3,5" or "all". Excludes the schedule."""
    adaptive_speculative_min_batch_size: Count = 1
    """Decode batch size below which only the widest adaptive width is used."""
    num_speculative_tokens_mixed_batch: Count | None = None
    """Drafts verified in a step that also prefills; capped at K where it is read."""
    synthetic_acceptance_rate: Fraction | None = None
    """Benchmarks only: accept drafts with a probability that makes this the mean joint acceptance."""
    use_relaxed_acceptance_for_thinking: bool = False
    """Inside a thinking section, accept a draft that is merely among the target's likely tokens."""
    relaxed_topk: Count = 10
    """Relaxed acceptance: the draft must be among this many most likely tokens."""
    relaxed_delta: Fraction = 0.6
    """Relaxed acceptance: its probability may be this much below the most likely token's."""
    use_greedy_acceptance: bool = False
    """Accept by argmax only: the smallest graph, and no sampling."""
    draft_proposal: Literal["argmax", "sampled"] = "argmax"
    """Whether drafts are the draft's most likely tokens, or are sampled and then accepted by rejection."""
    draft_head_parallelism: Literal["device0", "replica"] = "device0"
    """Where the draft's output head runs when there are several devices."""
    draft_probs_layout: Literal["device0", "replica"] = "device0"
    """Where draft probabilities live when there are several devices."""
    logit_penalties: bool = False
    """Repetition, presence and frequency penalties at every verified position."""
    ngram_min: Count = 1
    """Prompt lookup: the shortest suffix to look for, in tokens."""
    ngram_max: Count = 3
    """Prompt lookup: the longest suffix to look for, in tokens; longer ones are tried first."""

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """The config of `values`; None leaves a field at its default. ConfigError, in one line, names every
        setting that is wrong."""
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(_one_line(error)) from None

    @classmethod
    def from_file(cls, path: Path | str, section: str | None = None) -> Self:
        """The config in a .json or .toml file, or in one section (table) of it. Raises ConfigError."""
        values = _read_section(Path(path), section)
        try:
            return cls.parse(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def settings_in_file(cls, path: Path | str, section: str | None = None) -> dict[str, object]:
        """What a file sets, each value checked on its own: whether they make sense together is known when those
        of the command line and of the pair are added. Raises ConfigError."""
        values = {name: value for name, value in _read_section(Path(path), section).items() if value is not None}
        try:
            cls.model_validate(values)
        except ValidationError as error:
            # Rules about several fields have no place of their own.
            wrong = [details for details in error.errors(include_url=False) if details["loc"]]
            if wrong:
                raise ConfigError(f"{path}: {'; '.join(map(_sentence, wrong))}") from None
        return values

    @field_validator(*_BOUNDS)
    @classmethod
    def _within_bounds(cls, value: float | None, info: ValidationInfo) -> float | None:
        name = str(info.field_name)
        least, most = _BOUNDS[name]
        if value is not None and not least <= value <= most:
            allowed = f"between {least} and {most}"
            if most == inf or name == K:
                allowed = f"at least {least}" if value < least else f"at most {most}"
            hint = "; every bundle can answer without speculation: `graphspec generate --no-speculation`"
            hint = hint if name == K and value < least else ""
            raise ValueError(f"{name} must be {allowed}, got {value}{hint}")
        return value

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _usable_schedule(cls, value: Schedule | None) -> Schedule | None:
        if value is not None:
            _named("num_speculative_tokens_per_batch_size", lambda: schedule_triples(value))
        return value

    @field_validator("adaptive_speculative_widths")
    @classmethod
    def _list_of_widths(cls, value: str | None) -> str | None:
        if value is not None:
            _named("adaptive_speculative_widths", lambda: parse_widths(value))
        return value

    @model_validator(mode="after")
    def _settings_make_sense_together(self) -> Self:
        problems = [*_settings_without_effect(self), *_exclusive_settings(self), *_ngram_range(self)]
        if problems:
            raise ValueError("; ".join(problems))
        if self.num_speculative_tokens is None and self.speculative_method is not None:
            # Not marked as set: a draft checkpoint that names its own K comes before this default.
            default = DEFAULT_NUM_SPECULATIVE_TOKENS.get(self.speculative_method)
            object.__setattr__(self, K, default)
            self.model_fields_set.discard(K)
        if self.adaptive_speculative_widths is not None and self.num_speculative_tokens is not None:
            _named("adaptive_speculative_widths", lambda: self.adaptive_widths)
        return self

    @property
    def names_draft_width(self) -> bool:
        """Whether the user chose K, rather than a default."""
        return K in self.model_fields_set

    @property
    def draft_width(self) -> int:
        """K. Known for every config `complete_config` returned; ConfigError where it is not known yet."""
        if self.num_speculative_tokens is None:
            raise ConfigError(
                "num_speculative_tokens is not known: set it, or resolve the draft checkpoint that fixes it"
                if self.speculative_method
                else "num_speculative_tokens is not known: no speculative_method is set"
            )
        return self.num_speculative_tokens

    @property
    def verify_width_schedule(self) -> list[tuple[int, int, int]] | None:
        """The schedule as sorted (start, end, count) triples; None if there is none."""
        ranges = self.num_speculative_tokens_per_batch_size
        return None if ranges is None else schedule_triples(ranges)

    @property
    def adaptive_widths(self) -> tuple[int, ...] | None:
        """The widths a controller chooses among, ascending; None for a static width."""
        text = self.adaptive_speculative_widths
        return None if text is None else adaptive_widths(text, self.draft_width)

    def is_eagle(self) -> bool:
        """Whether the method is EAGLE, of any generation."""
        return self.speculative_method in ("eagle", "eagle3")

    def is_mtp(self) -> bool:
        """Whether the method is multi-token prediction."""
        return self.speculative_method == "mtp"

    def is_dflash(self) -> bool:
        """Whether the method is a DFlash block draft, of either version."""
        return self.speculative_method in ("dflash", "dflash2")

    def is_dflash2(self) -> bool:
        """Whether the method is DFlash2."""
        return self.speculative_method == "dflash2"

    def is_dspark(self) -> bool:
        """Whether the method is a DSpark block draft."""
        return self.speculative_method == "dspark"

    def is_block_draft(self) -> bool:
        """Whether the draft proposes a block of tokens in one pass."""
        return self.speculative_method in BLOCK_METHODS


def _settings_without_effect(config: SpeculativeConfig) -> list[str]:
    set_fields = [
        name
        for name, field in type(config).model_fields.items()
        if name != "speculative_method" and getattr(config, name) != field.default
    ]
    if config.speculative_method is None:
        if not set_fields:
            return []
        methods = ", ".join(METHODS)
        return [f"{', '.join(set_fields)} set without speculative_method; name one ({methods}) or drop it"]
    needed = {
        name: DEPENDS_ON[name] for name in set_fields if name in DEPENDS_ON and not getattr(config, DEPENDS_ON[name])
    }
    needed |= {
        name: f"speculative_method {METHOD_OF[name]}"
        for name in set_fields
        if METHOD_OF.get(name, config.speculative_method) != config.speculative_method
    }
    return [
        f"{name} has no effect without {needed[name]}; set that too or drop it" for name in set_fields if name in needed
    ]


def _exclusive_settings(config: SpeculativeConfig) -> list[str]:
    problems = []
    if config.adaptive_speculative_widths is not None and config.num_speculative_tokens_per_batch_size is not None:
        problems.append(
            "adaptive_speculative_widths and num_speculative_tokens_per_batch_size both choose "
            "the verify width; set only one"
        )
    acceptance_rules = {
        "draft_proposal 'sampled'": config.draft_proposal == "sampled",
        "use_relaxed_acceptance_for_thinking": config.use_relaxed_acceptance_for_thinking,
        "use_greedy_acceptance": config.use_greedy_acceptance,
        "synthetic_acceptance_rate": config.synthetic_acceptance_rate is not None,
    }
    chosen = [name for name, is_chosen in acceptance_rules.items() if is_chosen]
    if len(chosen) > 1:
        problems.append(f"{' and '.join(chosen)} each choose how drafts are accepted; set only one")
    return problems


def _ngram_range(config: SpeculativeConfig) -> list[str]:
    shortest, longest = config.ngram_min, config.ngram_max
    if 1 <= shortest <= longest <= LONGEST_NGRAM:
        return []
    return [
        f"ngram_min {shortest} and ngram_max {longest} are not a range; "
        f"it needs 1 <= ngram_min <= ngram_max <= {LONGEST_NGRAM}"
    ]


def _named(name: str, check: Callable[[], object]) -> None:
    """Puts the field in front of a message that does not know it."""
    try:
        check()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _one_line(error: ValidationError) -> str:
    return "; ".join(_sentence(details) for details in error.errors(include_url=False))


def _sentence(details: Any) -> str:
    field = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        name, inside = str(details["loc"][-1]), len(details["loc"]) > 1
        known = (VerifyWidthRange if inside else SpeculativeConfig).model_fields
        close = difflib.get_close_matches(name, known, n=1)
        return f"{field} is not a known setting; " + (f"did you mean {close[0]}?" if close else "drop it")
    if details["type"] == "missing":
        return f"{field} is missing; write it as {_SCHEDULE_FORM}"  # only the schedule has fields that must be there
    message: str = details["msg"].removeprefix("Value error, ")
    if details["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {reprlib.repr(details['input'])}"
    return message if not field or message.startswith(field) else f"{field}: {message}"


def _read_section(path: Path, section: str | None) -> dict[str, Any]:
    values = _read_mapping(path)
    if section is None:
        return values
    inner = values.get(section)
    if not isinstance(inner, dict):
        found = ", ".join(name for name, value in values.items() if isinstance(value, dict))
        raise ConfigError(f"{path} has no section {section!r}; sections in it: {found or 'none'}")
    return inner


def _read_mapping(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], object]] = {".json": json.loads, ".toml": tomllib.loads}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{path}: a config file is .json or .toml, not {path.suffix or 'without a suffix'!r}")
    try:
        values = read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # undecodable text too
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not named settings")
    return cast("dict[str, Any]", values)
