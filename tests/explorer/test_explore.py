"""The explorer's server, as a page meets it: runs over a socket, figures as JSON, and whatever may go wrong."""

import base64
import json
import math
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from tests.engines import settled, until
from tests.serve.conftest import HOST, asdict, begin, served, stepped, watching
from tests.trace.definition import row_of_run
from tests.trace.frames import from_json
from tokenwright import CheckpointError, SamplingParams
from tokenwright.explorer import player as player_module
from tokenwright.explorer import viewer as viewer_module
from tokenwright.explorer.explorer import NewRun
from tokenwright.explorer.player import Player
from tokenwright.explorer.viewer import SAMPLE, WINDOW
from tokenwright.serve.app import make_app
from tokenwright.serve.service.model_host import ModelHost
from tokenwright.trace.frame_codec import as_json, decode_weights

SUMMED = ("start", "length", "layer_tokens", "step_us", "token")  # of a step, for the sums of a rebuilt run
AS_JSON = {"content-type": "application/json"}
RECORDED = Path(__file__).resolve().parents[2] / "web" / "public" / "recorded.json"


def played(page):
    """Play to the end at engine speed."""
    page.until(lambda p: p.state == "paused")
    page.send(op="play", pace=None)
    page.until(lambda p: p.state == "done" and p.frames[-1].step + 1 == p.states[-1]["steps"])
    return page.frames


def test_the_model_tells_what_the_formulas_need(door):
    client, explorer = door
    card, config = client.get("/model").json(), explorer.llm.config
    assert (card["layers"], card["heads"], card["kv_heads"]) == (config.layers, config.heads, config.kv_heads)
    assert card["head_weights"] == config.width * config.vocab_size
    assert card["kv_bytes_per_token"] == 2 * config.layers * config.kv_heads * config.head_size * 4
    assert card["weight_bytes"] == explorer.llm.weight_bytes
    assert (card["page_size"], card["pages"]) == (16, 64)


def test_the_card_has_the_bytes_of_packed_weights(tiny):
    with served(tiny, weights="int8") as (client, explorer):
        llm = explorer.llm
        assert client.get("/model").json()["weight_bytes"] == llm.weight_bytes < 2 * llm.graph.parameters


def test_the_card_names_the_format_of_k_and_v(tiny):
    with served(tiny, kv="int8", window=32) as (client, explorer):
        card = client.get("/model").json()
        assert card["kv_format"] == "int8, window 32"
        assert card["kv_bytes_per_token"] == explorer.llm.costs.bytes_per_token
        assert card["kv_bytes_per_token"] < 2 * card["layers"] * card["kv_heads"] * card["head_size"] * 2


def test_a_text_goes_to_tokens_and_back(door):
    client, _ = door
    text = "ab 😀 日本 é\n"
    tokens = client.post("/tokenize", json={"text": text}).json()["tokens"]
    assert "<0xF0>" in [token["text"] for token in tokens]
    ids = [token["id"] for token in tokens]
    assert client.post("/detokenize", json={"ids": ids}).json() == {"text": text}


def test_a_run_over_the_socket_is_what_the_api_says_of_it(server):
    client, explorer = server
    card = begin(client, prompt="ab 😀", temperature=0.9)
    with watching(client, card["run"]) as page:
        frames = played(page)
    assert [frame.step for frame in frames] == list(range(8))
    steps = [client.get(f"/runs/{card['run']}/steps/{n}").json() for n in range(8)]
    for frame, step in zip(frames, steps, strict=True):
        known = from_json(step)
        assert frame == known or (frame.attention is None and as_json(frame) == step | {"attention": None})
    ids = [frame.token for frame in frames]
    [completion] = explorer.llm.generate(
        "ab 😀", SamplingParams(temperature=0.9, seed=1, max_tokens=8, ignore_eos=True, top_k=card["top_k"])
    )
    assert list(completion.token_ids) == ids
    assert "".join(frame.text for frame in frames) == completion.text
    whole = client.post("/detokenize", json={"ids": [token["id"] for token in card["tokens"]] + ids}).json()["text"]
    assert whole == "ab 😀" + completion.text
    named = {token["id"] for message in page.messages if message["kind"] == "labels" for token in message["tokens"]}
    assert named >= {candidate.token for frame in frames for candidate in frame.candidates}


