"""Replicas that listen for routers, in processes of their own that are started again, as Ray Serve does it."""

import asyncio
import random
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.engines import until
from tests.processes import running
from tokenwright import LLM, SamplingParams
from tokenwright.cluster import ray_replicas, served_replica
from tokenwright.cluster.cluster_llm import ReplicatedModel
from tokenwright.cluster.ray_replicas import RayReplicas, desired_replicas
from tokenwright.cluster.replica import PageNews, ReplicaTexts
from tokenwright.cluster.served_replica import CHALLENGE, PROOF, WELCOME, ReplicaServer, proof_of
from tokenwright.engine.loop import Inbox
from tokenwright.errors import EngineError, RequestError
from tokenwright.serve.cluster import app
from tokenwright.serve.settings import Settings

SECRET = b"s" * 32
HANGS = 300.0  # seconds; only a hang takes so long
PROMPTS = ["Once upon a time there was a", "The little dog", "Lily and Tom went to the", "One day, a big bird"]
REPLICA = """
import sys
from tokenwright import LLM
from tokenwright.cluster.served_replica import ReplicaServer
llm = LLM("stories", kv_memory="32MB", threads=1)
print(*ReplicaServer(llm, bytes.fromhex(sys.argv[1]), "127.0.0.1").address, flush=True)
sys.stdin.read()
"""


class FakeServe:
    """Keeps a number of replicas alive, and says where one of them listens; in the place of a deployment's handle."""

    def __init__(self, replicas):
        self.processes = {}
        self.address = SimpleNamespace(remote=lambda: SimpleNamespace(result=self.result))
        self.ended = threading.Event()
        self.keepers = [threading.Thread(target=self.keep, args=(at,)) for at in range(replicas)]
        for keeper in self.keepers:
            keeper.start()

    def keep(self, at):
        while not self.ended.is_set():
            command = [sys.executable, "-c", REPLICA, SECRET.hex()]
            with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                host, port = (process.stdout.readline() or "- 0").split()
                self.processes[at] = (host, int(port)), process
                while process.poll() is None and not self.ended.wait(0.05):
                    pass

    def result(self, timeout_s):
        address, process = random.choice(list(self.processes.values()))
        if process.poll() is not None:
            raise ConnectionError("this replica has ended")
        return address

    def close(self):
        self.ended.set()
        for keeper in self.keepers:
            keeper.join()


class EndedLLM:
    """An LLM whose engine has failed since its server began to listen."""

    listened = False

    def inspect(self, _):
        if self.listened:
            raise EngineError("it has failed")
        self.listened = True


def test_a_connection_that_cannot_be_accepted_is_not_the_last(monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]
    monkeypatch.setattr(served_replica, "AGAIN_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", lambda one: accept(one) if not failures else failed(failures.pop()))
    server = ReplicaServer(EndedLLM(), SECRET, "127.0.0.1")
    with socket.create_connection(server.address, timeout=HANGS) as router:
        assert router.recv(CHALLENGE)
    server.close()


def failed(error):
    raise error


def test_a_replica_that_hangs_when_it_is_linked_keeps_no_other_waiting(monkeypatch):
    monkeypatch.setattr(ray_replicas, "ASK_S", 0.1)
    monkeypatch.setattr(ray_replicas, "AGAIN_S", 0.01)
    hangs = socket.create_server(("127.0.0.1", 0))
    server = ReplicaServer(EndedLLM(), SECRET, "127.0.0.1")
    addresses = [server.address, hangs.getsockname()]
    handle = SimpleNamespace(
        address=SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda timeout_s: addresses.pop()))
    )

    async def link():
        found = await RayReplicas(handle, 1, SECRET).start(0)
        await found.close()
        return found.name

    assert asyncio.run(link()) == f"127.0.0.1:{server.address[1]}"
    server.close()
    hangs.close()


@pytest.fixture(scope="module")
def fake():
    found = FakeServe(2)
    until(lambda: len(found.processes) == 2)
    yield found
    found.close()


@pytest.fixture
def ingress(fake):
    made = []

    def open_one(secret=SECRET):
        wanted = ReplicatedModel("stories", {}, {}, 1, secret)
        made.append(wanted.opened(RayReplicas(fake, 2, secret)))
        until(lambda: len(made[-1].llm_engine.loop.names) == 2)
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def alone():
    with LLM("stories", kv_memory="32MB") as llm:
        yield [llm.generate(one, max_tokens=150, seed=7, temperature=1.0)[0].text for one in PROMPTS]


def test_killed_and_replaced_replicas_change_no_text(fake, ingress, alone):
    llm, found = ingress(), {}

    def ask(at):
        found[at] = [llm.generate(one, max_tokens=150, seed=7, temperature=1.0)[0].text for one in PROMPTS]

    def asked(disturb):
        clients = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
        for client in clients:
            client.start()
        disturb()
        for client in clients:
            client.join()
        assert [found.pop(at) for at in range(4)] == [alone] * 4
        until(lambda: len(llm.llm_engine.loop.names) == 2)

    def kill():
        busy = llm.llm_engine.loop.dispatcher
        until(lambda: busy.members and busy.texts_of(busy.members[0]))
        before = fake.processes[0][1]
        before.kill()
        until(lambda: fake.processes[0][1] is not before)

    asked(kill)
    before = {process.pid for _, process in fake.processes.values()}
    asked(llm.llm_engine.loop.roll)
    until(lambda: before.isdisjoint(process.pid for _, process in fake.processes.values()))
    until(lambda: len(llm.llm_engine.loop.names) == 2)


