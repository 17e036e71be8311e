"""`tokenwright explore`: serve the explorer for one model, and open it in a browser."""

import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tokenwright.checkpoints.files.local import local_folder
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import remark
from tokenwright.errors import RequestError
from tokenwright.importing import uncollected_imports

USUAL_PORT = 8321

Port = Annotated[
    int | None,
    Option(min=0, max=65535, help=f"The port to listen on; by default {USUAL_PORT}, or a free one if it is taken."),
]
Static = Annotated[
    Path | None,
    Option(
        "--static",
        metavar="FOLDER",
        help="Record runs with and without the cache, and write them as a static site to FOLDER.",
    ),
]
Url = Annotated[
    str | None,
    Option("--url", help="With --static: the site's future address, for the preview pictures of links to it."),
]
NoBrowser = Annotated[bool, Option("--no-browser", help="Do not open a browser; the address is printed anyway.")]


@opt.with_engine(server=True, but=("tensor_parallel", "kv", "window", "sinks", "speculate", "draft", "draft_weights"))
def explore(
    named: opt.ModelName = None,
    model: opt.Model = None,
    port: Port = None,
    no_browser: NoBrowser = False,
    static: Static = None,
    url: Url = None,
    engine: dict[str, Any] = {},  # noqa: B006  (the options that open the model, see `with_engine`)
) -> None:
    """Trace the model in a browser: every token, every layer, the KV cache, and the cost of each step.

    The server accepts connections from this machine only. Ctrl-C stops it. With --static it writes a site
    instead and ends.
    """
    engine, name = opt.of_engine(engine), opt.the_model(named, model)
    opt.check_engine(**engine)
    if url is not None and (static is None or not url.startswith(("http://", "https://"))):
        raise RequestError("--url must begin with http:// or https://, and needs --static")
    if static is not None:
        if port is not None:
            raise RequestError("--static starts no server; leave out --port")
        _write_site(name, static, url, **engine)
        return
    local_folder(name, engine["revision"])  # refuses an unknown model
    _serve(name, port, browser=not no_browser, **engine)


def _serve(name: str, port: int | None, *, browser: bool, **engine: Any) -> None:
    from tokenwright.llm.web_page import page_folder
    from tokenwright.serve.transport.sockets import listen

    page = page_folder()  # before the slow load
    listener = listen("127.0.0.1", (USUAL_PORT, 0) if port is None else (port,))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with uncollected_imports():
        from tokenwright.serve.app import make_app
        from tokenwright.serve.service.model_host import ModelHost, uncollected
        from tokenwright.serve.transport.server import Server

    names = [address, address.replace("127.0.0.1", "localhost")]
    names += [name.removesuffix(":80") for name in names]  # browsers omit the default port
    app = make_app(ModelHost(name, uncollected(opt.loader(name, trace=True, browser=True, **engine))), names, page)
    taken = f"port {USUAL_PORT} is taken; " if port is None and not address.endswith(f":{USUAL_PORT}") else ""
    remark(f"{taken}the explorer is at http://{address} (Ctrl-C ends it)")
    if browser:
        # A text-mode browser blocks its caller.
        threading.Thread(target=webbrowser.open, args=(f"http://{address}",), daemon=True).start()
    Server(app, 0.0, remark).keep(listener)  # tells open pages that it ended


def _write_site(name: str, folder: Path, url: str | None, **engine: Any) -> None:
    from tokenwright.explorer.explorer import Explorer, OpenedModel
    from tokenwright.explorer.site import write_site
    from tokenwright.llm.web_page import page_folder

    page = page_folder()
    with opt.opened(name, trace=True, **engine) as llm:
        explorer = Explorer(OpenedModel(Path(name).name, llm))
        write_site(explorer, page, folder, lambda part: remark(f"recording: {part}"), url)
    if url is None:
        remark("links to it show no preview picture; give its address by --url")
    remark(f"the site is in {folder}; serve it with: python -m http.server -d {folder}")