def test_nothing_is_computed_before_the_viewer_says_so(server):
    client, explorer = server
    card = begin(client)
    with watching(client, card["run"]) as page:
        page.until(lambda p: p.state == "paused")
        assert client.get(f"/runs/{card['run']}").json()["steps"] == 0
        assert settled(explorer.llm).pool.available == 64
        for n in range(3):
            page.send(op="step")
            page.until(lambda p, n=n: len(p.frames) == n + 1)
        page.until(lambda p: p.state == "paused")
        assert client.get(f"/runs/{card['run']}").json()["steps"] == 3
        assert page.states[-1]["lease_s"] > 500


def test_a_pause_holds_and_the_pace_is_kept_until_then(server):
    client, _ = server
    card = begin(client, max_tokens=500)
    with watching(client, card["run"]) as page:
        page.send(op="play", pace=200)
        page.until(lambda p: len(p.frames) >= 25)
        page.send(op="pause")
        page.until(lambda p: p.states and p.state == "paused")
        steps = client.get(f"/runs/{card['run']}").json()["steps"]
        time.sleep(0.2)
        assert client.get(f"/runs/{card['run']}").json()["steps"] == steps
        page.until(lambda p: len(p.frames) == steps)
        begins = [frame.began_us for frame in page.frames]
        # A step that begins late shortens the gap to the next one, so the pace is that of all steps together.
        assert begins[-1] - begins[0] > 0.8 * 5_000 * (steps - 1), "not faster than 200 a second"


def test_the_cache_is_switched_at_any_time(server):
    client, explorer = server
    card = begin(client)
    with watching(client, card["run"]) as page:
        for n in range(6):
            page.send(op="cache", on=n not in (2, 3))
            page.send(op="step")
            page.until(lambda p, n=n: len(p.frames) == n + 1)
    kv = explorer.llm.costs.bytes_per_token
    prompt = len(card["tokens"])
    told = [(frame.cache, frame.length, frame.kv_resident) for frame in page.frames]
    lengths = [prompt, 1, prompt + 2, prompt + 3, prompt + 4, 1]
    kept = [prompt * kv, (prompt + 1) * kv, 0, 0, (prompt + 4) * kv, (prompt + 5) * kv]
    assert told == list(zip([True, True, False, False, True, True], lengths, kept, strict=True))


def test_another_head_may_be_watched_and_any_be_asked_for(server):
    client, explorer = server
    card = begin(client, layer=1, head=2)
    with watching(client, card["run"]) as page:
        page.send(op="step")
        page.until(lambda p: len(p.frames) == 1)
        page.send(op="watch", layer=0, head=3)
        page.until(lambda p: p.states and p.states[-1]["watched"] == [0, 3])
        page.send(op="step")
        page.until(lambda p: len(p.frames) == 2)
        rows = [(frame.attention.layer, frame.attention.head) for frame in page.frames]
        assert rows == [(1, 2), (0, 3)]
        for step in (0, 1):
            for layer, head in ((0, 0), (1, 3)):
                where = f"/runs/{card['run']}/attention?step={step}&layer={layer}&head={head}"
                row, right = client.get(where).json(), row_of_run(explorer.run(card["run"]), step, layer, head)
                weights = decode_weights(base64.b64decode(row["codes"]))
                assert max(abs(a - b) for a, b in zip(weights, right, strict=True)) <= 0.004
                assert right[row["argmax"]] == max(right)


def test_a_slow_page_is_never_sent_more_than_a_window_ahead(server):
    client, _ = server
    card = begin(client, max_tokens=40)
    with watching(client, card["run"], acks=False) as page:
        page.until(lambda p: p.state == "paused")
        page.send(op="play", pace=None)
        page.until(lambda p: p.state == "done")
        assert len(page.frames) == WINDOW
        assert page.states[-1]["throttled"]
        assert client.get(f"/runs/{card['run']}").json()["steps"] == 40, "the engine does not wait"
        page.acks = True
        page.ack()
        page.until(lambda p: len(p.frames) == 40 and not p.states[-1]["throttled"])
    assert [frame.step for frame in page.frames] == list(range(40))
    assert all(frame.candidates for frame in page.frames), "the figures of no step are lost"
    dropped = [frame.step for frame in page.frames if frame.attention is None]
    assert dropped and set(dropped) <= set(range(WINDOW, 39))
    assert {step % SAMPLE for step in dropped} == {1, 2, 3}, "every fourth row is there: the beams do not stop"
    assert page.frames[-1].attention is not None
    step = client.get(f"/runs/{card['run']}/steps/{dropped[0]}").json()
    assert step["attention"] is not None, "what was left out can be had later"


