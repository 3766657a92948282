from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from graphspec.errors import RequestError
from graphspec.runtime.chat import render_chat

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

TOOLS = """{{- bos_token }}
{%- if not messages %}{{ raise_exception('no messages') }}{% endif %}
{%- set ns = namespace(calls=0) %}
{%- if tools is not none %}
    {%- for tool in tools %}
        {%- if tool.hidden %}{% continue %}{% endif %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.content is defined %}{{- message.role ~ ': ' ~ message.content ~ eos_token }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set ns.calls = ns.calls + 1 %}
        {{- call.function.name ~ '(' ~ (call.function.arguments | tojson) ~ ')' }}
    {%- endfor %}
    {%- if message.role == 'assistant' %}
        {%- generation %}[{{ ns.calls }}]{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if documents is none %}{{ '(no documents)' }}{% endif %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
{%- if enable_thinking is false %}{{ '</think>' }}{% endif %}
"""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "wetter", "description": "<b>Größe & 'Grad'</b> 世界", "parameters": {"z": 1, "a": []}},
}
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln <&>", "tage": 2}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "  Wie warm ist es in Köln? 😀 <|im_end|>\n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "21°"},
    {"role": "assistant", "content": "21 Grad."},
    {"role": "stop", "content": "never seen"},
]


def transformers_rendering(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """As PreTrainedTokenizerBase.apply_chat_template does it, which first drops a message's null fields."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return str(render_jinja_template([present], chat_template=template, **variables)[0][0])


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("system", [True, False])
def test_a_chatml_template_renders_as_in_transformers(add_generation_prompt: bool, system: bool) -> None:
    messages = [{"role": "system", "content": "Sei kurz."}] if system else []
    messages += [{"role": "user", "content": " Hallo\n\n"}, {"role": "assistant", "content": "<ja> & 世界"}]
    text = render_chat(CHATML, messages, add_generation_prompt=add_generation_prompt)
    assert text == transformers_rendering(CHATML, messages, add_generation_prompt=add_generation_prompt)
    assert text.endswith("<|im_start|>assistant\n") is add_generation_prompt


@pytest.mark.parametrize("tools", [None, [], [TOOL, {"hidden": True}, TOOL]])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_a_template_with_tools_renders_as_in_transformers(
    tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> None:
    text = render_chat(TOOLS, CONVERSATION, tools=tools, bos_token="<s>", eos_token="</s>", **variables)
    assert text == transformers_rendering(
        TOOLS,
        CONVERSATION,
        tools=tools,
        bos_token="<s>",
        eos_token="</s>",
        add_generation_prompt=True,
        **variables,
    )
    assert 'wetter({"ort": "Köln <&>", "tage": 2})' in text
    assert "never seen" not in text


def test_a_null_field_of_a_message_is_as_if_it_were_missing() -> None:
    template = "{% for m in messages %}{{ m.content }}|{{ 'content' in m }}{% endfor %}"
    assert render_chat(template, [{"role": "assistant", "content": None}]) == "|False"


def test_rendering_leaves_the_messages_as_they_were() -> None:
    messages = [{"role": "user", "content": None}]
    render_chat(CHATML.replace("message['content'] | trim", "''"), messages)
    assert messages == [{"role": "user", "content": None}]


def test_strftime_now_is_the_date_of_today() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", []) in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize("template", [None, ""])
def test_without_a_template_the_error_says_what_to_do(template: str | None) -> None:
    with pytest.raises(RequestError, match="no chat template: use --raw"):
        render_chat(template, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].tool_calls.name }}", "has no attribute 'tool_calls'"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{{ messages[0].role + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages[0].missing | tojson }}", "not JSON serializable"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "[Rr]ange"),
        ("{{ 'a' | no_such_filter }}", "no_such_filter"),
    ],
)
def test_a_template_that_fails_is_a_request_error_on_one_line(template: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        render_chat(template, [{"role": "user"}])
    assert "chat template" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_refusal_by_the_template_says_so() -> None:
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: no messages$"):
        render_chat(TOOLS, [])


def test_a_template_that_does_not_parse_is_an_error_with_its_line() -> None:
    with pytest.raises(RequestError, match=r"not valid Jinja \(line 2\)"):
        render_chat("fine\n{% if %}", [])


@pytest.mark.parametrize(
    "messages", ["", "hello", 5, None, {"role": "user", "content": "x"}, ["hello"], [{}, 5]], ids=str
)
def test_messages_of_other_types_are_refused_with_an_example(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"the messages are .*: give a list such as \[{"):
        render_chat("{{ messages }}", messages)
