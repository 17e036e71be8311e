"""The process of a server under test: the command `serve`, or a replica on a socket, with or without a planted fault.

    python -m tests.fuzz.served KIND FOLDER [PLANT]     # of KINDS; a line of standard error has the address

SIGUSR2 collects garbage, so that objects in cycles and holes of the heap are no leak, and exceptions of forgotten tasks
reach the log. The plants wrap the app of this process only; they prove that the fuzzer finds what it looks for.
"""

import asyncio
import ctypes
import gc
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SECRET, KEY = b"s" * 32, "fuzz-key-of-a-client"
COMMON = ["--port", "0", "--request-timeout", "8", "--drain-timeout", "1", "--stored-responses", "1000000"]
KINDS = {
    "one": "{0} --served-model-name tiny --kv-memory 32MB --explorer",
    "many": "tiny={0} twin={0} --kv-memory 16MB --memory 1GB",
    "keyed": f"{{0}} --served-model-name tiny --kv-memory 32MB --api-key {KEY}",
    "cluster": "{0} --served-model-name tiny --kv-memory 32MB --replicas 1",
    "replica": "",
}
KEPT: list[Any] = []
LOCK = threading.Lock()


def hold(seconds: float) -> None:
    with LOCK:
        time.sleep(seconds)


def below(value: Any, left: int) -> None:
    """Recurse into a value; raises RecursionError below so many levels."""
    if not left:
        raise RecursionError
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        below(one, left - 1)


class Plants:
    """Each has the path of a request, its raw body and its object; they run on the event loop before the request."""

    async def backtracks(self, path: str, raw: bytes, data: Any) -> None:
        if isinstance(value := data.get("keep_alive"), str):
            re.fullmatch(r"((\d+\.?\d*|\.\d+)(ms|s))+", value[:20_000])

    async def quadratic(self, path: str, raw: bytes, data: Any) -> None:
        for items in (one[:20_000] for one in data.values() if isinstance(one, list)):
            sum(items[at] is items[other] for at in range(len(items)) for other in range(at))

    async def sleeps(self, path: str, raw: bytes, data: Any) -> None:
        time.sleep(2.5 if data.get("grammar") else 0)

    async def locks(self, path: str, raw: bytes, data: Any) -> None:
        if path == "/tokenize":
            threading.Thread(target=hold, args=(3.0,)).start()
            time.sleep(0.01)
            hold(0)

    async def interprets(self, path: str, raw: bytes, data: Any) -> None:
        """Work of a thread that keeps the interpreter's lock in one call."""
        if isinstance(bias := data.get("logit_bias"), dict) and len(bias) > 20:
            await asyncio.to_thread(lambda: 7 ** (3 * 10**7 + len(bias)) % 11)

    async def fails(self, path: str, raw: bytes, data: Any) -> None:
        if b"\\u0000" in raw:
            raise ValueError("NUL")

    async def recurses(self, path: str, raw: bytes, data: Any) -> None:
        below(data, 100)

    async def leaks(self, path: str, raw: bytes, data: Any) -> None:
        KEPT.append(bytearray(400_000 if path.startswith("/v1/messages") else 0))

    async def opens(self, path: str, raw: bytes, data: Any) -> None:
        """A file that stays open."""
        KEPT.append(Path("/dev/null").open() if "temperature" in data else None)  # noqa: SIM115

    async def starts(self, path: str, raw: bytes, data: Any) -> None:
        """A thread that does not end."""
        if "seed" in data:
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    async def forgets(self, path: str, raw: bytes, data: Any) -> None:
        """An exception in a task that nothing waits for."""
        if isinstance(data.get("stop"), list):
            asyncio.get_running_loop().create_task(self.fails("", b"\\u0000", None))

    async def waits(self, path: str, raw: bytes, data: Any) -> None:
        """A request that gets no answer."""
        if path == "/api/show":
            await asyncio.Event().wait()

    async def stays(self, path: str, raw: bytes, data: Any) -> None:
        """A server that does not end."""
        if path == "/detokenize":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


PLANTS = [one for one in vars(Plants) if not one.startswith("_")]


class Planted:
    """Wraps an app: runs a planted fault on each request, then passes it on."""

    def __init__(self, app: Any, fault: str) -> None:
        self.app, self.fault = app, getattr(Plants(), fault)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        messages: list[Any] = []
        if scope["type"] == "http" and scope["method"] == "POST":
            while not messages or messages[-1].get("more_body"):
                messages.append(await receive())
            raw = b"".join(one.get("body", b"") for one in messages)
            try:
                data = json.loads(raw)
            except (ValueError, RecursionError):
                data = None
            await self.fault(scope["path"], raw, data if isinstance(data, dict) else {})

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await self.app(scope, again, send)


def plant(fault: str) -> None:
    """Let the server of this process wrap its app."""
    from tokenwright.serve.transport.server import Server

    made = Server.__init__

    def wrapped(self: Any, app: Any, *arguments: Any, **options: Any) -> None:
        app.add_middleware(Planted, fault=fault)
        made(self, app, *arguments, **options)

    Server.__init__ = wrapped  # type: ignore[method-assign]


def main(kind: str, folder: str, fault: str = "") -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its fuzzer
    from tokenwright.serve.service.model_host import give_back

    signal.signal(signal.SIGUSR2, lambda *_: (gc.collect(), give_back()))
    if kind == "replica":
        from tokenwright import LLM
        from tokenwright.cluster.served_replica import ReplicaServer

        host, port = ReplicaServer(LLM(folder, kv_memory="32MB", threads=1), SECRET, "127.0.0.1").address
        print(f"http://{host}:{port}/", file=sys.stderr, flush=True)
        while True:
            time.sleep(1)
    from tokenwright.__main__ import main as command

    if fault:
        plant(fault)
    sys.argv = ["tokenwright", "serve", *(one.format(folder) for one in KINDS[kind].split()), *COMMON]
    command()


if __name__ == "__main__":
    main(*sys.argv[1:])
