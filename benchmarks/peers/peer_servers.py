"""Other programs' servers of OpenAI's API, started from the environments of `peers_setup.py`.

Each serves the model of a shape with its own defaults, but for llama.cpp's threads: it takes half of the cores by
default, and gets all here; a stream may not be cut off by the next request, and the head computes only the rows that
are sampled. Its server answers one request at a time. The output of a server is in ROOT/peers/PEER/server.log.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.peers_setup import State
from benchmarks.serving.http_client import Address
from benchmarks.serving.served import get

STARTS_S = 600.0  # vLLM compiles for minutes
CONTEXT = 2048


@dataclass(frozen=True)
class Kind:
    """form: of the weights. command: from the environment's `bin`, the model, the name to serve it as, and the port."""

    form: str
    command: Callable[[Path, Path, str, int], Sequence[str]]
    variables: Mapping[str, str] = field(default_factory=dict)


def llama_cpp(bin_: Path, model: Path, name: str, port: int, context: int = CONTEXT) -> Sequence[str]:
    cores = str(len(os.sched_getaffinity(0)))
    where = ("--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--model_alias", name)
    threads = ("--n_threads", cores, "--n_threads_batch", cores)
    more = ("--n_ctx", str(context), "--interrupt_requests", "False", "--logits_all", "False")
    return (str(bin_ / "python"), "-m", "llama_cpp.server", *where, *threads, *more)


def vllm(bin_: Path, model: Path, name: str, port: int) -> Sequence[str]:
    where = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", name)
    more = ("--model", str(model), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT))
    return (str(bin_ / "python"), "-m", "vllm.entrypoints.openai.api_server", *where, *more)


SERVERS: Mapping[str, Kind] = {
    "llama.cpp": Kind("q8_0", llama_cpp),
    "vllm": Kind("bf16", vllm, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}),  # GiB
}


class PeerServer:
    """A peer's server, once it answers. address: host and port. Use it in a `with`.

    command: from its port. variables: of its environment, beside ours. Raises SystemExit, with the reason, if it does
    not start.
    """

    def __init__(
        self, peer: str, command: Callable[[int], Sequence[str]], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self.address: Address = ("127.0.0.1", port)
        with log.open("w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                command(port),
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )
        try:
            self._wait(peer, log)
        except BaseException:
            self._end()
            raise

    @classmethod
    def of_shape(cls, peer: str, shape: str, served: str, root: Path) -> PeerServer:
        """It serves the model of a shape. Raises SystemExit for a peer that is not set up."""
        kind, state = SERVERS[peer], State.read(root, peer)
        if (why := state.why_not(shape, kind.form)) is not None:
            raise SystemExit(f"{peer}: {why}")
        model, bin_ = state.model(shape, kind.form), state.python().parent
        log = state.folder / "server.log"
        return cls(peer, lambda port: kind.command(bin_, model, served, port), log, kind.variables)

    def _wait(self, peer: str, log: Path) -> None:
        until = time.monotonic() + STARTS_S
        while not self._answers():
            if time.monotonic() > until or self.process.poll() is not None:
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
                raise SystemExit(f"{peer} does not start; {log} ends with: {' / '.join(lines)}")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            return get(self.address, "/v1/models")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _end(self) -> None:
        """End it and the processes that it has started."""
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
            try:
                os.killpg(self.process.pid, number)  # a session of its own
            except ProcessLookupError:
                break
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
