"""`tokenwright serve --replicas`: processes that are killed under load, and clients who do not notice."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from tests.engines import until
from tests.processes import end
from tokenwright import LLM
from tokenwright.cluster.processes import open_cluster, shares
from tokenwright.errors import RequestError
from tokenwright.serve.settings import Settings

PROMPTS = ["Once upon a time there was a", "The little dog", "Lily and Tom went to the", "One day, a big bird"]
pytestmark = pytest.mark.slow

HANGS = 300.0  # seconds; only a hang takes so long


class Served:
    """A server of replicas in a process of its own."""

    def __init__(self, *flags, model="stories", program=("-m", "tokenwright")):
        options = ["--port", "0", "--kv-memory", "64MB", *flags]
        command = [sys.executable, *program, "serve", str(model), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = []
        self.url = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.wait(lambda: self.url)
        self.wait(lambda: self.get("/ready").status_code == 200)

    def read(self):
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"http://[\d.:]+", line):
                self.url = self.url or found[0]

    def wait(self, known):
        until = time.monotonic() + HANGS
        while not known():
            assert time.monotonic() < until and self.process.poll() is None, self.said
            time.sleep(0.05)

    def get(self, path):
        return httpx2.get(self.url + path, timeout=HANGS)

    @property
    def replicas(self):
        """The processes that have the model."""
        found = subprocess.run(  # of the server's own children
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        return [int(line.split()[0]) for line in found.stdout.splitlines() if "cluster.replica" in line]

    @property
    def ready(self):
        """Those of them that take texts: the oldest ones, unless one died that is older."""
        started = {}
        for pid in self.replicas:
            with suppress(OSError):  # it has just died
                started[pid] = int(Path(f"/proc/{pid}/stat").read_text().split()[21])
        return sorted(started, key=started.__getitem__)

    def gauge(self, name):
        return float(re.search(rf"^{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)[1])

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(HANGS) == 0, self.said


@contextmanager
def served(replicas, *flags, kind=Served, **options):
    server = kind("--replicas", str(replicas), *flags, **options)
    try:
        server.wait(lambda: server.gauge("tokenwright_replicas") == replicas)
        yield server
    finally:
        end(server.process)
        server.reader.join()
        server.process.stderr.close()


@pytest.fixture(scope="module")
def server():
    with served(2) as found:
        yield found


@pytest.fixture(scope="module")
def llm():
    with LLM("stories", kv_memory="64MB") as found:
        yield found


def lines_of(response):
    """The lines of a stream. `iter_lines` also splits at other characters, which a text may have."""
    left = ""
    for piece in response.iter_text():
        *lines, left = (left + piece).split("\n")
        yield from lines


def stream(server, **body):
    """The text of a streamed completion, its log-probabilities and its timings. Raises for an error in the stream."""
    text, logprobs, timings, longest, last = "", [], None, 0.0, None
    body = {"model": "stories", "stream": True, "return_timings": True, **body}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANGS) as response:
        assert response.status_code == 200, response.read()
        for line in lines_of(response):
            if line.startswith("data: {"):
                now = time.monotonic()
                longest, last = max(longest, now - (last or now)), now
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                timings = event.get("timings", timings)
                for choice in event["choices"]:
                    text += choice["text"]
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    return text, logprobs, timings | {"pause_s": longest}


def bodies(requests):
    """Greedy and seeded requests, with stop strings, log-probabilities and grammars."""
    for at in range(requests):
        body = {"prompt": PROMPTS[at % 4], "max_tokens": 120, "seed": at, "temperature": (0, 1.0)[at % 2]}
        if at % 5 == 2:
            body |= {"logprobs": 2, "frequency_penalty": 0.3}
        if at % 5 == 3:
            body |= {"stop": [" the end", " very", "xyzw"], "min_tokens": 20}
        if at % 5 == 4:
            body |= {"structured_outputs": {"regex": "[a-z ]{120,300}"}}
        yield body


def streams_with_kills(server, asked, least):
    """Stream requests by six clients, again and again, until so many replicas were killed; the pauses of moved streams.

    Every stream must be what it is without kills.
    """
    expected = [stream(server, **body)[:2] for body in asked]
    kills, pauses, done = 0, [], threading.Event()

    def enough():
        return kills >= least and bool(pauses)

    def kill():
        nonlocal kills
        try:
            while not done.is_set():
                assert kills < least + 100, "no kill met a text"
                server.wait(lambda: enough() or server.gauge("tokenwright_replicas") > 1)
                if enough():
                    break
                for pid in server.ready[kills % 2 :][:1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        kills += 1
                time.sleep(0.3)
        finally:
            done.set()

    def ask(_):
        while not done.is_set():
            for body, before in zip(asked, expected, strict=True):
                text, logprobs, timings = stream(server, **body)
                assert (text, logprobs) == before
                pauses.extend([timings["pause_s"]] * min(1, timings["moves"]))

    with ThreadPoolExecutor(7) as threads:
        killer = threads.submit(kill)
        try:
            list(threads.map(ask, range(6)))
        finally:
            done.set()
        killer.result()
    assert kills >= least
    return sorted(pauses)


def test_kills_under_load_change_no_text(server):
    assert streams_with_kills(server, list(bodies(5)), 4), "no stream was hit"


def test_a_text_is_the_one_of_an_engine_in_one_process(server, llm):
    for prompt in PROMPTS:
        text, _, timings = stream(server, prompt=prompt, max_tokens=80, seed=5, temperature=1.0)
        assert text == llm.generate(prompt, max_tokens=80, seed=5, temperature=1.0)[0].text
        assert timings["moves"] == 0


def test_several_texts_of_a_request_and_the_best_of_them(server, llm):
    body = {"model": "stories", "prompt": PROMPTS[0], "max_tokens": 30, "seed": 3, "temperature": 1.0}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body | {"n": 3}, timeout=HANGS).json()
    [alone] = llm.generate(PROMPTS[0], max_tokens=30, seed=3, temperature=1.0, n=3)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in alone.choices]
    answer = httpx2.post(f"{server.url}/v1/completions", json=body | {"best_of": 4}, timeout=HANGS).json()
    [alone] = llm.generate(PROMPTS[0], max_tokens=30, seed=3, temperature=1.0, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == [alone.text]


def test_a_draft_model_changes_no_text_and_counts_in_its_bytes(llm):
    with open_cluster("stories", 1, {"draft": "stories", "kv_memory": 64 << 20}) as cluster:
        for _ in range(2):  # the first text tells the second
            [one] = cluster.generate(PROMPTS[0], max_tokens=30, seed=3, temperature=1.0)
        assert cluster.kv_bytes(10) == 2 * llm.kv_bytes(10)
    assert one.text == llm.generate(PROMPTS[0], max_tokens=30, seed=3, temperature=1.0)[0].text
    assert 0 < one.usage.accepted_tokens <= one.usage.drafted_tokens


def test_embeddings_and_prompt_logprobs_are_those_of_one_process(server, llm):
    answer = httpx2.post(
        f"{server.url}/v1/embeddings", json={"model": "stories", "input": PROMPTS}, timeout=HANGS
    ).json()
    for one, row in zip(answer["data"], llm.embed(PROMPTS, normalize=True), strict=True):
        assert one["embedding"] == pytest.approx([float(number) for number in row], abs=1e-7)
    body = {"model": "stories", "prompt": PROMPTS[0], "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS).json()
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[1:-1] == pytest.approx([float(one) for one in llm.score(PROMPTS[0])], abs=1e-6)


def test_a_conversation_finds_its_pages_again(server):
    prompt = PROMPTS[0] * 8
    for turn in range(4):
        text, _, timings = stream(server, prompt=prompt, max_tokens=40, temperature=0)
        if turn:
            assert timings["cached_tokens"] > timings["prompt_tokens"] - 60
        prompt += text


def test_causes_and_pins_are_those_of_one_process(server, llm):
    """The same prompts one after another: the reports are equal, field by field."""
    asked, causes = "A tale of a hen and of the pond, where all of her ducks swim in the rain. " * 12, []
    for prompt in (
        asked,
        asked.replace("ducks swim in the rain. A", "geese swim in the rain. A"),
        asked[:-200] + "A fox came by, and nobody swam.",
    ):
        own = llm.generate(prompt, max_tokens=4, temperature=0)[0].cache
        _, _, timings = stream(server, prompt=prompt, max_tokens=4, temperature=0)
        found = timings["cache"]
        assert (found["cause"], found["reused"], found["recomputed"]) == (own.cause, own.reused, own.again)
        told = own.at, own.part or None, own.before or None, own.now or None
        assert (found["at"], found["part"], found["before"], found["now"]) == told
        causes.append((own.cause, (own.at or 0) > 150))
    assert ("message_changed", True) in causes, causes
    part = {"type": "text", "text": asked, "cache_control": {"type": "ephemeral"}}
    body = {"model": "stories", "messages": [{"role": "user", "content": [part]}], "prompt_cache_key": "own"}
    reply = httpx2.post(f"{server.url}/v1/chat/completions", json=body | {"max_tokens": 2}, timeout=HANGS).json()
    assert reply["usage"]["prompt_tokens_details"]["pinned_tokens"] > 150
    assert httpx2.delete(f"{server.url}/v1/cache/sessions/own", timeout=HANGS).json()["id"] == "own"


def test_a_prompt_that_is_too_long_is_refused(server):
    body = {"model": "stories", "prompt": [1] * 5000, "max_tokens": 3}
    long = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)
    assert long.status_code == 400 and "context" in long.text


def test_a_client_that_leaves_frees_its_place(server):
    body = {"model": "stories", "prompt": PROMPTS[1], "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANGS) as response:
        next(response.iter_lines())
    server.wait(lambda: server.gauge("tokenwright_requests_running") == 0)
    server.wait(lambda: server.gauge("tokenwright_kv_usage_ratio") == 0)


def test_sighup_replaces_all_replicas_and_loses_no_request(server):
    server.wait(lambda: server.gauge("tokenwright_replicas") == 2)
    before = set(server.replicas)
    asked = list(bodies(5))
    expected = [stream(server, **body)[:2] for body in asked]
    stopped = threading.Event()
    with ThreadPoolExecutor(3) as clients:

        def asking(_):
            got = []
            while not stopped.is_set():
                got += [stream(server, **body)[:2] == text for body, text in zip(asked, expected, strict=True)]
            return got

        running = [clients.submit(asking, at) for at in range(3)]
        server.process.send_signal(signal.SIGHUP)
        try:
            server.wait(lambda: len(now := set(server.replicas)) == 2 and not now & before)
        finally:
            stopped.set()
        assert all(all(one.result()) for one in running)


def test_a_text_with_which_every_replica_dies_fails_and_says_so():
    with served(1, "--retries", "0") as server:
        body = {"model": "stories", "prompt": PROMPTS[0], "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=HANGS) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.replicas[0], signal.SIGKILL)
            rest = "".join(lines)
        assert re.search(r"1 replicas died with this text.*\d+ tokens of it were delivered", rest), rest[-500:]
        assert stream(server, prompt=PROMPTS[0], max_tokens=5)[0], "another replica serves the next one"
        server.stop()


def test_a_stopped_replica_is_ended_and_others_go_on_with_its_texts():
    with served(2, "--heartbeat", "2") as server:
        body = {"prompt": PROMPTS[0], "max_tokens": 300, "ignore_eos": True, "seed": 3, "temperature": 1.0}
        expected, ended = stream(server, **body)[:2], threading.Event()

        def asking():
            while not ended.is_set():
                assert stream(server, **body)[:2] == expected

        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(asking) for _ in range(4)]
            try:
                server.wait(lambda: server.gauge("tokenwright_requests_running") > 1)
                os.kill(stopped := server.ready[0], signal.SIGSTOP)
                server.wait(lambda: stopped not in server.replicas)
            finally:
                ended.set()
            assert [one.result() for one in asked] == [None] * 4
        assert any("sent nothing" in line for line in server.said)
        server.stop()


# The router's own fault, once a text has 20 tokens, and the engine's.
PLANTED = """
from tokenwright.__main__ import main
from tokenwright.cluster.dispatcher import Dispatcher

