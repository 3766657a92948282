"""What callers may hand to `generate`, checked where it comes in: a wrong type is told in a line, not deep inside."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import cast

from graphspec.errors import RequestError

from .sampling import SamplingParams

_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Iterable, and no lists of prompts or of token ids all the same."""


def checked_prompts(prompts: object) -> list[str | tuple[int, ...]]:
    """One text, or any iterable of texts and of token ids (integers of any library). Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"the prompts are {reprlib.repr(prompts)}: give a text, or a list of texts and token ids")
    return [_checked_prompt(prompt) for prompt in cast("Iterable[object]", prompts)]


def checked_params(params: object, count: int) -> list[SamplingParams]:
    """`count` sets: one for all of the prompts, one for each, or the default. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Sequence) and not isinstance(params, str) else [params]
    if wrong := [one for one in each if not isinstance(one, SamplingParams)]:
        raise RequestError(
            f"the sampling parameters are {reprlib.repr(wrong[0])}: give SamplingParams, or a list of them"
        )
    if len(each) != count:
        raise RequestError(f"{count} prompts and {len(each)} sets of sampling parameters; give one or as many")
    return cast("list[SamplingParams]", each)


def check_count(name: str, value: object) -> None:
    """RequestError unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name} is {reprlib.repr(value)}; it must be an integer of at least 1")


def _checked_prompt(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    try:
        if _is_list(prompt):
            return tuple(operator.index(token) for token in cast("Iterable[int]", prompt))
    except TypeError:
        pass
    hint = "; one prompt of token ids is a list in a list" if isinstance(prompt, int) else ""
    raise RequestError(f"a prompt is {reprlib.repr(prompt)}: it must be a text or a list of token ids{hint}")


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, _NO_LISTS)
