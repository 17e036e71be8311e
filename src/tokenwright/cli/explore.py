"""`tokenwright explore`: serve the explorer's page for one model, and open a browser on it."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokenwright.cli import options as opt
from tokenwright.cli.output import remark
from tokenwright.errors import RequestError, TokenwrightError

if TYPE_CHECKING:
    from tokenwright.llm import LLM

USUAL_PORT = 8321

Port = Annotated[
    int | None,
    Option(min=0, max=65535, help=f"The port to listen on; by default {USUAL_PORT}, or a free one where it is taken."),
]
NoBrowser = Annotated[bool, Option("--no-browser", help="Do not open a browser; the address is printed anyway.")]


def explore(
    named: opt.ModelName = None,
    model: opt.Model = None,
    port: Port = None,
    no_browser: NoBrowser = False,
    revision: opt.Revision = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    weights: opt.Weights = "native",
    page_size: opt.PageSize = 16,
    token_budget: opt.TokenBudget = 512,
) -> None:
    """Trace the model in a browser: every token, every layer, the KV cache, and the cost of each step.

    The server accepts connections from this machine alone. Ctrl-C stops it.
    """
    name = opt.the_model(named, model)
    opt.check_engine(device=device, dtype=dtype, weights=weights, page_size=page_size, token_budget=token_budget)
    import uvicorn

    from tokenwright.serve.page import page_folder

    page = page_folder()  # before the model is loaded: without a page there is nothing to open
    listener = _listen(port)
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def load(report: Callable[[int, int], None]) -> LLM:
        from tokenwright.backends.device import leave_a_core
        from tokenwright.llm import LLM

        leave_a_core()
        try:
            return LLM(
                name,
                revision=revision,
                device=device,
                dtype=dtype,
                weights=weights,
                page_size=page_size,
                token_budget=token_budget,
                report=report,
                trace=True,
            )
        except TokenwrightError as error:
            remark(f"tokenwright: {error}")  # the page shows it too
            raise

    from tokenwright.serve.explore import Explorer, make_app

    hosts = [address, address.replace("127.0.0.1", "localhost")]
    hosts += [host.removesuffix(":80") for host in hosts]  # browsers omit the default port
    app = make_app(Explorer(name, load), hosts, page)
    config = uvicorn.Config(app, log_level="warning", ws_max_size=2**16, timeout_graceful_shutdown=2)
    remark(f"the explorer is at http://{address} (Ctrl-C ends it)")
    if not no_browser:
        # In a thread: a text-mode browser blocks its caller, and the server would not answer it.
        threading.Thread(target=webbrowser.open, args=(f"http://{address}",), daemon=True).start()
    uvicorn.Server(config).run(sockets=[listener])


def _listen(port: int | None) -> socket.socket:
    """A socket on the loopback interface: on `port`, else on the default port, else on any free one."""
    ports = (USUAL_PORT, 0) if port is None else (port,)
    for wanted in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", wanted))
            listener.listen()  # a browser may connect now, and waits until the server answers
        except OSError as error:
            listener.close()
            reason = error.strerror
        else:
            return listener
    raise RequestError(f"port {port} cannot be listened on ({reason}); give --port another one, or none")