def test_a_second_router_knows_what_is_cached_and_outlives_the_first(fake, ingress):
    first, prompt = ingress(), PROMPTS[0] * 20
    first.generate(prompt, max_tokens=1)
    second = ingress()
    until(lambda: sum(sum(map(len, one.routed.pages.reported)) for one in second.llm_engine.loop.dispatcher.members))
    handle = second.stream(prompt, max_tokens=400, ignore_eos=True)
    next(handle)
    first.close()
    assert sum(1 for _ in handle) >= 100
    again = second.generate(prompt, max_tokens=1)[0]
    assert again.usage.reused_tokens >= len(prompt.split()) // 16 * 16


def test_a_router_that_is_gone_leaves_no_text(fake, ingress):
    first, second = ingress(), ingress()

    def free():
        second.generate("a", max_tokens=1)  # replicas report what they have at each step
        time.sleep(0.05)
        members = second.llm_engine.loop.dispatcher.members
        return all(one.available == sum(group.pages for group in second.llm_engine.shape.groups) for one in members)

    params = SamplingParams(max_tokens=400, ignore_eos=True)
    for prompt in PROMPTS:
        [handle] = first.submit([first.llm_engine.inputs.build(prompt, params)], inbox := Inbox())
        inbox.get()
        handle.pause()  # so it has its pages until it is cancelled, and none where it begins again
    until(
        lambda: (
            not free() and sum(one.routed.others for one in second.llm_engine.loop.dispatcher.members) == len(PROMPTS)
        )
    )
    for seat in first.llm_engine.loop._supervisor.seats:
        first.llm_engine.loop._asyncio.call_soon_threadsafe(seat.link._writer.transport.abort)
    until(free)


def test_who_does_not_know_the_secret_is_turned_away():
    with LLM("stories", kv_memory="32MB") as llm:
        server = ReplicaServer(llm, SECRET, "127.0.0.1")
        for secret, welcome in ((b"t" * 32, b""), (SECRET, WELCOME)):
            with socket.create_connection(server.address) as connection, connection.makefile("rb") as stream:
                connection.sendall(proof_of(secret, stream.read(CHALLENGE)))
                assert stream.read(1) == welcome
        server.close()
    assert len(proof_of(SECRET, b"")) == PROOF


def test_what_ray_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"pip install 'ray\[serve\]'"):
        app({})
    with pytest.raises(RequestError, match="--replicas"):
        Settings(ray_address="auto")


def context(replicas, waiting, kv, fewest=1, most=9):
    metrics = {name: dict(enumerate(values)) for name, values in (("waiting", waiting), ("kv", kv))}
    return SimpleNamespace(
        current_num_replicas=replicas,
        aggregated_metrics=metrics,
        capacity_adjusted_min_replicas=fewest,
        capacity_adjusted_max_replicas=most,
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (context(2, [4, 4], [0, 0]), 2),
        (context(2, [8, 8], [0.1, 0.1]), 4),
        (context(2, [30, 30], [0, 0]), 9),
        (context(4, [0, 0, 0, 0], [0.2, 0.2, 0.2, 0.2]), 1),
        (context(4, [0, 0, 0, 0], [0.6, 0.6, 0.4, 0.4], fewest=3), 3),
        (context(4, [0, 0, 0, 0], [0.82, 0.84, 0.86, 0.8]), 4),
        (context(3, [], []), 1),
    ],
)
def test_replicas_follow_waiting_texts_and_kv_use(given, wanted):
    assert desired_replicas(given)[0] == wanted


def test_a_number_that_a_router_gives_to_two_texts_ends_its_connection():
    """The second text's end made the engine's thread write a traceback for each."""
    engine = SimpleNamespace(pool=None, scheduler=SimpleNamespace(sequences={}))
    texts = ReplicaTexts(SimpleNamespace(engine=engine, llm_engine=SimpleNamespace(expert_counts={})), None, None)
    texts.expect(1)
    with pytest.raises(ValueError, match="the text 1 is begun twice"):
        texts.expect(1)


def test_counts_of_experts_begin_when_a_router_comes():
    """One that has lost its connection for a moment would add all of them again."""
    pool, counts, reports = SimpleNamespace(available=1, cached=0), {"named": 7}, []
    engine = SimpleNamespace(pool=pool, scheduler=SimpleNamespace(sequences={}))
    llm = SimpleNamespace(engine=engine, llm_engine=SimpleNamespace(expert_counts=counts))
    texts = ReplicaTexts(llm, PageNews(), reports.append)
    texts.report_pages()
    counts["named"] = 12
    texts.report_pages()
    assert [one.experts for one in reports] == [{"named": 0}, {"named": 5}]
