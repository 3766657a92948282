"""How one request's tokens are drawn: its parameters, and the uniform numbers that decide its draws."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphspec.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures under this one mean argmax, as in vLLM."""
MAX_TEMPERATURE = 100.0
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Raises RequestError naming the field and what it allows."""

    temperature: float = 0.0
    """0 is argmax."""
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: another one for every request."""
    max_new_tokens: int | None = None
    """None: as many as fit."""
    min_tokens: int = 0
    """Output tokens before the first one that may stop the request."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()
    """Those that are text all the same: what calls of tools are written in."""
    stream_interval: int = 1
    """Tokens in a piece at least, but for the first and the last."""
    logprobs: int | None = None
    """How probable each token was, and this many of the most probable ones beside it; 0: the token alone."""
    prompt_logprobs: int | None = None
    """Likewise for every token of the prompt but the first. The prompt is read whole then, whatever is cached."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_integer("top_k", self.top_k, -1, MAX_COUNT)
        _check_number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        if self.max_new_tokens is not None:
            _check_integer("max_new_tokens", self.max_new_tokens, 0, MAX_COUNT)
        _check_integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}: it must be at most max_new_tokens ({self.max_new_tokens})"
            )
        # A list is what JSON and most callers have; a tuple keeps the parameters hashable.
        object.__setattr__(self, "stop", _checked_strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        _check_integer("stream_interval", self.stream_interval, 1, MAX_COUNT)
        _check_flag("ignore_eos", self.ignore_eos)
        _check_flag("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_flag("skip_special_tokens", self.skip_special_tokens)
        shown = _checked_strings("shown_special_tokens", self.shown_special_tokens)
        object.__setattr__(self, "shown_special_tokens", shown)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_integer(name, count, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax, whatever the other filters say."""
        return self.temperature < GREEDY_BELOW


def fresh_seed() -> int:
    """A seed nobody can guess, for a request that named none."""
    return secrets.randbits(64)


def uniform_table(seed: int, capacity: int, columns: int = 1) -> NDArray[np.float32]:
    """The draws of one request, f32[capacity, columns]: multiples of 2**-24 in [0, 1).

    Entry [p, c] depends on (seed, p, c) alone, so a longer or wider table holds the shorter or narrower one.
    0 <= seed < 2**64.
    """
    # Each column is its own counter-based stream: key (seed, column), counter from the start.
    streams = [np.random.Philox(key=seed | column << 64) for column in range(columns)]
    raw = np.stack([stream.random_raw(capacity) for stream in streams], axis=1)
    # 24 bits fill a float32's significand: the conversion is exact and never rounds up to 1.
    return (raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _check_number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    allowed = f"a number {'above' if above_low else 'from'} {low:g} {'and up ' if above_low else ''}to {high:g}"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}: it must be {allowed}")
    # NaN fails every comparison, so it is refused here too.
    if not (low <= value <= high) or (above_low and value == low):
        raise RequestError(f"{name} is {value!r}: it must be {allowed}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}: it must be an integer from {low} to {high}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}: it must be true or false")


def _checked_strings(name: str, value: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        shown = list(value) if isinstance(value, tuple) else value
        raise RequestError(f"{name} is {shown!r}: it must be a list of non-empty strings")
    return tuple(value)


def _checked_ids(name: str, value: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {value!r}: it must be a list of token ids")
    for item in value:
        _check_integer(f"an entry of {name}", item, 0, MAX_COUNT)
    return tuple(value)
