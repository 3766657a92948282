"""What a chat template says of a model's calls and reasoning."""

from __future__ import annotations

import pytest

from graphspec.errors import ConfigError
from graphspec.runtime.answer_format import AnswerFormat, opens_thought

# As published templates say it, in Jinja's strings and outside of them.
QWEN = (
    '{{- "For each function call, return a json object with function name and arguments within <tool_call>'
    '</tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}'
)
HERMES = "<tool_call>\n{'name': <function-name>, \"arguments\": <args-dict>}\n</tool_call>"
XML = QWEN + "{{ '<tool_call>\\n<function=' + call.name }}"
LLAMA = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.' }}"""
LLAMA_IN_DOUBLE_QUOTES = LLAMA.replace('"', '\\"')
PYTHONIC = "Example Format: [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, "hermes"),
        (HERMES, "hermes"),
        (LLAMA, "llama3_json"),
        (LLAMA_IN_DOUBLE_QUOTES, "llama3_json"),
        (PYTHONIC, "pythonic"),
        (XML, None),
        (XML + QWEN, None),
        ("<tool_call>{name}\n<arg_key>", None),
        ("{{ messages[0].content }}", None),
        (None, None),
    ],
)
def test_templates_say_how_calls_are_written(template: str | None, form: str | None) -> None:
    assert AnswerFormat.of(template) == AnswerFormat(tools=form)  # type: ignore[arg-type]


def test_templates_that_take_reasoning_apart_have_it() -> None:
    assert AnswerFormat.of("{{ content.split('</think>')[-1] }}" + QWEN) == AnswerFormat(tools="hermes", reasoning=True)


def test_what_is_named_overrules_the_template() -> None:
    template = QWEN + "</think>"
    assert AnswerFormat.chosen(template) == AnswerFormat.of(template)
    assert AnswerFormat.chosen(template, tools="none", reasoning="none") == AnswerFormat()
    assert AnswerFormat.chosen(template, tools="pythonic") == AnswerFormat(tools="pythonic", reasoning=True)
    for name in ("think", "qwen3", "deepseek_r1"):
        assert AnswerFormat.chosen(None, reasoning=name) == AnswerFormat(reasoning=True)
    for wrong in ({"tools": "qwen"}, {"reasoning": "hermes"}, {"tools": ""}):
        with pytest.raises(ConfigError, match="no parser is called"):
            AnswerFormat.chosen(None, **wrong)


def test_a_prompt_may_end_in_a_thought() -> None:
    assert opens_thought("user: hm?\nassistant:<think>\n")
    assert not opens_thought("<think>\n\n</think>\n\n")


def test_only_what_is_looked_for_is_shown() -> None:
    thinking = AnswerFormat(tools="llama3_json", reasoning=True)
    assert thinking.tags(calls=True) == ("<think>", "</think>", "<|python_tag|>")
    assert thinking.tags(calls=False) == ("<think>", "</think>")
    assert AnswerFormat(tools="hermes").tags(calls=True) == ("<tool_call>", "</tool_call>")
