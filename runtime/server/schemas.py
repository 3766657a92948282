"""Request bodies: the fields that are honoured, and those that are refused because they cannot be.

Anything else is ignored, as OpenAI's own and vLLM's servers do.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, Required, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from graphspec.errors import RequestError

from ..sampling import MAX_COUNT, MAX_LOGPROBS, MAX_SEED, MAX_TEMPERATURE, SamplingParams
from .errors import ApiError, invalid

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_ANSWERS = 4096
"""Of all prompts of one request."""
MAX_STOPS = 16
MAX_STOP_TEXT = 1000
"""Characters of all stop strings: they are looked for after every step, while everyone waits."""
T = TypeVar("T", bound="Body")
Place = tuple[int | str, ...]
"""Where in a body; after the field's name may come that of an alternative of it."""


class Body(BaseModel):
    """null stands for a field that was not given, in every field."""

    # JSON has types of its own: no "5" for 5, no true for 1.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, use_attribute_docstrings=True)


class Function(TypedDict, total=False):
    """What a tool is; templates may read more than this."""

    name: Required[Annotated[str, Field(min_length=1)]]
    description: str | None
    parameters: dict[str, Any] | None
    """A JSON schema."""


class Tool(TypedDict):
    """What the model may call."""

    type: Literal["function"]
    function: Function


def _told(**rules: Any) -> Any:
    """Rules of a field that SamplingParams checks, and says better; here for the schema."""
    return Field(default=None, json_schema_extra=rules)


NonEmpty = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]
TokenId = Annotated[int, WithJsonSchema({"$ref": "#/components/schemas/TokenId"})]
"""The vocabulary is the model's."""
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": ["string", "object", "null"]},
            },
            "required": ["name"],
        }
    },
    "required": ["function"],
}
Messages = Annotated[
    list[dict[str, Any]] | None,
    WithJsonSchema(
        {
            "type": ["array", "null"],
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"type": "string"},
                    "content": {"type": ["string", "array", "null"], "items": _TEXT_PART},
                    "tool_calls": {"type": ["array", "null"], "items": _CALL},
                },
                "required": ["role"],
            },
        }
    ),
]
"""Checked where they are made ready for the template (messages.py)."""


