"""A server on a socket over a tiny random model that has tools and think tags, for the official clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import HANGS_S, assert_at_rest, until
from tests.models.fixtures import copy_checkpoint
from tokenwright import LLM
from tokenwright.engine import FinishReason, Grammar
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.transport.guard import Policy
from tokenwright.serve.transport.server import Server
from tokenwright.serve.transport.sockets import listen

PAGES = 256
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} To call one, write <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"hot": {"type": "boolean"}, "where": {"enum": ["in", "out"]}},
    "required": ["hot", "where"],
    "additionalProperties": False,
}

LONG = {"type": "array", "items": {"type": "boolean"}, "minItems": 1900}  # longer than the context


def valid(arguments: dict[str, Any]) -> bool:
    """Whether it follows SCHEMA."""
    return (
        arguments.keys() == {"hot", "where"} and type(arguments["hot"]) is bool and arguments["where"] in ("in", "out")
    )


def aborted(generation: Any) -> bool:
    """Whether it ended because its client went away; waits until what it was sent last is read."""
    until(lambda: generation.completion().finish_reason)
    return generation.completion().finish_reason is FinishReason.ABORTED


@dataclass
class Talker:
    """A running server. url: without a path."""

    url: str
    service: Any

    @property
    def llm(self) -> LLM:
        return self.service.host.llm

    def idle(self) -> bool:
        return not self.service.running and not self.service.admission.used and not self.service.admission.waiting

    def only(self) -> Any:
        """The one generation that runs."""
        [one] = self.service._running.values()
        return one.generation

    def greedy(
        self, messages: list[dict[str, Any]], tokens: int = 8, *, grammar: Grammar | None = None, **more: Any
    ) -> str:
        """What the model answers, asked without a server."""
        params = self.llm.sampling(temperature=0.0, max_tokens=tokens, grammar=grammar)
        ids = self.llm.template.render(messages, **more).ids
        [completion] = self.llm.generate([ids], params)
        return completion.text

    @property
    def silence(self) -> Grammar | None:
        """The grammar of answers that must not call a tool."""
        return self.llm.conversations.tools.silence()

    def tokens(self, messages: list[dict[str, Any]], **more: Any) -> int:
        """The tokens of a conversation's prompt."""
        return len(self.llm.template.render(messages, **more).ids)


def make_talker(folder: Path, changes: dict[str, Any] | None = None, template: str = TEMPLATE) -> Path:
    """A checkpoint with this chat template, and a context of 2,048 tokens."""
    made = copy_checkpoint(folder / "talker", "qwen2", {"max_position_embeddings": 2048} | (changes or {}))
    (made / "chat_template.jinja").write_text(template, encoding="utf-8")
    return made


@contextmanager
def running(app: Any, service: Any, port: int = 0, *, loaded: bool = True) -> Iterator[Talker]:
    """Serve an app on a socket of its own, in a thread; ends when nothing runs any more. loaded: wait for the model."""
    listening = listen("127.0.0.1", (port,))
    server = Server(app, 5.0, lambda _: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        until(lambda: not loaded or service.host.settled.is_set())
        talker = Talker(f"http://127.0.0.1:{listening.getsockname()[1]}", service)
        yield talker
        until(talker.idle)
        if service.host.router is None:
            assert_at_rest(talker.llm)
    finally:
        server.should_exit = True
        thread.join(HANGS_S)
        listening.close()


@contextmanager
def talking(
    folder: Path | str, page: Path | None = None, name: str = "tiny", served: Served | None = None, **options: Any
) -> Iterator[Talker]:
    """Serve a checkpoint under a name. page: the folder of the page. options: of `Policy.of`."""
    host = ModelHost(name, lambda report: LLM(folder, pages=PAGES, report=report))
    app = make_app(host, Policy.of(None, **options), page, served)
    with running(app, app.state.service) as talker:
        yield talker
