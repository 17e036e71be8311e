"""Replicas on Ray Serve, on any machines of a Ray cluster (`pip install 'ray[serve]'`).

    Serve ──► ReplicaDeployment, on some machine ──► ReplicaServer
    RayReplicas.start ──► Serve's handle: where does one listen? ──► linked ──► RemoteLink

Serve places, watches, restarts and scales replicas. Texts use the router's own connections, because Serve's proxies end
a stream without an error when its replica dies.
"""

import asyncio
import ctypes
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any

from tokenwright.backends.device import compute_with
from tokenwright.cluster.cluster_llm import ReplicatedModel, plain
from tokenwright.cluster.processes import RemoteLink, linked
from tokenwright.cluster.replica_messages import OptionValue
from tokenwright.cluster.served_replica import ReplicaServer
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.llm.llm import LLM
from tokenwright.llm.model import LoadedModel
from tokenwright.sampling_params import check_unicode

DEPLOYMENT = "replica"
ASKED_AT_ONCE = 1000
HEALTH_S = 1.0  # between Serve's health checks of a replica
ASK_S = 10.0  # for Serve to name an address, and for a connection to it
AGAIN_S = 0.5  # before the next try, if all replicas are linked or none answers
TRIES = 2  # for each replica, since Serve's handle chooses one at random
WAITING = 4.0  # waiting texts a replica, for autoscaling; docs/kubernetes.yaml has the same marks
KV_USE = 0.8  # of a replica's pages
CLOSE = 0.1  # to a mark: the number of replicas stays

log = logging.getLogger(__name__)


class ReplicaDeployment:
    def __init__(
        self,
        model: str,
        loading: Mapping[str, OptionValue],
        engine: Mapping[str, OptionValue],
        threads: int,
        secret: bytes,
    ) -> None:
        from ray.util import get_node_ip_address

        compute_with(threads)
        of_loading: dict[str, Any] = dict(loading)
        of_engine: dict[str, Any] = dict(engine)
        self._llm = LLM(LoadedModel(model, **of_loading), **of_engine)
        self._server = ReplicaServer(self._llm, secret, get_node_ip_address())

    async def address(self) -> tuple[str, int]:
        return self._server.address

    async def check_health(self) -> None:
        """Serve's hook: raises if the replica must be replaced."""
        self._llm.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:  # Serve's hook, for `desired_replicas`
        occupancy = self._llm.llm_engine.occupancy
        waiting = self._llm.inspect(lambda engine: len(engine.scheduler.waiting))
        return {"waiting": float(waiting), "kv": 1 - occupancy.available / max(1, occupancy.pages)}


class RayReplicas:
    """Links at most `seats` replicas of Serve's deployment `handle`. close: ends the deployment."""

    def __init__(self, handle: Any, seats: int, secret: bytes, close: Callable[[], None] = lambda: None) -> None:
        self._handle = handle
        self._seats = seats
        self._secret = secret
        self._close = close
        self._seeking = asyncio.Lock()
        self._linked: set[tuple[str, int]] = set()
        self._foreign: set[tuple[str, int]] = set()  # of an earlier deployment of this name

    def __len__(self) -> int:
        return self._seats

    async def start(self, number: int) -> RemoteLink:
        log.debug("seat %d waits for a replica", number)
        async with self._seeking:
            while True:
                for _ in range(TRIES * self._seats):
                    if (link := await self._next()) is not None:
                        return link
                await asyncio.sleep(AGAIN_S)

    async def _next(self) -> RemoteLink | None:
        try:
            address = await asyncio.to_thread(self._ask)
            if address in self._linked or address in self._foreign:
                return None
            async with asyncio.timeout(ASK_S):  # else one that hangs blocks all seats
                link = await linked(address, self._secret, lambda: self._linked.discard(address))
        except Exception as error:  # Serve's own errors; OSError: the replica has ended
            log.info("no replica answers: %s", error)
            await asyncio.sleep(AGAIN_S)
            return None
        (self._foreign if link is None else self._linked).add(address)
        return link

    def _ask(self) -> tuple[str, int]:
        host, port = self._handle.address.remote().result(timeout_s=ASK_S)
        return host, port

    def close(self) -> None:
        self._close()


