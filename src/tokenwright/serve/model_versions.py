"""A model in replicas whose files may be replaced while it is served: SIGHUP opens the new files and switches to them.

Each version has an app, a service and replicas, so one version serves a request from start to end, and no version
finds another's cached pages.
"""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenwright.errors import TokenwrightError
from tokenwright.serve.app import QUEUED, Served, add_access_log, limits_of, living, names_of, new_app, refusing
from tokenwright.serve.fleet import LoadedApp
from tokenwright.serve.openai.responses.stored import StoredResponses
from tokenwright.serve.service.metrics import Metrics
from tokenwright.serve.service.model_host import Load, uncollected
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import Problem
from tokenwright.serve.transport.guard import Guard, Policy

if TYPE_CHECKING:
    from tokenwright.cluster.cluster_loop import ClusterLoop
    from tokenwright.cluster.processes import ReplicaSource

POLL_S = 0.05

log = logging.getLogger(__name__)


class ModelVersions:
    """The versions of a model. The present one takes requests; its `number` starts at 1. source: runs in a thread."""

    def __init__(self, source: "Callable[[], ReplicaSource]", open_: Callable[[Load], LoadedApp]) -> None:
        self.number = 1
        self.present = open_(lambda report: source().load(report))
        self._source = source
        self._open = open_
        self._others: list[LoadedApp] = []
        self._requests: Counter[LoadedApp] = Counter()
        self._requested = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False

    @property
    def services(self) -> list[Service]:
        return [one.service for one in (*self._others, self.present)]

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        for service in self.services:
            service.draining = draining

    @property
    def failure(self) -> Exception | None:
        return self.present.service.failure

    @property
    def pending(self) -> int:
        return sum(service.pending for service in self.services)

    def full(self, key: str) -> Problem | None:
        return self.present.service.full(key)

    def stop(self) -> None:
        for service in self.services:
            service.stop()

    def close(self) -> None:
        for one in (*self._others, self.present):
            one.free()
            one.service.close()

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        version = self.present
        self._requests[version] += 1
        try:
            await version.app(scope, receive, send)
        finally:
            self._requests[version] -= 1

    def ask(self) -> None:
        """Request new replicas, of new files if there are any. Any thread and signal handler may call it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: SIGHUP may come at any time
                self._loop.call_soon_threadsafe(self._requested.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                await self.present.settled()
                await self._replace()
            except TokenwrightError as error:
                log.error("the new files cannot be opened, so the model stays: %s", error)
            except Exception:
                log.exception("the new files cannot be opened, so the model stays")

    async def _replace(self) -> None:
        """Replace all replicas; by those of a new version if the files have changed."""
        llm, loop = self.present.host.llm, _loop_of(self.present)
        if not await asyncio.to_thread(self._source().changed, llm):
            loop.roll()
            return
        log.warning("the model's files have changed and are opened")
        former, new = self.present, await self._open_new()
        new.service.draining = self.draining
        self.number += 1
        self.present, self._others = new, [former]
        log.warning("new requests go to the new model; %d continue with the former one", former.service.pending)
        await loop.retire(_loop_of(new))
        while self._requests[former] or former.service.pending:
            await asyncio.sleep(POLL_S)
        self._others.remove(former)
        del self._requests[former]
        await asyncio.to_thread(_free, former)
        log.warning("the model has been changed")

    async def _open_new(self) -> LoadedApp:
        new = await asyncio.to_thread(self._open, self._source().again)
        self._others.append(new)
        new.start()
        try:
            await new.settled()
            await new.service.opened()
        except Exception:
            self._others.remove(new)
            await asyncio.to_thread(_free, new)
            raise
        return new


def _loop_of(version: LoadedApp) -> "ClusterLoop":
    loop = version.host.router
    assert loop is not None, "its source opened replicas"
    return loop


def _free(version: LoadedApp) -> None:
    version.service.stop()
    gc.unfreeze()  # let the collector see the old version's objects, which `uncollected` froze
    version.close()
    gc.freeze()


class _Switch:
    def __init__(self, app: ASGIApp, versions: ModelVersions) -> None:
        self._app = app
        self._versions = versions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await self._versions.pass_on(scope, receive, send)


def make_versions_app(
    name: str, source: "Callable[[], ReplicaSource]", policy: Policy, page: Path | None, served: Served | None = None
) -> FastAPI:
    """The app; `app.state.service` is its ModelVersions. name: the model's, if `served` has no names."""
    served = served or Served()
    metrics, stored = Metrics(), StoredResponses(served.stored_responses)
    names, limits = names_of(served, name), limits_of(served, policy)

    def open_(load: Load) -> LoadedApp:
        return LoadedApp(name, names, uncollected(load), limits, metrics, page, stored, served.apis)

    versions = ModelVersions(source, open_)
    metrics.watch(lambda: versions.services, lambda: versions.number)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        versions.present.start()  # after the server has set its signal handlers, which loading Ray changes and restores
        async with living(served, lambda: not versions.pending, versions.stop, versions.close, versions.run()):
            yield

    app = new_app(lifespan=lifespan, openapi_url=None)
    app.state.service, app.state.renew = versions, versions.ask
    app.add_middleware(_Switch, versions=versions)
    app.add_middleware(Guard, policy=policy, answer=refusing(metrics), queued=QUEUED, full=versions.full)
    add_access_log(app, served, metrics)
    return app