def test_the_state_is_sent_when_it_changes_and_not_at_each_step(server):
    client, _ = server
    card = begin(client, max_tokens=30)
    with watching(client, card["run"]) as page:
        played(page)
    lasting = [{k: v for k, v in state.items() if k not in ("lease_s", "steps")} for state in page.states]
    assert all(one != other for one, other in pairwise(lasting))
    assert (lasting[0]["state"], lasting[-1]["state"]) == ("paused", "done")
    assert len(lasting) < 30


@pytest.mark.parametrize("without", [(), range(30), (4, 5, 6)], ids=["with the cache", "without", "mixed"])
@pytest.mark.parametrize("prompt", ["ab", "ab " * 60], ids=["one chunk", "several chunks"])
def test_a_finished_run_has_its_sums(tiny, without, prompt):
    """Counted over the frames, and by the formulas of both ways of doing it."""
    with served(tiny, pages=64, token_budget=32) as (client, explorer):
        card = begin(client, prompt=prompt, max_tokens=10)
        player, layers = explorer.player(card["run"]), explorer.llm.config.layers
        stepped(player, [step not in without for step in range(10)]).join()
        state = client.get(f"/runs/{card['run']}").json()
    frames, n = player.run.frames, len(card["tokens"])
    assert (len(frames) > 10) is (n > 32), "a long prompt is read in chunks"
    naive, cached = layers * sum(range(n, n + 10)), layers * (n + 9)
    done = sum(frame.layer_tokens for frame in frames)
    first = next(index for index, frame in enumerate(frames) if frame.token is not None)
    assert (done == cached) is (not without) and (done == naive) is (len(without) == 30)
    assert state["state"] == "done"
    times = [frame.step_us for frame in frames]
    assert state["summary"] == {
        "written": 10,
        "layer_tokens": done,
        "cached": cached,
        "naive": naive,
        "times": naive / cached,
        "reused": naive - done,
        "prefix": 0,
        "ttft_us": sum(times[: first + 1]),
        "engine_us": sum(times),
        "tokens_per_s": 9e6 / sum(times[first + 1 :]),
    }


@pytest.mark.parametrize("without", [(), range(10), (4,)], ids=["with the cache", "without", "mixed"])
def test_both_ways_of_a_run_are_timed_alike(tiny, without):
    """Whatever the run did itself; it is left as it was, and nothing is left in the pool."""
    with served(tiny, pages=64) as (client, explorer):
        card = begin(client, prompt="ab", max_tokens=10)
        player = explorer.player(card["run"])
        assert client.get(f"/runs/{card['run']}/times").status_code == 400, "it is not over"
        stepped(player, [step not in without for step in range(10)]).join()
        before, frames = player.run.tokens, len(player.run.frames)
        times = client.get(f"/runs/{card['run']}/times").json()
        assert (player.run.tokens, len(player.run.frames)) == (before, frames), "the run is as it was"
        assert settled(explorer.llm).pool.available == 64
    assert times["cached_us"] > 0 and times["slower"] == times["naive_us"] / times["cached_us"]
    assert times["measured"] >= 5, "the first pass is of both ways; one fills the cache, a step, two passes"


def test_two_measurements_follow_each_other(tiny, monkeypatch):
    """A run whose times are asked for while another is measured waits for its turn."""
    from tokenwright.explorer.panels import times as module

    began, going, real = threading.Event(), threading.Event(), module._Passes.whole

    def held(passes, context):
        began.set()
        going.wait()
        return real(passes, context)

    monkeypatch.setattr(module._Passes, "whole", held)
    with served(tiny, pages=64) as (client, explorer):
        runs = [begin(client, prompt="ab", max_tokens=3)["run"] for _ in range(2)]
        for run in runs:
            explorer.player(run).play(None)
            explorer.player(run).join()
        answers = {}

        def ask(run):
            answers[run] = client.get(f"/runs/{run}/times").status_code

        asking = [threading.Thread(target=ask, args=[run]) for run in runs]
        asking[0].start()
        began.wait()
        asking[1].start()
        time.sleep(0.3)  # in which it was refused
        going.set()
        for thread in asking:
            thread.join()
    assert answers == dict.fromkeys(runs, 200)


