"""A server on a socket in a thread of this process, so that tests reach into its engine; a small model that chats."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.invariants import check_invariants
from tests.engines import until
from tests.models.fixtures import copy_checkpoint
from tokenwright import LLM
from tokenwright.engine import Engine, Event
from tokenwright.serve.app import Served, make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.service.service import Service
from tokenwright.serve.transport.guard import Policy
from tokenwright.serve.transport.server import Server
from tokenwright.serve.transport.sockets import listen

HANGS = 60.0  # seconds; only a hang takes so long

# In the manner of Qwen3: tools in the system message, calls between tags, and thoughts.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>{"name", "arguments"}</tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def make_chat_model(folder: Path) -> Path:
    """A random model of 4 layers with TEMPLATE and a context of 2,048 tokens."""
    made = copy_checkpoint(folder, "qwen2", {"max_position_embeddings": 2048})
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return made


class Live:
    """A server that listens. `service` is its service, `url` its address."""

    def __init__(
        self, model: Path, *, policy: Callable[[str], Policy] | None = None, served: Any = None, **options: Any
    ):
        self.host = ModelHost("tiny", lambda report: LLM(model, report=report, **options))
        listener = listen("127.0.0.1", (0,))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.url = f"http://{self.address}"
        allowed = Policy.of([self.address]) if policy is None else policy(self.address)
        self.app = make_app(self.host, allowed, None, served or Served(["tiny", "alias"]))
        self.service: Service = self.app.state.service
        self.said: list[str] = []
        self.server = Server(self.app, 5.0, self.said.append)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, args=([listener],), name="server", daemon=True)
        self.thread.start()
        assert self.host.settled.wait(HANGS)

    def _run(self, sockets: list[Any]) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.server.serve(sockets))

    @property
    def llm(self) -> LLM:
        return self.host.llm

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(HANGS)
        assert not self.thread.is_alive(), "the server does not end"


def routes(app: Any) -> list[tuple[str, str]]:
    """Every route of an app, with each of its methods, and some value for each parameter of its path."""
    found = []
    for route in app.routes:
        path = re.sub(r"{[^}]+}", lambda one: {"{step}": "0", "{challenge}": "loop"}.get(one[0], "x"), route.path)
        found += [(method, path) for method in getattr(route, "methods", None) or ("WEBSOCKET",)]
    return found


def settled(server: Live) -> None:
    """Wait until nothing runs; then every page must be free, but for those that clients have pinned."""
    until(lambda: not (server.service.running or server.service.admission.used))

    def look(engine: Engine) -> None:
        engine.scheduler.warming.give_up()  # as at each request: a next turn may be under way, or wait for the machine
        check_invariants(engine.scheduler)
        assert not engine.scheduler.sequences, "a request was left behind"
        places = (enumerate(pin.tables) for pin in engine.scheduler.kv.pins)
        pinned = {(group, page) for its in places for group, table in its for page in table.values()}
        assert engine.pool.available + len(pinned) == engine.pool.pages, "pages were left behind"

    server.llm.llm_engine.loop.call(look)
    assert (server.service.admission.used, server.service.admission.waiting) == (0, 0)


def keep_pace(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the engine waits after each step until the event loop has taken what the step has delivered."""
    step = Engine.step

    def paced(engine: Engine) -> list[Event]:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(HANGS)
        return step(engine)

    monkeypatch.setattr(Engine, "step", paced)


@contextmanager
def live(model: Path, **options: Any) -> Iterator[Live]:
    server = Live(model, **options)
    try:
        yield server
    finally:
        server.stop()
