"""Replicas on a real Ray cluster of this machine, where Ray is installed (`pip install 'ray[serve]'`)."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
import yaml

from tests.cluster.test_cluster import HANGS, Served, bodies, served, stream, streams_with_kills
from tests.engines import until
from tests.processes import running
from tests.profiles import IN_CI
from tokenwright import LLM
from tokenwright.errors import RequestError

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
KILLS = 1 if IN_CI else 3  # beside the one of the other test; Ray takes seconds to start another replica
# Beside other tests Ray's workers would get hardly any time, as they run at a niceness of 15, and Ray would end what
# takes more than 5 to 15 s to start, and start it anew. At its end it would wait 30 s for its proxy.
PATIENCE = {
    "RAY_worker_niceness": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{HANGS}",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": f"{HANGS}",
    "RAY_agent_register_timeout_ms": f"{HANGS * 1000:.0f}",
}


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def processes(of):
    """The ids of processes by what they are called."""
    found = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True, check=True)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if of in line]


class OnRay(Served):
    """A server whose replicas are Ray's."""

    @property
    def replicas(self):
        return processes(f"ray::ServeReplica:tokenwright-{socket.gethostname()}-0:")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a cluster, and the port at which Serve listens."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))  # Ray writes a token there
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, seconds in PATIENCE.items():
            patch.setenv(name, seconds)
        port, http = free_ports(2)
        start = ["start", "--head", "--block", f"--port={port}", "--num-cpus=8", "--include-dashboard=false"]
        serve = [BIN / "serve", "start", "-a", f"127.0.0.1:{port}", "--http-port", http]
        with started([BIN / "ray", *start], serve):
            yield f"127.0.0.1:{port}", http


@contextmanager
def started(ray, serve):
    """A cluster on which Serve runs. On a busy machine `serve start` may find that the cluster is not there yet."""
    for _ in range(5):
        with running(ray) as head:
            try:
                while head.poll() is None:
                    if not subprocess.run(serve).returncode:
                        yield
                        return
            finally:
                head.terminate()
                head.wait(HANGS)
    raise AssertionError("no Ray cluster starts here")


@contextmanager
def application(cluster, name):
    """A Serve application, as its user runs it."""
    address, http = cluster
    command = ["run", "-a", address, "--name", name, "tokenwright.serve.cluster:app", "model=stories", "replicas=2"]
    with running([BIN / "serve", *command, "kv_memory=64MB", "timings=1", f"port={http}"]) as process:
        try:
            until = time.monotonic() + HANGS
            while True:
                assert time.monotonic() < until and process.poll() is None
                with suppress(httpx2.HTTPError):
                    if httpx2.get(f"http://127.0.0.1:{http}/ready", timeout=HANGS).status_code == 200:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{http}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(HANGS)


class At:
    """A server that is there. url: its address."""

    def __init__(self, url):
        self.url = url


def test_an_application_of_serve_writes_the_texts_of_one_process(cluster):
    asked = list(bodies(4))
    with LLM("stories", kv_memory="64MB") as llm:
        body = asked[1]
        [alone] = llm.generate(
            body["prompt"], max_tokens=body["max_tokens"], seed=body["seed"], temperature=body["temperature"]
        )
    with application(cluster, "try") as url:
        before = [stream(At(url), **body)[:2] for body in asked]
        assert before[1][0] == alone.text
        os.kill(processes("ray::ServeReplica:try:replica")[0], signal.SIGKILL)
        assert [stream(At(url), **body)[:2] for body in asked] == before


def test_kills_of_replicas_on_ray_change_no_text(cluster):
    with served(2, "--ray-address", cluster[0], "--threads", "1", kind=OnRay) as server:
        pauses = streams_with_kills(server, list(bodies(5)), KILLS)
        print(f"{KILLS} kills, {len(pauses)} streams went on elsewhere, the longest pause {pauses[-1]:.1f} s")
        before = set(server.replicas)
        server.process.send_signal(signal.SIGHUP)
        server.wait(lambda: len(now := set(server.replicas)) == 2 and not now & before)
        assert stream(server, prompt="Once", max_tokens=5)[0]
        server.stop()
    until(lambda: not server.replicas)  # the application is deleted with its server


def test_the_cluster_file_is_what_serve_reads():
    from ray.serve.schema import ServeDeploySchema

    from tokenwright.serve.cluster import app

    file = Path(__file__).parents[2] / "docs" / "ray.yaml"
    read = ServeDeploySchema(
        **yaml.safe_load(yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["serveConfigV2"])
    )
    [one] = read.applications
    assert one.import_path == f"{app.__module__}:{app.__name__}"
    assert app(one.args) is not None
    with pytest.raises(RequestError, match=r"no argument max_replica$"):
        app({**one.args, "max_replica": "8"})