def test_simpsons_rule_sums_the_passes(tiny, monkeypatch):
    """A pass over t tokens that takes 7 + 3 t + t² has a sum by formula."""
    from tokenwright.explorer.panels import times as module

    monkeypatch.setattr(module._Passes, "whole", lambda _, context: 7 + 3 * context + context * context)
    with served(tiny, pages=64) as (client, explorer):
        card = begin(client, prompt="ab", max_tokens=21)
        player = explorer.player(card["run"])
        player.play(None)
        player.join()
        n = len(card["tokens"])
        naive = client.get(f"/runs/{card['run']}/times").json()["naive_us"]
        monkeypatch.setattr(module, "LONGEST_US", 0)
        middle = client.get(f"/runs/{card['run']}/times").json()["naive_us"]
    exact = sum(7 + 3 * t + t * t for t in range(n, n + 21))
    assert naive == pytest.approx(exact, rel=0.03) and middle == pytest.approx(exact, rel=0.2)


def test_a_run_that_is_not_over_has_no_sums(server):
    client, explorer = server
    card = begin(client)
    explorer.player(card["run"]).step()
    assert client.get(f"/runs/{card['run']}").json()["summary"] is None


def test_the_heads_masses_are_those_of_their_rows(server):
    client, explorer = server
    card = begin(client, max_tokens=12)
    with watching(client, card["run"]) as page:
        played(page)
    config, run = explorer.llm.config, f"/runs/{card['run']}"
    found = client.get(f"{run}/heads?step=10").json()
    places = [(layer, head) for layer in range(config.layers) for head in range(config.heads)]
    assert len(found["sink"]) == len(found["local"]) == len(found["entropy"]) == len(places)
    for place, (layer, head) in enumerate(places):
        row = row_of_run(explorer.run(card["run"]), 10, layer, head)
        entropy = -sum(w * math.log(w) for w in row if w > 0) / math.log(len(row))
        assert found["sink"][place] == pytest.approx(row[0], abs=1e-4)
        assert found["local"][place] == pytest.approx(sum(row[-8:]), abs=1e-4)
        assert found["entropy"][place] == pytest.approx(entropy, abs=1e-3)
    assert "there is no step 100" in client.get(f"{run}/heads?step=99").json()["error"]["message"]


def test_a_page_that_comes_back_goes_on_where_it_was(server):
    client, _ = server
    card = begin(client, max_tokens=20)
    with watching(client, card["run"]) as page:
        page.send(op="play", pace=100)
        page.until(lambda p: len(p.frames) >= 4)
        seen = len(page.frames)
    until(lambda: client.get(f"/runs/{card['run']}").json()["state"] != "running")
    steps = client.get(f"/runs/{card['run']}").json()["steps"]
    assert steps < 20, "nobody looks: it is paused"
    with watching(client, card["run"], since=seen) as again:
        played(again)
    assert [frame.step for frame in page.frames[:seen] + again.frames] == list(range(20))


def test_a_run_that_was_lost_is_rebuilt_and_goes_on_alike(server):
    client, explorer = server
    layers = explorer.llm.config.layers
    card = begin(client, prompt="abc", max_tokens=12, temperature=1.0, seed=9)
    with watching(client, card["run"]) as page:
        whole = played(page)
    summary = client.get(f"/runs/{card['run']}").json()["summary"]
    assert client.delete(f"/runs/{card['run']}").status_code == 204
    written = [frame.token for frame in whole[:5]]
    earlier = [{name: getattr(frame, name) for name in SUMMED} for frame in whole[:5]]
    wanted = {"prompt": "abc", "max_tokens": 12, "temperature": 1.0, "seed": 9, "written": written, "first_step": 5}
    again = begin(client, **wanted, earlier=earlier)
    assert again["written_text"] == "".join(frame.text for frame in whole[:5])
    with watching(client, again["run"], since=5) as page:
        rest = played(page)
    assert [(frame.step, frame.token, frame.text, frame.seq_len) for frame in rest] == [
        (frame.step, frame.token, frame.text, frame.seq_len) for frame in whole[5:]
    ]
    assert rest[0].recomputed == rest[0].length - 1, "all but the newest token had been computed by the lost run"
    told = client.get(f"/runs/{again['run']}").json()["summary"]
    for name in ("written", "cached", "naive", "times", "prefix"):
        assert told[name] == summary[name], "the sums are those of the whole text"
    assert told["layer_tokens"] == summary["layer_tokens"] + layers * rest[0].recomputed
    assert told["ttft_us"] == whole[0].step_us
    assert told["engine_us"] == sum(frame.step_us for frame in (*whole[:5], *rest))
    assert client.get(f"/runs/{again['run']}/times").json()["measured"] >= 5, "from the whole text's first length on"
    foreign = [earlier[0] | {"start": 99}]
    answer = client.post("/runs", json=wanted | {"earlier": foreign})
    assert answer.status_code == 400 and "earlier" in answer.json()["error"]["message"]


