"""A server whose answers the test writes: no model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_scheduler import ScriptedScheduler
from pairs import NAMES, Pairs
from served import Served, serve

from graphspec.runtime.answer_format import AnswerFormat
from graphspec.runtime.generate import load
from graphspec.runtime.server.model import Model
from graphspec.runtime.stops import FinishReason

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }};{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}"
    "{% if m.tool_calls is defined %}+{% endif %}"
    "{% for c in m.tool_calls %}({{ c.function.name }}:{{ c.function.arguments.a }}){% endfor %}"
    "{{ m.reasoning_content }},{% endfor %}"
    "{% if thinking %}<think>{% endif %}"
)
"""In the tiny vocabulary, with a place for everything that clients send."""
ASKED = [{"role": "user", "content": "abc"}]
WEATHER = {"type": "function", "function": {"strict": True, "name": "weather"}}


class Scripted:
    """A server whose answers the test writes."""

    def __init__(self, served: Served, scheduler: ScriptedScheduler, bundle: Any) -> None:
        self.served, self.scheduler, self._bundle = served, scheduler, bundle

    def answer(self, *pieces: str, finish_reason: FinishReason = "stop") -> None:
        """From now on, every answer comes in these pieces."""
        self.scheduler.pieces, self.scheduler.finish_reason = pieces, finish_reason

    def ask(self, *pieces: str, finish_reason: FinishReason = "stop", **changes: Any) -> Any:
        """The reply to a request whose answer comes in these pieces."""
        self.answer(*pieces, finish_reason=finish_reason)
        body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 1, **changes}
        return self.served.post("/v1/chat/completions", body)

    def choice(self, *pieces: str, **changes: Any) -> Any:
        (choice,) = self.ask(*pieces, **changes).json["choices"]
        return choice

    @property
    def prompt(self) -> str:
        """Of the newest request."""
        text: str = self._bundle.tokenizer.decode(self.scheduler.tickets[-1].request.prompt)
        return text


@contextmanager
def scripted(pairs: Pairs, answers: AnswerFormat, template: str = TEMPLATE) -> Iterator[Scripted]:
    scheduler, bundle = ScriptedScheduler(), load(pairs.bundle(NAMES[1]), num_threads=1)
    bundle.tokenizer.chat_template = template
    device: Any = scheduler
    with serve(lambda _: Model(bundle=bundle, scheduler=device, answers=answers)) as served:
        yield Scripted(served, scheduler, bundle)
