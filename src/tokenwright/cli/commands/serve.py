"""`tokenwright serve`: an HTTP server for one model or several, with the APIs that existing clients speak."""

import atexit
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import cache
from inspect import signature
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tokenwright.checkpoints.files.local import local_folder
from tokenwright.cli.options import shared as opt
from tokenwright.cli.options.defaults import of_serve
from tokenwright.cli.options.shared import replaced
from tokenwright.cli.terminal.output import remark
from tokenwright.config import AUTO_DISK
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.importing import uncollected_imports
from tokenwright.serve.settings import Settings, read_settings
from tokenwright.units import binary, read_bytes

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tokenwright.cluster.processes import ReplicaSource
    from tokenwright.llm.llm import LLM
    from tokenwright.serve.app import Served
    from tokenwright.serve.fleet import ManySource
    from tokenwright.serve.transport.guard import Policy


MOST_KV = 4 * 2**30

Named = Annotated[
    list[str] | None,
    Argument(
        metavar="[MODEL]...",
        help="A Hugging Face name, a folder, a GGUF file, or stories, the model inside; several are loaded on demand.",
        show_default=False,
        autocompletion=opt.model_names,
    ),
]
Models = Annotated[
    list[str] | None,
    Option(
        "--model",
        "-m",
        help="A model, or NAME=MODEL to serve it as NAME; may be given several times.",
        rich_help_panel=opt.MODEL,
        show_default=False,
        autocompletion=opt.model_names,
    ),
]


Config = Annotated[
    Path | None,
    Option(
        "--config",
        help="A TOML file of these settings, which wins over the table serve of your settings file.",
        rich_help_panel=opt.SERVER,
    ),
]


def _option(setting: Field[Any]) -> tuple[Any, None]:
    kind = list[str] if isinstance(setting.default, tuple) else type(setting.default)
    flags = [f"--{setting.name.replace('_', '-')}"] if kind is bool else []  # it has no --no-
    return Annotated[kind | None, Option(*flags, rich_help_panel=opt.SERVER, **setting.metadata)], None


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `flags` by options of all settings that the command does not name itself."""
    own = signature(command).parameters
    return replaced(command, "flags", {one.name: _option(one) for one in fields(Settings) if one.name not in own})


@with_settings
@opt.with_engine(server=True, kv_disk=AUTO_DISK)
def serve(
    named: Named = None,
    model: Models = None,
    config: Config = None,
    engine: dict[str, Any] = {},  # noqa: B006  (the options that open the model, see `with_engine`)
    flags: dict[str, Any] = {},  # noqa: B006  (the settings, see `with_settings`)
) -> None:
    """Serve models over HTTP: OpenAI's API and others, so that existing clients work unchanged.

    Several models are loaded when a request asks for one. The server accepts connections from this machine only,
    unless --host says otherwise. Ctrl-C stops it.
    """
    if engine["tensor_parallel"] > 1 and engine["kv_disk"] == AUTO_DISK:
        engine["kv_disk"] = None  # no rank has whole pages
    flags = flags | {"revision": engine["revision"], "lora": [str(folder) for folder in engine["lora"] or ()]}
    engine = opt.of_engine(engine, but=("revision", "lora"))
    models = models_of(named or (), model or ())
    settings = read_settings(config, Environment.read().defaults, flags, of_serve())
    run = serve_many if len(models) > 1 or settings.memory or models[0].named else serve_one
    run(models, engine, settings)


def serve_one(models: "Sequence[NamedModel]", engine: dict[str, Any], settings: Settings) -> None:
    [chosen] = [one.source for one in models]
    adapters = adapters_of(settings.adapter, settings.served_model_name or (chosen,))
    engine = engine | {"revision": settings.revision or None}
    engine |= {"lora": [Path(one) for one in settings.lora]} if settings.lora else {}
    opt.check_engine(**engine)
    local_folder(chosen, engine["revision"])  # refuses an unknown model before it listens
    engine |= {"adapters": adapters} if adapters else {}
    if settings.replicas and "tensor_parallel" in engine:
        raise RequestError("--replicas and --tensor-parallel both divide the machine; give one of them", "replicas")
    source = clustered(chosen, engine, settings) if settings.replicas else None
    load = published(opt.loader(chosen, trace=settings.explorer, **engine), settings)

    def build(policy: "Policy", page: Path | None, served: "Served") -> "FastAPI":
        from tokenwright.serve.app import make_app
        from tokenwright.serve.service.model_host import ModelHost, uncollected

        if policy.keys.models:
            raise RequestError("an API key names models, and this server has one; leave out the names after the key")
        served = replace(served, names=settings.served_model_name, adapters=tuple(adapters))
        if source is not None:  # SIGHUP replaces its replicas
            from tokenwright.serve.model_versions import make_versions_app

            return make_versions_app(chosen, source, policy, page, served)
        return make_app(ModelHost(chosen, uncollected(load)), policy, page, served)

    _listen(chosen, build, settings, _room(engine))


def adapters_of(given: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """The folders of --adapter by name. Raises RequestError for a malformed one, and for a `taken` name."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not (name and folder):
            raise RequestError(f"--adapter must be NAME=FOLDER, not {one[:200]!r}")
        if name in (*taken, *found):
            raise RequestError(f"--adapter {name}: this name is taken; give each adapter another name")
        found[name] = folder
    return found


@dataclass(frozen=True, slots=True)
class NamedModel:
    name: str
    source: str
    named: bool