def desired_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: bring waiting texts and KV use to their marks."""
    count = context.current_num_replicas
    marks = {"waiting": WAITING, "kv": KV_USE}
    reported = context.aggregated_metrics or {}
    load = max(fmean((reported.get(name) or {None: 0.0}).values()) / mark for name, mark in marks.items())
    wanted = count if abs(load - 1) <= CLOSE else ceil(count * load)
    return max(context.capacity_adjusted_min_replicas, min(context.capacity_adjusted_max_replicas, wanted)), {}


@dataclass(frozen=True, slots=True)
class ServeApplication:
    """replicas: how many, or the fewest and the most."""

    wanted: ReplicatedModel
    replicas: int | tuple[int, int]

    @property
    def seats(self) -> int:
        return self.replicas if isinstance(self.replicas, int) else self.replicas[1]

    def bound(self) -> Any:
        from ray import serve

        wanted, threads = self.wanted, self.wanted.threads or 1
        check_unicode("model", wanted.model)
        engine = plain(wanted.engine)
        if memory := wanted.engine.get("kv_memory"):  # of all replicas, as with processes
            engine |= {"kv_memory": max(1, memory // self.seats)}
        gpus = str(wanted.loading.get("device", "")).startswith(("cuda", "gpu"))
        made = serve.deployment(ReplicaDeployment).options(
            name=DEPLOYMENT,
            ray_actor_options={"num_cpus": threads, "num_gpus": int(gpus)},
            health_check_period_s=HEALTH_S,
            max_ongoing_requests=ASKED_AT_ONCE,
            logging_config={"enable_access_log": False},
            **self._count(),
        )
        return made.bind(wanted.model, wanted.loading_of(self.seats), engine, threads, wanted.secret)

    def _count(self) -> dict[str, Any]:
        if isinstance(self.replicas, int):
            return {"num_replicas": self.replicas}
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

        policy = AutoscalingPolicy(policy_function=desired_replicas)
        fewest, most = self.replicas
        return {"autoscaling_config": AutoscalingConfig(min_replicas=fewest, max_replicas=most, policy=policy)}

    def launcher(self, handle: Any, close: Callable[[], None] = lambda: None) -> RayReplicas:
        return RayReplicas(handle, self.seats, self.wanted.secret, close)


def check_ray() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise RequestError("--ray-address needs Ray: pip install 'ray[serve]'", "ray_address") from error


def open_on_ray(model: str, replicas: int, address: str, name: str, options: Mapping[str, Any], **more: Any) -> LLM:
    """An LLM over replicas on a Ray cluster. options: LLM's, and `threads`. more: of `ReplicatedModel.opened`.

    address: local for a new cluster on this machine. name: the application's, which replaces an earlier one.
    """
    from ray import serve

    try:
        _connect(address)
    except (ConnectionError, ValueError) as error:
        raise RequestError(f"--ray-address {address}: {error}", "ray_address") from error
    wanted = ServeApplication(ReplicatedModel.of(model, options), replicas)
    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(wanted.bound(), name=name, route_prefix=None)
    except RuntimeError as error:
        raise CheckpointError(f"Ray Serve cannot start the replicas: {error}") from error
    return wanted.wanted.opened(wanted.launcher(handle, lambda: _ended(name)), **more)


def _connect(address: str) -> None:
    """Call `ray.init` in a thread that stays: Linux kills a local cluster with the thread that started it."""
    import ray

    connected: Future[None] = Future()

    def stay() -> None:
        try:
            with _sigterm_kept():
                ray.init(address=address, include_dashboard=False if address == "local" else None)
        except BaseException as error:
            connected.set_exception(error)
            return
        connected.set_result(None)
        threading.Event().wait()

    threading.Thread(target=stay, name="ray", daemon=True).start()
    connected.result()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep Python's handler of SIGTERM: Ray's core sets one under it that aborts the process 3 s after the signal."""
    handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
    handle = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(("PyOS_setsig", ctypes.pythonapi))
    before = handler(signal.SIGTERM)
    try:
        yield
    finally:
        handle(signal.SIGTERM, before)


def _ended(name: str) -> None:
    from ray import serve

    serve.delete(name)
