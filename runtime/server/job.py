"""What both completion endpoints come down to: token ids to run, and how to write down what they give."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Protocol

from ..acceptance import AcceptanceStatistics
from ..answer import Generation, Piece
from ..generate import LoadedBundle
from ..scheduler import GenerationRequest
from .errors import invalid
from .logprobs import ScoredToken, TokenNames
from .schemas import MAX_ANSWERS, GenerationBody

Object = dict[str, Any]
"""JSON."""


class Writer(Protocol):
    """Writes down one choice: whole, or as its text comes."""

    def whole(self, text: str) -> Object:
        """All of it, in a response."""
        ...

    def opening(self) -> Object | None:
        """Of a stream, before anything else of the choice."""
        ...

    def deltas(self, text: str, *, last: bool) -> list[Object]:
        """What this text adds to a choice of a stream; nothing yet, if it may be the start of something else."""
        ...

    def empty(self) -> Object:
        """A delta that adds nothing."""
        ...

    def finish_reason(self, reason: str) -> str:
        """Why it ended, when all is written."""
        ...


class Form(Protocol):
    """How an endpoint writes its answers."""

    id_prefix: str
    object_name: str
    chunk_name: str

    @property
    def shown_special_tokens(self) -> tuple[str, ...]:
        """Special tokens that are text in the answers."""
        ...

    def writer(self) -> Writer:
        """For one choice."""
        ...

    def num_reasoning_tokens(self, generation: Generation) -> int:
        """Those of the answer that its reader is told as reasoning."""
        ...

    def logprobs(self, tokens: Sequence[ScoredToken], names: TokenNames) -> Object:
        """Of the tokens of a choice, or of a part of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to run. Choice c of prompt p is number p · n + c."""

    body: GenerationBody
    form: Form
    param: str
    """The field that the prompts come from."""
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[GenerationRequest, ...]
    names: TokenNames
    echoed: tuple[str, ...] | None = None
    """What each prompt's answers begin with."""
    prompt_offsets: tuple[tuple[int, ...], ...] = ()
    """Of each prompt, where its tokens stand in what is echoed; needed where their log-probabilities are asked for."""
    id: str
    model: str
    """By the name that the client used."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_prompt_tokens(self) -> int:
        """However many answers each prompt has."""
        return sum(map(len, self.prompts))

    def echo(self, choice: int) -> str:
        """What the text of a choice begins with."""
        return "" if self.echoed is None else self.echoed[choice // self.body.num_choices]

    def response(self, generations: Sequence[Generation]) -> Object:
        """The whole answer, not streamed."""
        choices = [self._choice(index, generation) for index, generation in enumerate(generations)]
        return self.envelope(self.form.object_name, choices) | self.account(generations)

    def envelope(self, name: str, choices: Sequence[Object]) -> Object:
        """What is around the choices of a response or chunk."""
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def account(self, generations: Sequence[Generation]) -> Object:
        """Tokens used and drafts accepted, over all choices."""
        total = reduce(AcceptanceStatistics.merge, (one.acceptance for one in generations), AcceptanceStatistics())
        usage = self.usage(sum(len(one.token_ids) for one in generations))
        first_choices = generations[:: self.body.num_choices]  # a prompt counts once, however many answers it has
        usage["prompt_tokens_details"] = {"cached_tokens": sum(one.num_cached_tokens for one in first_choices)}
        usage["completion_tokens_details"] = {
            "reasoning_tokens": sum(map(self.form.num_reasoning_tokens, generations)),
            "audio_tokens": 0,
            "accepted_prediction_tokens": total.accepted,
            "rejected_prediction_tokens": total.drafted - total.accepted,
        }
        return {"usage": usage, "metrics": {"speculative_decoding": _speculation(total)}}

    def usage(self, num_completion_tokens: int) -> Object:
        """Token counts while the answers go on."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + num_completion_tokens,
        }

    def logprobs(self, choice: int, part: Generation | Piece, *, text_start: int = 0) -> Object | None:
        """Of the tokens of an answer, or a part of one that starts at this character; None: not asked for."""
        if part.logprobs is None:
            return None
        prompt, echo = choice // self.body.num_choices, self.echo(choice)
        tokens = list[ScoredToken]()
        if part.prompt_logprobs is not None:
            scored = zip(self.prompts[prompt], self.prompt_offsets[prompt], part.prompt_logprobs, strict=True)
            tokens += [
                ScoredToken(token_id=token_id, offset=min(offset, len(echo)), score=score)
                for token_id, offset, score in scored
            ]
        starts = (text_start, *part.text_ends)
        tokens += [
            ScoredToken(token_id=score.token_id, offset=len(echo) + start, score=score)
            for start, score in zip(starts, part.logprobs, strict=False)
        ]
        return self.form.logprobs(tokens, self.names)

    def _choice(self, index: int, generation: Generation) -> Object:
        writer = self.form.writer()
        choice: Object = {"index": index} | writer.whole(self.echo(index) + generation.text)
        choice |= {
            "logprobs": self.logprobs(index, generation),
            "finish_reason": writer.finish_reason(generation.finish_reason),
        }
        choice |= {"stop_reason": generation.stop_reason}
        if self.body.return_token_ids:
            prompt = self.prompts[index // self.body.num_choices]
            choice |= {"prompt_token_ids": list(prompt), "token_ids": list(generation.token_ids)}
        return choice


def make_job(
    body: GenerationBody,
    form: Form,
    bundle: LoadedBundle,
    prompts: Sequence[Sequence[int]],
    *,
    model: str,
    default_max_tokens: int | None,
    param: str,
) -> Job:
    """Checks lengths and sampling of every prompt. Raises ApiError."""
    limit, requests = bundle.manifest.max_length, list[GenerationRequest]()
    if len(prompts) * body.num_choices > MAX_ANSWERS:
        raise invalid(
            "n", f"{len(prompts)} prompts with n {body.num_choices}: give at most {MAX_ANSWERS} answers' worth"
        )
    greedy_only = "greedy" in bundle.manifest.variants
    for prompt in prompts:
        room = limit - len(prompt)
        _check_room(len(prompt), body, limit, param)
        asked = body.limit[1]
        count = asked if asked is not None else min(default_max_tokens or room, room)
        each = body.sampling(
            max_tokens=count, default_temperature=0.0 if greedy_only else 1.0, shown=form.shown_special_tokens
        )
        request = GenerationRequest(prompt=tuple(prompt), params=each[0], speculative=body.speculative is not False)
        requests += [replace(request, params=params) for params in each]
    return Job(
        body=body,
        form=form,
        param=param,
        model=model,
        prompts=tuple(map(tuple, prompts)),
        names=TokenNames(bundle.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        requests=tuple(requests),
        id=form.id_prefix + secrets.token_hex(16),
    )


def check_text(text: str, bundle: LoadedBundle, param: str) -> None:
    """Raises ApiError for a prompt that cannot fit, before its many tokens take their time and memory."""
    fewest, limit = bundle.tokenizer.fewest_tokens(text), bundle.manifest.max_length
    if fewest >= limit:
        raise invalid(
            param,
            f"the prompt has {len(text)} characters, which are {fewest} tokens at least, and this model holds {limit} "
            "for prompt and answer together",
            code="context_length_exceeded",
        )


def _check_room(num_prompt_tokens: int, body: GenerationBody, limit: int, param: str) -> None:
    name, asked = body.limit
    if num_prompt_tokens >= limit:
        raise invalid(
            param,
            f"the prompt has {num_prompt_tokens} tokens and this model holds {limit} for prompt and answer together",
            code="context_length_exceeded",
        )
    if asked is not None and num_prompt_tokens + asked > limit:
        raise invalid(
            name,
            f"the prompt has {num_prompt_tokens} tokens and {asked} are asked for: this model holds {limit} for "
            "both together",
            code="context_length_exceeded",
        )


def _speculation(total: AcceptanceStatistics) -> Object:
    """As vLLM reports it: the mean counts the bonus token, the histogram does not."""
    reached = [total.verifications, *total.accepted_per_position]
    return {
        "num_spec_steps": total.verifications,
        "num_draft_tokens": total.drafted,
        "num_accepted_draft_tokens": total.accepted,
        "num_spec_tokens": len(total.accepted_per_position),
        "mean_acceptance_length": 1 + total.acceptance_length if total.verifications else 0.0,
        "draft_acceptance_rate": total.acceptance_rate,
        "acceptance_histogram": [here - after for here, after in zip(reached, [*reached[1:], 0], strict=True)],
    }
