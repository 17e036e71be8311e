"""The models of a server of several, and the choice of one by a request."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenwright.serve.app import add_routes, new_app
from tokenwright.serve.http.api import Api
from tokenwright.serve.openai.responses.stored import StoredResponses
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.model_host import Load, ModelHost
from tokenwright.serve.service.residents import ResidentModel, Residents, find
from tokenwright.serve.service.service import Service, ServiceLimits
from tokenwright.serve.service.types import Caller, ListedModel, NotReady, Problem


@dataclass(frozen=True, slots=True)
class ManySource:
    name: str
    load: Load
    need: Callable[[], int]  # its approximate bytes


class LoadedApp:
    """A model with its app; `start` begins to load it. names: for clients, its own first."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        load: Load,
        limits: ServiceLimits,
        metrics: Metrics,
        page: Path | None,
        stored: StoredResponses,
        apis: Sequence[Api],
    ) -> None:
        self.host = ModelHost(name, load)
        self.service = Service(self.host, names, limits, metrics)
        self.app = new_app()
        self.free = add_routes(self.app, self.service, metrics, page, stored, apis)

    def start(self) -> None:
        self.host.start()

    async def settled(self) -> None:
        while not self.host.settled.is_set():
            await asyncio.sleep(0.005)
        if self.host.failure is not None:
            raise self.host.failure

    @property
    def failed(self) -> bool:
        return self.host.failure is not None

    @property
    def nbytes(self) -> int:
        return self.host.llm.weight_bytes + self.host.llm.kv_memory

    @property
    def progress(self) -> tuple[int, int]:
        return self.host.loading.done, self.host.loading.total

    def stop(self) -> None:
        self.service.stop()

    def close(self) -> None:
        self.host.settled.wait()  # a model that is loading is freed afterwards
        self.free()
        self.service.close()
        gc.collect()


class Fleet:
    def __init__(
        self, residents: Residents, make: Callable[[str], ManySource], open_: Callable[..., LoadedApp]
    ) -> None:
        self.residents = residents
        self.created = int(time.time())
        self.draining = False
        self._make = make
        self._open = open_

    @property
    def failure(self) -> Exception | None:
        """None: a failed model is loaded again on demand, so it does not end the server."""
        return None

    @property
    def apps(self) -> list[LoadedApp]:
        return [one.loaded for one in self.residents.entries if isinstance(one.loaded, LoadedApp)]

    @property
    def pending(self) -> int:
        return self.residents.waiting + sum(one.service.pending for one in self.apps)

    def stop(self) -> None:
        self.draining = True
        self.residents.stop()

    def full(self, key: str) -> Problem | None:  # noqa: ARG002  (each model's queue has its keys)
        if self.residents.waiting < self.residents.most:
            return None
        return Problem(429, "busy", "too many requests wait for a model; try again in 5 s", retry_after_s=5)

    def add(self, name: str) -> ResidentModel:
        known = next((one for one in self.residents.entries if name in one.names), None)
        if known is None:
            self.residents.entries.append(known := self.entry(self._make(name)))
        return known

    def entry(self, source: ManySource) -> ResidentModel:
        return ResidentModel([source.name], lambda entry: self._open(entry, source.load), source.need)

    def allowed(self, caller: Caller) -> list[ResidentModel]:
        return [one for one in self.residents.entries if caller.may_use(*one.names)]

    def listed(self, caller: Caller) -> list[ListedModel]:
        def context(entry: ResidentModel) -> int | None:
            ready = isinstance(entry.loaded, LoadedApp) and entry.loaded.service.ready
            return entry.loaded.host.llm.context if ready and isinstance(entry.loaded, LoadedApp) else None

        each = [(name, entry) for entry in self.allowed(caller) for name in entry.names]
        return [ListedModel(name, entry.name, context(entry)) for name, entry in each]

    def named(self, caller: Caller, name: str | None) -> ResidentModel:
        """The named entry, by default the first that the key may use. Raises Missing for those that it may not."""
        allowed = self.allowed(caller)
        if not allowed:
            raise NotReady("this server has no model; pull one")
        return allowed[0] if name is None else find(name, allowed)