def test_the_text_of_a_rebuilt_run_begins_where_the_lost_one_stood(server):
    """Whatever was held back when it was lost, half a character or half a stop string, is told once."""
    client, _ = server
    wanted = {"prompt": "ab", "max_tokens": 12, "temperature": 1.0, "seed": 4, "stop": ["zz", "never said"]}
    card = begin(client, **wanted)
    with watching(client, card["run"]) as page:
        frames = played(page)
    whole = "".join(frame.text for frame in frames)
    held = 0
    for cut in range(1, len(frames)):
        written = [frame.token for frame in frames[:cut]]
        again = begin(client, **wanted, written=written, first_step=cut)
        assert again["written_text"] == "".join(frame.text for frame in frames[:cut])
        held += client.post("/detokenize", json={"ids": written}).json()["text"] != again["written_text"]
        with watching(client, again["run"], since=cut) as page:
            assert again["written_text"] + "".join(frame.text for frame in played(page)) == whole
    assert held, "something was held back at some cut, or this shows nothing"


def test_a_fault_in_the_middle_of_a_stream_is_heard_by_the_page(server, monkeypatch):
    client, _ = server
    card = begin(client)

    def broken(_):
        raise ValueError("planted")

    monkeypatch.setattr(viewer_module, "pack", broken)
    with pytest.raises(BaseExceptionGroup):  # which the test's client shows, and a server logs
        step_on(client, card)


def step_on(client, card):
    """Ask for a step, and listen as long as the stream is open."""
    with watching(client, card["run"]) as page:
        page.send(op="step")
        page.until(lambda p: False)


def crowd(client, player, stayer):
    """Ten more pages watch a run, and one that acknowledges nothing; all see the same, and leave."""
    run = player.card.run
    with ExitStack() as leaves:
        others = [leaves.enter_context(watching(client, run)) for _ in range(10)]
        silent = leaves.enter_context(watching(client, run, acks=False))
        for step in range(WINDOW + 3):
            others[step % 10].send(op="step")
            for page in (stayer, *others):
                page.until(lambda p, step=step: p.frames and p.frames[-1].step == step)
        assert all(page.frames == stayer.frames for page in others)
        silent.until(lambda p: len(p.frames) == WINDOW)  # and no more, while it acknowledges none
        assert len(player._viewers) == 12


def test_many_viewers_see_the_same_and_one_that_leaves_keeps_nothing(server):
    client, explorer = server
    card = begin(client, max_tokens=40)
    player = explorer.player(card["run"])
    with watching(client, card["run"]) as stayer:
        crowd(client, player, stayer)
        until(lambda: len(player._viewers) == 1)
        stayer.send(op="step")
        stayer.until(lambda p: p.frames[-1].step == WINDOW + 3)
        assert player.live, "the run goes on for those who stay"
    until(lambda: not player.viewed)
    assert client.delete(f"/runs/{card['run']}").status_code == 204
    player.join()
    assert settled(explorer.llm).pool.available == 64


def test_runs_that_are_watched_keep_their_pages_and_others_make_place(server):
    """A pool of 64 pages, runs of up to 25 each: two fit."""
    client, explorer = server
    first, second = (begin(client, max_tokens=390) for _ in range(2))
    with watching(client, first["run"]) as page, watching(client, second["run"]) as other:
        page.until(lambda p: p.state == "paused")
        other.until(lambda p: p.state == "paused")
        refused = client.post("/runs", json={"prompt": "ab", "max_tokens": 390})
        assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "capacity")
    third = begin(client, max_tokens=390)
    with watching(client, third["run"]) as page:
        page.until(lambda p: p.state == "paused")
    states = [client.get(f"/runs/{card['run']}").json()["state"] for card in (first, second)]
    while "expired" not in states:
        time.sleep(0.01)
        states = [client.get(f"/runs/{card['run']}").json()["state"] for card in (first, second)]
    assert sorted(states) == ["expired", "paused"]
    assert settled(explorer.llm).pool.available == 64


