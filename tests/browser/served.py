"""The explorer's server in a thread of the tests' process, over the small model of the tests."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import uvicorn

from tests.engines import until
from tokenwright import LLM
from tokenwright.llm.web_page import page_folder
from tokenwright.serve.app import make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.serve.transport.guard import Policy
from tokenwright.serve.transport.server import Server as Uvicorn
from tokenwright.serve.transport.sockets import listen


class Staying(Uvicorn):
    """Answers on when its model could not be read, so that the page can say why."""

    async def on_tick(self, counter):
        return await uvicorn.Server.on_tick(self, counter)


class Server:
    """A server in a thread of this process, so that tests can reach into its engine; it can be killed and come back."""

    def __init__(self, load, keys=(), port=0):
        self.load, self.keys, self.port = load, keys, port
        self.start()

    def start(self):
        """Listen, on the same port as before."""
        listener = listen("127.0.0.1", (self.port,))  # a visit that comes before the thread listens waits
        self.port = listener.getsockname()[1]
        app = make_app(ModelHost("stories", self.load), Policy.of([f"127.0.0.1:{self.port}"], self.keys), page_folder())
        self.explorer = app.state.explorer
        self.service = app.state.service
        self.server = Staying(app, 0.0, print)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def llm(self):
        return self.explorer.llm

    def stop(self):
        self.server.should_exit = True
        self.thread.join()


def load(report):
    return LLM("stories", trace=True, report=report, pages=512)


@contextmanager
def serving(load, **options):
    """A server whose model has been read."""
    server = Server(load, **options)
    try:
        until(lambda: server.explorer.host.loading.phase != "loading")
        yield server
    finally:
        server.stop()
