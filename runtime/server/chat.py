"""POST /v1/chat/completions: messages, through the model's chat template."""

from __future__ import annotations

from graphspec.errors import RequestError

from ..answer_format import opens_thought
from ..chat import render_chat
from ..generate import LoadedBundle
from ..tool_calls import TOOL_FORMATS
from .chat_form import ChatForm
from .errors import invalid
from .job import Job, check_text, make_job
from .messages import template_messages
from .model import Model
from .schemas import ChatBody, TokenizeBody

_OURS = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "template")


def chat_job(body: ChatBody, model: Model, name: str) -> Job:
    """Renders and encodes the messages. Raises ApiError."""
    bundle = model.bundle
    _check_tools(body, model)
    prompt = render(body, bundle)
    check_text(prompt, bundle, "messages")
    form = ChatForm(
        answers=model.answers,
        calls=bool(body.offered_tools),
        several=body.parallel_tool_calls is not False,
        thinking=model.answers.reasoning and opens_thought(prompt),
        include_reasoning=body.include_reasoning is not False,
    )
    return make_job(
        body,
        form,
        bundle,
        [_encoded(prompt, body, bundle)],
        model=name,
        default_max_tokens=None,
        param="messages",
    )


def encode_chat(body: ChatBody | TokenizeBody, bundle: LoadedBundle) -> list[int]:
    """Token ids of a chat. Raises ApiError."""
    return _encoded(render(body, bundle), body, bundle)


def render(body: ChatBody | TokenizeBody, bundle: LoadedBundle) -> str:
    """The prompt that the model's template makes of a chat. Raises ApiError."""
    if not body.messages:
        raise invalid("messages", "messages is missing or empty: give at least one")
    variables = body.chat_template_kwargs or {}
    if taken := [name for name in _OURS if name in variables]:
        raise invalid("chat_template_kwargs", f"chat_template_kwargs has {taken[0]}, which the server fills in itself")
    tokenizer = bundle.tokenizer
    if tokenizer.chat_template is None:
        raise invalid("messages", "this model has no chat template: use /v1/completions and write the whole prompt")
    try:
        return render_chat(
            tokenizer.chat_template,
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            tools=body.offered_tools,
            **variables,
        )
    except RequestError as error:
        raise invalid("messages", str(error)) from None


def _encoded(prompt: str, body: ChatBody | TokenizeBody, bundle: LoadedBundle) -> list[int]:
    try:
        # The template writes special tokens itself.
        return bundle.encode(prompt, add_special_tokens=bool(body.add_special_tokens))
    except RequestError as error:
        raise invalid("messages", str(error)) from None


def _check_tools(body: ChatBody, model: Model) -> None:
    if not body.offered_tools:
        return
    template = model.bundle.tokenizer.chat_template
    if template is not None and "tools" not in template:
        raise invalid("tools", "tools are given, and this model's chat template has no place for them: leave them out")
    if model.answers.tools is None:
        known = ", ".join(TOOL_FORMATS)
        raise invalid(
            "tools",
            "tools are given, and the server does not know how this model writes calls: it must be started with "
            f"--tool-call-parser ({known}); or leave tools out",
        )
