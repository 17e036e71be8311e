"""A server of several small models, on a socket in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines import until
from tests.serve.live import HANGS
from tokenwright import LLM
from tokenwright.errors import RequestError
from tokenwright.planner import plan
from tokenwright.serve.app import Served
from tokenwright.serve.fleet import Fleet, ManySource
from tokenwright.serve.many import make_many_app
from tokenwright.serve.transport.guard import Policy
from tokenwright.serve.transport.server import Server
from tokenwright.serve.transport.sockets import listen

PAGES = 64


class Many:
    """A server that listens. models: the folders by name. limit: bytes; None: of one and a half of the first model."""

    def __init__(
        self, models: Mapping[str, Path], limit: int | None, keys: tuple[str, ...], page: Path | None, **options: Any
    ) -> None:
        def source(name: str) -> ManySource:
            place = models.get(name, Path(name))

            def load(report: Callable[[int, int], None]) -> LLM:
                return LLM(place if place.exists() else name, report=report, pages=PAGES, **options)

            return ManySource(name, load, lambda: plan(place if place.exists() else name).weight_bytes)

        listener = listen("127.0.0.1", (0,))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.url = f"http://{address}"
        sources = [source(name) for name in models]
        most = limit or self.size(sources[0]) * 3 // 2
        policy = Policy.of([address], keys)
        try:
            app = make_many_app(sources, source, most, policy, page, Served())
        except RequestError:
            listener.close()
            raise
        self.fleet: Fleet = app.state.service
        self.server = Server(app, 5.0, lambda _: None)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, args=([listener],), daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    @staticmethod
    def size(source: ManySource) -> int:
        with source.load(lambda *_: None) as llm:
            return llm.weight_bytes + llm.kv_memory

    def _run(self, sockets: list[Any]) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.server.serve(sockets))

    def states(self) -> dict[str, str]:
        return {one.name: one.state for one in self.fleet.residents.entries}

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(HANGS)
        assert not self.thread.is_alive(), "the server does not end"


@contextmanager
def many(
    models: Mapping[str, Path],
    *,
    limit: int | None = None,
    keys: tuple[str, ...] = (),
    page: Path | None = None,
    **options: Any,
) -> Iterator[Many]:
    server = Many(models, limit, keys, page, **options)
    try:
        yield server
    finally:
        server.stop()