def test_the_lease_begins_when_a_run_is_held_and_anew_when_somebody_looks(server, monkeypatch):
    _, explorer = server
    card = explorer.begin(NewRun(prompt="abc", max_tokens=9))
    explorer.runs.remove(card.run)
    now = [1000.0]
    monkeypatch.setattr(player_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = explorer.llm.run("abc", SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    player = Player(run, card, lease_s=100)
    now[0] += 60
    player.renew()
    now[0] += 60
    assert player.state().lease_s == 40
    player.close()
    player.join()
    assert (player.phase, player.state().reason) == ("expired", "aborted")


def test_closing_waits_for_the_threads_of_runs_that_were_removed(server, monkeypatch):
    _, explorer = server
    player = explorer.runs.get(explorer.begin(NewRun(prompt="abc", max_tokens=9)).run)
    end = player.run.close
    monkeypatch.setattr(player.run, "close", lambda: (time.sleep(0.3), end()))
    assert explorer.runs.remove(player.card.run)
    explorer.runs.close()
    assert not [thread for thread in threading.enumerate() if thread.name == f"run {player.card.run}"]


def test_closing_does_not_wait_for_a_model_that_is_still_being_read():
    never = threading.Event()
    explorer = ModelHost("slow", lambda report: never.wait())
    with TestClient(make_app(explorer, [HOST], None), base_url=f"http://{HOST}") as client:
        assert client.get("/status").json()["phase"] == "loading"
    never.set()


def test_a_lease_that_ends_gives_the_pages_back_and_keeps_the_frames(server):
    _, explorer = server
    card = explorer.begin(NewRun(prompt="abc", max_tokens=9))
    explorer.runs.remove(card.run)
    run = explorer.llm.run("abc", SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    player = Player(run, card, lease_s=0.3)
    player.step()
    player.join()
    assert player.phase == "expired"
    assert len(run.frames) == 1
    assert settled(explorer.llm).pool.available == 64
    assert run.attention(0, 0, 0).codes, "from a cache of its own"


def test_a_run_that_fails_says_so_and_tells_no_secrets(server):
    client, explorer = server
    card, other = begin(client), begin(client)
    recorder = explorer.llm.engine.runner
    observe = recorder.runner.observe

    def broken(step, watched):
        raise RuntimeError("at 0x7f00, the secret place")

    with watching(client, card["run"]) as page:
        recorder.runner.observe = broken
        page.send(op="step")
        page.until(lambda p: p.state == "failed")
        recorder.runner.observe = observe
    assert "0x7f" not in json.dumps(page.messages) and "secret" not in json.dumps(page.messages)
    assert "log says more" in page.states[-1]["message"]
    with watching(client, other["run"]) as page:
        assert len(played(page)) == 8, "others go on"


def test_only_so_many_runs_are_watched_at_once(server, monkeypatch):
    client, _ = server
    monkeypatch.setattr(player_module, "MOST_LIVE", 2)
    first, second = begin(client), begin(client)
    with watching(client, first["run"]) as page, watching(client, second["run"]) as other:
        page.until(lambda p: p.state == "paused")
        other.until(lambda p: p.state == "paused")
        refused = client.post("/runs", json={"prompt": "ab"})
        assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "capacity")
    for card in (first, second):
        until(lambda run=card["run"]: client.get(f"/runs/{run}").json()["state"] != "running")
    third = begin(client)
    with watching(client, third["run"]) as page:
        assert len(played(page)) == 8, "a run that nobody looks at makes place"


def test_ended_runs_are_kept_for_a_while(server, monkeypatch):
    client, _ = server
    monkeypatch.setattr(player_module, "MOST_KEPT", 2)
    cards = []
    for _ in range(4):
        card = begin(client, max_tokens=1)
        with watching(client, card["run"]) as page:
            played(page)
        cards.append(card)
    begin(client)
    kept = [client.get(f"/runs/{card['run']}").status_code for card in cards]
    assert kept == [404, 404, 200, 200]


def test_a_server_is_there_before_its_model_is(tiny):
    """It says that it is loading, with the bytes; and what went wrong, if it did."""
    going = threading.Event()

    def load(report):
        report(10, 100)
        going.wait()
        raise CheckpointError("the folder is empty; give another")

    explorer = ModelHost("broken", load)
    with TestClient(make_app(explorer, [HOST], None), base_url=f"http://{HOST}") as client:
        until(lambda: client.get("/status").json()["done"] == 10)
        assert client.get("/status").json() == {"phase": "loading", "done": 10, "total": 100, "message": ""}
        assert client.get("/model").status_code == 503
        assert client.get("/model").json()["error"]["kind"] == "loading"
        going.set()
        until(lambda: client.get("/status").json()["phase"] != "loading")
        assert client.get("/status").json()["message"] == "the folder is empty; give another"


def test_a_run_can_be_taken_home(server):
    client, explorer = server
    card = begin(client, max_tokens=3)
    with watching(client, card["run"]) as page:
        played(page)
    trace = client.get(f"/runs/{card['run']}/trace.json").json()
    assert trace["format"] == "tokenwright-trace"
    assert trace["model"] == client.get("/model").json()
    frames = explorer.player(card["run"]).run.frames
    assert trace["steps"] == json.loads(json.dumps([as_json(frame) for frame in frames]))
    named = {label["id"] for label in trace["labels"]}
    assert named >= {candidate["token"] for step in trace["steps"] for candidate in step["candidates"]}


def test_a_chrome_trace_has_the_engines_time(server):
    """As Perfetto reads it: slices that never overlap in their row, with a name each, and the counts of the frames."""
    client, explorer = server
    card = begin(client, prompt="ab" * 30, max_tokens=6)
    with watching(client, card["run"]) as page:
        played(page)
    player = explorer.player(card["run"])
    trace = client.get(f"/runs/{card['run']}/perfetto.json").json()
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in slices if event["cat"] == "step"]
    assert sum(event["dur"] for event in steps) == pytest.approx(player.run.summary.engine_us, rel=0.01)
    assert len(steps) == len(player.run.frames)
    for row in (1, 2):
        its = [event for event in slices if event["tid"] == row]
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(its))
    for frame, event in zip(player.run.frames, steps, strict=True):
        parts = [one for one in slices if one["cat"] == "part" and 0 <= one["ts"] - event["ts"] < max(1, event["dur"])]
        assert sum(one["dur"] for one in parts if "attention" in one["name"]) == frame.attention_us
        assert sum(one["dur"] for one in parts) <= event["dur"]
    counted = [e["args"]["kv_resident"] for e in trace["traceEvents"] if e["ph"] == "C" and "kv_resident" in e["args"]]
    assert counted == [frame.kv_resident for frame in player.run.frames]
    assert all({"pid", "name", "ph"} <= event.keys() for event in trace["traceEvents"])