def _as_given(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Checked, and to the letter: the template prints it."""
    check(value)
    return value


Tools = Annotated[list[Tool] | None, WrapValidator(_as_given)]


class StreamOptions(Body):
    """What a stream says besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and text completions share."""

    model: str | None = None
    temperature: float | None = _told(minimum=0, maximum=MAX_TEMPERATURE)
    top_p: float | None = _told(exclusiveMinimum=0, maximum=1)
    top_k: int | None = _told(minimum=-1, maximum=MAX_COUNT)
    min_p: float | None = _told(minimum=0, maximum=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), le=MAX_SEED)
    stop: NonEmpty | list[NonEmpty] | None = _told(maxItems=MAX_STOPS)
    stop_token_ids: list[TokenId] | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int | None = _told(minimum=0)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of log-probabilities are called token_id:5."""
    speculative: bool | None = None
    """False: every token by itself, without drafts; the text is the same."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds: then an answer ends with the text there is; one that has not begun is an error."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = _told(minimum=1)
    """Tokens in a chunk at least, but for the first and the last; a step may give several anyway."""

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens to list beside each; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likewise of the prompt's tokens."""
        return None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Tokens an answer may have, after the name of the field that says it."""
        return "max_tokens", self.max_tokens

    def sampling(
        self, *, max_tokens: int, default_temperature: float, shown: tuple[str, ...] = ()
    ) -> list[SamplingParams]:
        """One for each choice: with a seed, choice i has the i-th after it."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_TEXT:
            raise invalid("stop", f"stop is too much: at most {MAX_STOPS} strings of {MAX_STOP_TEXT} characters in all")
        try:
            return [
                SamplingParams(
                    temperature=default_temperature if self.temperature is None else self.temperature,
                    top_k=self.top_k or 0,
                    top_p=1.0 if self.top_p is None else self.top_p,
                    min_p=self.min_p or 0.0,
                    seed=None if self.seed is None else (self.seed + choice) % (MAX_SEED + 1),
                    max_new_tokens=max_tokens,
                    min_tokens=self.min_tokens or 0,
                    stop=stops,
                    stop_token_ids=tuple(self.stop_token_ids or ()),
                    ignore_eos=bool(self.ignore_eos),
                    include_stop_str_in_output=bool(self.include_stop_str_in_output),
                    skip_special_tokens=self.skip_special_tokens is not False,
                    shown_special_tokens=shown,
                    logprobs=self.num_logprobs,
                    prompt_logprobs=self.num_prompt_logprobs,
                    stream_interval=1 if self.stream_interval is None else self.stream_interval,
                )
                for choice in range(self.num_choices)
            ]
        except RequestError as error:
            # Here the library's name for it is the client's.
            message = str(error).replace("max_new_tokens", self.limit[0])
            raise invalid(self.field_of(message), message) from None

    def field_of(self, message: str, default: str | None = None) -> str | None:
        """The field that a RequestError's message is about, which is among its first words."""
        words = message.replace("max_new_tokens", self.limit[0]).split()[:4]
        return next((word for word in words if word in type(self).model_fields), default)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] | None = _told(minItems=1)
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | Literal[False] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.num_logprobs if self.echo else None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages = None
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Tools = None
    tool_choice: Literal["none", "auto"] | None = None
    """Nothing else can be honoured: that a call comes would need a grammar."""
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offered_tools(self) -> list[Tool] | None:
        """What the model is told of; None: nothing."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit


class TokenizeBody(Body):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = None
    return_token_strs: bool | None = None

    @property
    def offered_tools(self) -> list[Tool] | None:
        """What the model is told of; None: nothing."""
        return self.tools or None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


_NOTHING: tuple[Any, ...] = (False, 0, "", "none", [], {})
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"], []),
    **dict.fromkeys(
        (
            "logit_bias", "prompt_logprobs", "logits_processors", "use_beam_search",
            "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "guided_whitespace_pattern", "allowed_token_ids", "bad_words", "suffix", "truncate_prompt_tokens",
            "thinking_token_budget", "chat_template", "continue_final_message", "functions", "function_call",
            "audio", "web_search_options", "documents", "priority", "prompt_embeds",
        ),
        _NOTHING,
    ),
}  # fmt: skip
"""Fields that change the answer in ways that cannot be honoured yet, with the values that ask for nothing."""


def parse(model: type[T], content: bytes) -> T:
    """A request's body. Raises ApiError naming the field that is wrong."""
    try:
        raw = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise invalid(None, f"the body is {reprlib.repr(raw)}: it must be a JSON object")
    try:
        body = model.model_validate(raw)
    except ValidationError as error:
        raise _first(error) from None
    if isinstance(body, GenerationBody):
        _refuse(raw, body)
    return body


def _refuse(raw: Mapping[str, Any], body: GenerationBody) -> None:
    for name, harmless in REFUSED.items():
        if raw.get(name) is not None and not any(_same(raw[name], value) for value in harmless):
            raise invalid(name, f"{name} is {reprlib.repr(raw[name])}: this server cannot honour it; leave it out")
    best_of = raw.get("best_of")
    if best_of is not None and best_of != body.num_choices:
        raise invalid("best_of", f"best_of is {reprlib.repr(best_of)}: it must be n ({body.num_choices}), or left out")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is for streams: set stream to true, or leave it out")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs are listed beside logprobs: set logprobs to true, or leave it out")


def _same(value: object, other: object) -> bool:
    """As JSON has it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _first(error: ValidationError) -> ApiError:
    """Of several fields that are wrong, the first. Of a field that may be several things (a text or a list …), what
    keeps it from being the one that it comes nearest to, or all that it comes equally near to."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    field = details[0]["loc"][:1]
    firsts: dict[int | str, tuple[Place, str]] = {}
    for detail in details:
        place = detail["loc"]
        if place[:1] == field:
            firsts.setdefault(place[1] if len(place) > 1 and isinstance(place[1], str) else 0, (place, detail["msg"]))
    nearest = max((place for place, _ in firsts.values()), key=_items)
    said = dict.fromkeys(message for place, message in firsts.values() if _items(place) == _items(nearest))
    return invalid(str(field[0]) if field else None, f"{_path(nearest)}: {'; or '.join(said)}")


def _items(place: Place) -> list[int]:
    """Which item of which item of a field."""
    return [key for key in place if isinstance(key, int)]


def _path(place: Place) -> str:
    """Such as tools[0].function.name. What alternative of a field was tried is no part of it."""
    tried = len(place) > 1 and isinstance(place[1], str) and place[1] not in StreamOptions.model_fields
    inside = place[2:] if tried else place[1:]
    return "".join([*map(str, place[:1]), *(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inside)])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