def models_of(arguments: Sequence[str], options: Sequence[str]) -> list[NamedModel]:
    """The models to serve, by default the user's. Raises RequestError for a name given twice."""
    found: list[NamedModel] = []
    for text in dict.fromkeys((*arguments, *options)):
        name, equals, source = text.partition("=")
        named = bool(equals and name and source) and not Path(text).exists()
        found.append(NamedModel(name, source, True) if named else NamedModel(text, text, False))
    found = found or [NamedModel(chosen := opt.the_model(None, None), chosen, False)]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"two models are called {twice[:200]}; give one another name, as NAME=MODEL")
    return found


def serve_many(models: Sequence[NamedModel], engine: dict[str, Any], settings: Settings) -> None:
    for name in ("served_model_name", "adapter", "lora", "revision", "kv_events", "replicas"):
        if getattr(settings, name):
            raise RequestError(f"--{name.replace('_', '-')} belongs to one model; leave it out, or serve one", name)
    for name in ("draft", "mmproj", "tensor_parallel", "expert_memory", "gpu_layers"):
        if engine.get(name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} belongs to one model; leave it out, or serve one", name)
    from tokenwright.backends.ram import free_ram

    limit = read_bytes(settings.memory, "memory") if settings.memory else (free_ram() or 0) * 7 // 8
    if not limit:
        raise RequestError("this system does not report its free memory; give --memory, such as 16GB", "memory")
    engine = engine | {"kv_memory": engine["kv_memory"] or max(1, min(limit // 8, MOST_KV))}
    opt.check_engine(**engine)
    for one in models:
        local_folder(one.source)

    def source_of(name: str, source: str = "") -> "ManySource":
        from tokenwright.serve.fleet import ManySource

        opened = opt.loader(source or name, trace=settings.explorer, **engine)
        return ManySource(name, opened, lambda: needed(source or name, engine))

    def build(policy: "Policy", page: Path | None, served: "Served") -> "FastAPI":
        from tokenwright.serve.many import make_many_app

        sources = [source_of(one.name, one.source) for one in models]
        return make_many_app(sources, source_of, limit, policy, page, served)

    _listen(", ".join(one.name for one in models), build, settings, _room(engine))


def needed(source: str, engine: Mapping[str, Any]) -> int:
    from tokenwright.planner import plan

    weights, dtype = engine["weights"], engine["dtype"]
    wanted = dtype if weights == "native" and dtype != "auto" else weights
    given = {name: engine[name] for name in ("kv", "window", "sinks")}
    found = plan(source, weights=wanted, batch=64, **given)
    return found.weight_bytes + min(int(engine["kv_memory"]), found.kv_bytes_total)


def _room(engine: Mapping[str, Any]) -> str:
    if engine.get("kv_disk") != AUTO_DISK:
        return ""
    from tokenwright.cache.page_file import disk_place

    if (found := disk_place(engine.get("kv_disk_size"))) is None:
        return "no disk has room for the prefix cache (--kv-disk FOLDER)"
    folder, quota = found
    return f"cached pages also go to unnamed files in {folder}, {binary(quota)} at most (--kv-disk off: none do)"


def _listen(
    what: str, build: "Callable[[Policy, Path | None, Served], FastAPI]", settings: Settings, disk: str = ""
) -> None:
    from tokenwright.serve.transport.sockets import listen

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server handles it
    listener = listen(settings.host, (settings.port,))  # clients may connect while the rest loads
    with uncollected_imports():
        from tokenwright.llm.web_page import page_folder
        from tokenwright.serve.app import in_url, policy_of, served_of
        from tokenwright.serve.service.model_host import share_heaps
        from tokenwright.serve.transport.access_log import log_access
        from tokenwright.serve.transport.server import Server

    share_heaps()
    served = served_of(settings)
    port = listener.getsockname()[1]
    policy = policy_of(settings)
    try:
        page = page_folder()
    except RequestError:
        page = None  # the APIs need none
    app = build(policy, page, served)
    if settings.access_log:
        log_access(logging.StreamHandler())
    at = f"http://{in_url(settings.host)}:{port}"
    remark(f"serving {what} at {at}/v1{'' if page is None else f', with a page at {at}'} (Ctrl-C ends it)")
    if disk:
        remark(disk)
    Server(app, settings.drain_timeout, remark).keep(listener)


Load = Callable[[Callable[[int, int], None]], "LLM"]


def clustered(model: str, engine: dict[str, Any], settings: Settings) -> "Callable[[], ReplicaSource]":
    """Returns a slow function. Raises RequestError if Ray is needed and missing."""
    more: dict[str, Any] = {"retries": settings.retries, "drain_s": settings.drain_timeout}
    more["heartbeat_s"] = settings.heartbeat
    if settings.ray_address:
        from tokenwright.cluster.ray_replicas import check_ray

        check_ray()

    @cache
    def source() -> "ReplicaSource":
        from tokenwright.cluster.processes import ReplicaSource, processes_of

        if not settings.ray_address:
            return processes_of(model, settings.replicas, engine, **more)
        from tokenwright.cluster.ray_replicas import open_on_ray

        name = f"tokenwright-{gethostname()}-{settings.port}"

        def load(report: Callable[[int, int], None]) -> "LLM":
            return open_on_ray(model, settings.replicas, settings.ray_address, name, engine, report=report, **more)

        return ReplicaSource(load, load, lambda _: False)  # files on its machines cannot be compared

    return source


def published(load: Load, settings: Settings) -> Load:
    """Let `load` publish the model's KV events if --kv-events is given. Raises RequestError."""
    if not settings.kv_events:
        return load
    from tokenwright.cluster.publisher import KVPublisher, check_address

    check_address(settings.kv_events)

    def loaded(report: Callable[[int, int], None]) -> "LLM":
        llm = load(report)
        atexit.register(KVPublisher(llm, settings.kv_events, settings.kv_events_topic).close)
        return llm

    return loaded
