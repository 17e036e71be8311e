"""An LLM whose texts replicas generate: this process prepares requests and holds no weights."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from secrets import token_bytes
from typing import Any, NoReturn

from tokenwright.cache.page_folder import folder_secret
from tokenwright.checkpoints.fingerprint import ModelFiles, pinned
from tokenwright.checkpoints.folder import Report
from tokenwright.cluster.cluster_loop import ClusterLoop
from tokenwright.cluster.replica_messages import OptionValue
from tokenwright.cluster.routed_handle import UNPAUSED, RoutedHandle
from tokenwright.cluster.supervisor import Launcher, RouterSettings
from tokenwright.config import AUTO_DISK, EngineConfig
from tokenwright.engine import PagePool, Request
from tokenwright.engine.loop import CLOSED, Inbox
from tokenwright.engine.port import Listener, Occupancy
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import CapacityError, RequestError
from tokenwright.formats import KVFormat
from tokenwright.llm.asking import AsyncStreams, cached_model
from tokenwright.llm.drafts.sources import draft_specs
from tokenwright.llm.engine import context_of, specs_of
from tokenwright.llm.input_processor import InputProcessor
from tokenwright.llm.llm import LLM
from tokenwright.llm.model import PreparedModel
from tokenwright.llm.prompts.kept import KeptText, KeptTokens, all_kept
from tokenwright.llm.prompts.memory import PromptMemory
from tokenwright.llm.prompts.watch import Watching
from tokenwright.sampling_params import check_unicode
from tokenwright.units import read_bytes

EXPERTS = "expert_memory"  # shared among all replicas
LOADING = ("revision", "device", "dtype", "weights", "lora", "adapters", "mmproj", EXPERTS)


class ClusterEngine:
    def __init__(
        self,
        prepared: PreparedModel,
        options: EngineConfig,
        loop: ClusterLoop,
        report: Report | None = None,
        files: ModelFiles | None = None,  # all replicas must open these
    ) -> None:
        self.facts = prepared.facts
        self.specs = specs_of(options, prepared.facts.graph, prepared.facts.dtype)
        self._all_specs = (*self.specs, *draft_specs(prepared, options))
        self.context = context_of(options, prepared.facts.config)
        self.loop = loop
        self.shape = loop.opened(self.context, report)
        self.options = replace(options, max_sequences=self.shape.max_sequences * loop.replicas)
        self.streams, self.prompts = AsyncStreams(), PromptMemory()
        self.files = files
        self._prepared = prepared
        self._inputs = InputProcessor(prepared, self.context)
        prepared.enter()

    def __str__(self) -> str:
        if self.loop.closed:
            return "closed"
        return f"{self.facts.name}: {self.facts.graph.architecture}, {self.loop.replicas} replicas"

    def release(self, owner: str, session: str) -> None:
        self.loop.release(owner, session)

    def warm(self, request: Request, rules: WarmRules) -> None:
        with suppress(RequestError, CapacityError):  # it does not fit the cache
            self.loop.warm(request, rules, list(self._prepared.adapters))

    def kept(self, texts: Sequence[KeptText], owner: str) -> KeptTokens:
        return all_kept(self.loop.kept(texts, owner), len(texts))

    def inbox(self, at_end: int = 0) -> Inbox:
        return Inbox(at_end)

    def local(self, name: str) -> NoReturn:
        raise RequestError(
            f"{name} needs an engine in this process, and this model runs in replicas: use LLM(...), or serve without "
            "--replicas"
        )

    def _refuse_closed(self) -> None:
        if self.loop.closed:
            raise RequestError(CLOSED)

    @property
    def prepared(self) -> PreparedModel:
        self._refuse_closed()
        return self._prepared

    @property
    def inputs(self) -> InputProcessor:
        self._refuse_closed()
        return self._inputs

    @property
    def pool(self) -> PagePool:
        return self.loop.engine.pool

    @property
    def weight_bytes(self) -> int:
        return self.shape.weight_bytes

    @property
    def kv_memory(self) -> int:
        return self.shape.kv_memory * self.loop.replicas

    @property
    def kv_format(self) -> str:
        return self.shape.kv_format

    @property
    def replicas(self) -> int:
        return len(self.loop.dispatcher.members)

    @property
    def expert_counts(self) -> Mapping[str, int]:
        return {name: self.loop.experts[name] for name in self.shape.experts}

    @property
    def occupancy(self) -> Occupancy:
        members, pages = list(self.loop.dispatcher.members), sum(group.pages for group in self.shape.groups)
        available = sum(one.available for one in members)
        return Occupancy(pages * len(members), available, sum(one.cached for one in members))

    def kv_bytes(self, tokens: int) -> int:
        return sum(spec.nbytes(tokens) for spec in self._all_specs)

    @cached_property
    def watching(self) -> Watching:
        evicted, states = self.loop.dispatcher.evictions.when, bool(self.pool.states)
        return Watching(self.prompts, self.facts.tokenizer, cached_model(self), states, evicted, apart=True)

    def submit(self, requests: Sequence[Request], listener: Listener, *, paused: bool = False) -> list[RoutedHandle]:
        self._refuse_closed()
        if paused:
            raise RequestError(UNPAUSED)
        return self.loop.route(requests, listener, list(self._prepared.adapters))

    def check(self) -> None:
        self._refuse_closed()
        self.loop.check()

    def close(self) -> None:
        if not self.loop.closed:
            self.loop.close()
            self.streams.close()
            self._prepared.leave()


def cluster_of(llm: LLM) -> ClusterEngine | None:
    return llm.llm_engine if isinstance(llm.llm_engine, ClusterEngine) else None


@dataclass(frozen=True, slots=True)
class ReplicatedModel:
    model: str
    loading: dict[str, Any]  # options of LoadedModel
    engine: dict[str, Any]
    threads: int | None
    secret: bytes  # of all page hashes; with kv_disk, its folder's
    name: str = ""
    files: ModelFiles | None = None

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any]) -> "ReplicatedModel":
        """options: of LLM, and `threads`. Raises RequestError for an unusable kv_disk folder."""
        engine, disk = dict(options), options.get("kv_disk")
        secret = token_bytes(32) if disk in (None, AUTO_DISK) else folder_secret(Path(disk).expanduser())
        threads = engine.pop("threads", None)
        loading = {name: engine.pop(name) for name in LOADING if name in engine}
        return cls(model, loading, engine, threads, secret)

    def pinned(self) -> "ReplicatedModel":
        """Resolve all names to files, so that all replicas open the same model."""
        loading, engine = dict(self.loading), dict(self.engine)
        model = str(pinned(self.model, loading.pop("revision", None)))
        loading["lora"] = tuple(str(Path(one).resolve()) for one in loading.get("lora", ()))
        loading["adapters"] = {name: str(Path(one).resolve()) for name, one in loading.get("adapters", {}).items()}
        beside = [*loading["lora"], *loading["adapters"].values()]
        if loading.get("mmproj") is not None:
            beside.append(tower := str(Path(loading["mmproj"]).resolve()))
            loading["mmproj"] = tower
        if engine.get("draft") is not None:
            beside.append(draft := str(pinned(engine["draft"])))
            engine["draft"] = draft
        files = ModelFiles.found((model, *beside))
        return replace(self, model=model, loading=loading, engine=engine, name=self.model, files=files)

    def loading_of(self, replicas: int) -> dict[str, OptionValue]:
        """The options of LoadedModel for each replica."""
        pool = self.loading.get(EXPERTS)
        each = {} if pool is None else {EXPERTS: max(1, read_bytes(pool, EXPERTS) // replicas)}
        return plain(self.loading | each)

    def opened(
        self, launcher: Launcher, *, report: Report | None = None, starting: int | None = None, **settings: Any
    ) -> LLM:
        engine, shared = self.engine, self.engine.get("kv_disk") not in (None, AUTO_DISK)
        own = {name: value for name, value in engine.items() if name not in ("kv", "kv_memory")}
        config = EngineConfig(kv=KVFormat.parse(engine.get("kv", "native")), **own)
        loop = ClusterLoop(launcher, self.secret, RouterSettings(**settings), shared=shared, starting=starting)
        try:
            prepared = PreparedModel(self.model, **{k: one for k, one in self.loading.items() if k != EXPERTS})
            prepared.facts = replace(prepared.facts, name=self.name or self.model)
            made = ClusterEngine(prepared, config, loop, report, self.files)
            if self.files is not None:
                self.files.check()
        except BaseException:
            loop.close()
            raise
        return LLM.over(made)


def plain(options: Mapping[str, Any]) -> dict[str, OptionValue]:
    """Options with paths and formats as text. Raises RequestError for text that is not Unicode."""
    return {name: _plain(name, value) for name, value in options.items()}


def _plain(name: str, value: object) -> OptionValue:
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {_text(name, key): _text(name, one) for key, one in value.items()}
        case list() | tuple():
            return tuple(_text(name, one) for one in value)
    return _text(name, value)


def _text(name: str, value: object) -> str:
    check_unicode(name, text := str(value))
    return text
