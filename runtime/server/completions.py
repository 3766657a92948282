"""POST /v1/completions: texts or token ids, continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from graphspec.errors import RequestError

from ..answer import Generation
from ..generate import LoadedBundle
from .errors import invalid
from .job import Job, Object, check_text, make_job
from .logprobs import ScoredToken, TokenNames, completion_logprobs, text_offsets
from .schemas import MAX_PROMPTS, CompletionBody
from .tokenizing import check_tokens

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class TextForm:
    """`text_completion` objects, streamed or not."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"
    shown_special_tokens: tuple[str, ...] = ()

    def writer(self) -> TextForm:
        return self  # nothing to remember

    def whole(self, text: str) -> Object:
        return {"text": text}

    def opening(self) -> Object | None:
        return None

    def deltas(self, text: str, *, last: bool) -> list[Object]:  # noqa: ARG002
        return [{"text": text}] if text else []

    def empty(self) -> Object:
        return {"text": ""}

    def finish_reason(self, reason: str) -> str:
        return reason

    def num_reasoning_tokens(self, _: Generation) -> int:
        return 0

    def logprobs(self, tokens: Sequence[ScoredToken], names: TokenNames) -> Object:
        return completion_logprobs(tokens, names)


def completion_job(body: CompletionBody, bundle: LoadedBundle, model: str) -> Job:
    """Encodes the prompts. Raises ApiError."""
    prompts = _prompts(body)
    try:
        encoded = [_encoded(prompt, body, bundle) for prompt in prompts]
    except RequestError as error:
        raise invalid("prompt", str(error)) from None
    job = make_job(
        body,
        TextForm(),
        bundle,
        encoded,
        model=model,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
    )
    if not body.echo:
        return job
    echoed = [prompt if isinstance(prompt, str) else bundle.tokenizer.decode(prompt) for prompt in prompts]
    asked = encoded if body.num_prompt_logprobs is not None else []
    offsets = tuple(text_offsets(bundle.tokenizer, token_ids) for token_ids in asked)
    return replace(job, echoed=tuple(echoed), prompt_offsets=offsets)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if prompt is None or prompt == []:
        raise invalid("prompt", "prompt is missing or empty: give a text, token ids, or a list of either")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt holds {len(prompt)} prompts: give at most {MAX_PROMPTS} in one request")
    return list(cast("list[str | list[int]]", prompt))


def _encoded(prompt: str | list[int], body: CompletionBody, bundle: LoadedBundle) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt, bundle, "prompt")
        return bundle.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    check_tokens(prompt, bundle, "prompt")
    return prompt