real = Dispatcher.report

def report(self, member, sent):
    real(self, member, sent)
    if any(len(text.written) > 20 for _, text in self._texts.values()):
        raise LookupError("planted")

Dispatcher.report = report
main()
"""


def test_a_router_that_fails_ends_the_server_with_a_code():
    """So that what has started it starts it again; the fault is in its log, whole."""
    with served(2, program=("-c", PLANTED)) as server:
        assert stream(server, prompt=PROMPTS[0], max_tokens=5)[0]
        body = {"model": "stories", "prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS)
        assert answer.status_code == 500
        assert server.process.wait(HANGS) == 1
        server.reader.join()
        said = "".join(server.said)
        assert "the router has failed" in said and "in report" in said and said.count("LookupError: planted") > 1
    assert not server.replicas


PLANTED_ENGINE = """
from tokenwright.__main__ import main
from tokenwright.engine import Scheduler

real = Scheduler.schedule

def schedule(self):
    if any(len(one.written) > 20 for one in self.sequences.values()):
        raise LookupError("planted")
    return real(self)

Scheduler.schedule = schedule
main()
"""


def test_an_engine_that_fails_ends_the_server_with_a_code():
    server = Served(program=("-c", PLANTED_ENGINE))
    try:
        body = {"model": "stories", "prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True}
        assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS).status_code == 500
        assert server.process.wait(HANGS) == 1
        server.reader.join()
        assert "LookupError: planted" in "".join(server.said)
    finally:
        server.process.kill()
        server.process.wait()
        server.process.stderr.close()


def test_a_replica_reads_what_another_one_has_computed_from_the_folder_of_both(tmp_path):
    body = {"prompt": PROMPTS[0] * 20, "max_tokens": 60, "seed": 3, "temperature": 1.0}
    with served(2, "--kv-disk", str(tmp_path)) as server:
        before, _, timings = stream(server, **body)
        assert not timings["cached_tokens"]
        pages = timings["prompt_tokens"] // 16
        server.wait(lambda: len(list(tmp_path.glob("*/*.0"))) >= pages)
        for _ in range(2):  # until the replica that has computed them is gone
            server.wait(lambda: server.gauge("tokenwright_replicas") == 2)
            os.kill(server.ready[0], signal.SIGKILL)
            server.wait(lambda: server.gauge("tokenwright_replicas") == 1)
            text, _, timings = stream(server, **body)
            assert text == before
            if timings["disk_tokens"]:
                break
        assert timings["disk_tokens"] >= 16 * (pages - 1), "restored, by a replica that has not computed them"


def test_a_killed_server_tells_its_clients_and_leaves_no_replica_behind():
    with served(2) as server, ThreadPoolExecutor(4) as clients:
        replicas = server.replicas
        body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True}

        def ask(_):
            while True:
                stream(server, **body)

        asking = [clients.submit(ask, at) for at in range(4)]
        server.wait(lambda: server.gauge("tokenwright_requests_running") == 4)
        server.process.kill()
        server.process.wait()
        for one in asking:
            assert isinstance(one.exception(HANGS), httpx2.TransportError), "no stream seems to be whole"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in replicas))


def test_a_model_that_cannot_be_opened_ends_the_server(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "tokenwright", "serve", str(tmp_path), "--port", "0", "--replicas", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert ended.returncode != 0 and "config.json" in ended.stderr


@pytest.mark.parametrize(
    ("replicas", "cores", "threads", "expected"),
    [
        (2, [0, 1, 2, 3], None, [({0, 1}, 2), ({2, 3}, 2)]),
        (3, [0, 1, 2, 5], None, [({0}, 1), ({1}, 1), ({2, 5}, 2)]),
        (2, [4, 7], 3, [({4}, 3), ({7}, 3)]),
        (3, [0, 1], None, [(set(), 1)] * 3),
    ],
)
def test_cores_are_divided(replicas, cores, threads, expected):
    assert [(set(one.cores), one.threads) for one in shares(replicas, cores, threads)] == expected


@pytest.mark.parametrize("more", [{"explorer": True}, {"kv_events": "tcp://*:5557"}])
def test_what_belongs_to_one_process_is_refused_with_replicas(more):
    with pytest.raises(RequestError, match="cannot be used with --replicas"):
        Settings(replicas=2, **more)