def test_the_recorded_run_is_what_the_model_inside_does():
    """The golden file that the page plays: the same tokens, counts and rows today; times are that day's.

    In float32, which all kernels and processors compute nearly alike.
    """
    trace = json.loads(RECORDED.read_text(encoding="utf-8"))
    measured = {"began_us", "step_us", "attention_us", "mlp_us", "head_us", "sampling_us", "recording_us"}
    with served("stories", dtype="float32") as (client, explorer):
        live = client.get("/model").json()
        unlike = {"pages", "version", "replicas"}  # facts of a server
        assert {k: v for k, v in trace["model"].items() if k not in unlike} == {
            k: v for k, v in live.items() if k not in unlike
        }
        run = trace["run"]
        card = begin(
            client,
            prompt=run["prompt"],
            max_tokens=run["max_tokens"],
            seed=run["seed"],
            layer=run["watched"][0],
            head=run["watched"][1],
        )
        assert card["tokens"] == run["tokens"]
        player = stepped(explorer.player(card["run"]), [step["cache"] for step in trace["steps"]])
        for golden, frame in zip(map(from_json, trace["steps"]), player.run.frames, strict=True):
            ours, theirs = asdict(frame), asdict(golden)
            for name in measured | {"layers", "candidates", "attention", "logprob", "sampled", "entropy"}:
                ours.pop(name), theirs.pop(name)
            assert ours == theirs
            assert frame.logprob == pytest.approx(golden.logprob, abs=1e-3)
            assert frame.sampled == pytest.approx(golden.sampled, abs=1e-3)
            pairs = zip(frame.attention.codes, golden.attention.codes, strict=True)
            assert max(abs(a - b) for a, b in pairs) <= 1
            assert sorted(c.token for c in frame.candidates)[:5] and frame.attention.argmax == golden.attention.argmax
