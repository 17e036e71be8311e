"""What the panels of the page ask for: branches on shared pages, the sampler on held logits, and the race."""

import json
import threading

import numpy as np
import pytest

from tests.engines import settled, until
from tests.serve.conftest import begin, served, stepped
from tests.trace.test_recorder import Wrong, shifted
from tokenwright.decode import uniform

PROMPT = "ab " * 12


def engine_steps(llm, monkeypatch):
    """A list that grows with each step of the engine."""
    engine, steps = settled(llm), []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [steps.append(1), step()][1])
    return steps


def test_a_candidate_becomes_a_branch_on_the_same_pages(server):
    client, explorer = server
    card = begin(client, prompt=PROMPT, max_tokens=30, temperature=1.0)
    player = stepped(explorer.player(card["run"]), [True] * 10)
    before, n = player.run.tokens, len(card["tokens"])
    token = next(c.token for c in player.run.frame(6).candidates if c.token != player.run.frame(6).token)
    answer = client.post(f"/runs/{card['run']}/fork", json={"step": 6, "token": token})
    child = answer.json()
    assert (answer.status_code, child["parent"], child["first_step"]) == (201, card["run"], 7)
    assert [one["id"] for one in child["written"]] == [*before[n : n + 6], token]
    assert child["written_text"] == client.post("/detokenize", json={"ids": [*before[n : n + 6], token]}).json()["text"]
    kept = {name: card[name] for name in ("prompt", "tokens", "temperature", "top_k", "top_p", "seed", "max_tokens")}
    assert {name: child[name] for name in kept} == kept

    def tree():
        return {one["run"]: one for one in client.get(f"/runs/{child['run']}/branches").json()["branches"]}

    pages, page_bytes = -(-(n + 6) // 16), 16 * explorer.llm.costs.bytes_per_token
    fresh = tree()
    assert list(fresh) == [card["run"], child["run"]]
    assert (fresh[child["run"]]["pages"], fresh[child["run"]]["shared"]) == (pages, pages), "nothing is copied yet"
    stepped(explorer.player(child["run"]), [True] * 2)
    found = tree()[child["run"]]
    assert found["parent"] == card["run"] and found["step"] == 6 and found["token"]["id"] == token
    assert (found["shared"], found["saved_bytes"]) == ((n + 6) // 16, (n + 6) // 16 * page_bytes)
    assert found["kv_bytes"] == found["pages"] * page_bytes and found["reused"] == n + 6
    assert player.run.tokens == before and player.run.sequence.tokens == list(before), "the parent is unchanged"
    used = settled(explorer.llm).pool.available
    assert client.delete(f"/runs/{child['run']}").status_code == 204
    until(lambda: len(settled(explorer.llm).scheduler.sequences) <= 1)
    assert settled(explorer.llm).pool.available == used + found["pages"] - found["shared"], "its own pages are free"
    assert list(tree_of(client, card)) == [card["run"]]


def tree_of(client, card):
    return {one["run"]: one for one in client.get(f"/runs/{card['run']}/branches").json()["branches"]}


SETTINGS = [
    *({"temperature": 0.4}, {"temperature": 1.7, "top_k": 9}, {"top_p": 0.6}, {}),
    {"repetition_penalty": 1.5, "top_k": 9},
]


def test_the_sampler_on_held_logits_is_the_definition_and_computes_no_step(server, monkeypatch):
    client, explorer = server
    card = begin(client, max_tokens=20, temperature=1.0, top_k=0, top_p=1.0)
    player = stepped(explorer.player(card["run"]), [True] * 8)
    steps = engine_steps(explorer.llm, monkeypatch)
    for settings in SETTINGS:
        check_sampler(client, explorer, card, player, settings)
    assert steps == [], "no step of the engine"
    assert client.get(f"/runs/{card['run']}").json()["steps"] == 8


def check_sampler(client, explorer, card, player, settings):
    where = f"/runs/{card['run']}"
    logits = np.frombuffer(client.get(f"{where}/logits?step=5").content, "<f4").astype(np.float64)
    assert len(logits) == explorer.llm.config.vocab_size
    view = client.get(f"{where}/sampler", params={"step": 5} | settings).json()
    p = softmax(logits)
    if penalty := settings.get("repetition_penalty"):
        text = np.unique(player.run.tokens[: len(card["tokens"]) + 5])  # the step's own token is not in it yet
        logits[text] = np.where(logits[text] < 0, logits[text] * penalty, logits[text] / penalty).astype("<f4")
    order = np.argsort(-logits, kind="stable")
    expected = softmax(logits / settings.get("temperature", 1.0))
    if k := settings.get("top_k"):
        expected[order[k:]] = 0
    if "top_p" in settings:
        inside = np.cumsum(expected[order]) - expected[order] < settings["top_p"]
        expected[order[~inside]] = 0
    expected /= expected.sum()
    assert view["ranks"] == list(range(1, len(p) + 1))
    assert np.allclose(view["p"], p[order], atol=1e-12) and np.allclose(view["sampled"], expected[order], atol=1e-12)
    assert view["kept"] == int((expected > 0).sum()) and view["kept_mass"] == pytest.approx(p[expected > 0].sum())
    assert view["entropy"] == pytest.approx(-(p * np.log2(p)).sum())
    context = len(card["tokens"]) + 5
    assert view["uniform"] == uniform(card["seed"], context)
    drawn = int(np.searchsorted(np.cumsum(expected), view["uniform"] * expected.sum(), "right"))
    assert view["drawn"] == drawn and (settings or drawn == player.run.frame(5).token)
    low = np.cumsum(expected) - expected
    for one in view["top"]:
        assert np.allclose([one["p"], one["sampled"], one["low"]], [a[one["token"]["id"]] for a in (p, expected, low)])


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def test_settings_out_of_range_and_steps_that_are_gone_are_refused(server):
    client, explorer = server
    card = begin(client)
    player = stepped(explorer.player(card["run"]), [True] * 3)
    where = f"/runs/{card['run']}/sampler"
    wrong = {"step=0&temperature=-1": "temperature", "step=0&top_p=nan": "top_p", "step=8": "no step 9"}
    for query, why in wrong.items():
        answer = client.get(f"{where}?{query}")
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    player.run._watch.held._rows.pop(0)
    assert "no longer held" in client.get(f"{where}?step=0").json()["error"]["message"]


def test_a_greedy_run_has_no_random_number(server):
    client, explorer = server
    card = begin(client, temperature=0.0)
    stepped(explorer.player(card["run"]), [True] * 2)
    view = client.get(f"/runs/{card['run']}/sampler?step=1").json()
    assert (view["uniform"], view["kept"], view["drawn"]) == (None, 1, view["token"])
    hot = client.get(f"/runs/{card['run']}/sampler?step=1&temperature=1").json()
    assert (hot["uniform"], hot["drawn"], hot["kept"]) == (None, None, hot["vocab"])


RACE = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}


def raced(client, **wanted):
    """The first message of a race, its steps, and the last one."""
    with client.stream("POST", "/race", json=RACE | wanted) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    return lines[0], lines[1:-1], lines[-1]


def test_both_lanes_compute_the_same_ids_and_agree(server):
    client, explorer = server
    llm = explorer.llm
    card, steps, end = raced(client)
    n = card["prompt_tokens"]
    assert (card["dtype"], card["every"], end["reason"], len(steps)) == (llm.dtype, 1, "length", 24)
    [completion] = llm.generate(PROMPT, temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    assert [step["token"]["id"] for step in steps] == list(completion.token_ids)
    assert "".join(step["text"] for step in steps) == completion.text
    for number, step in enumerate(steps):
        t = n + number
        assert step["context"] == step["uncached_tokens"] == t
        assert step["cached_tokens"] == (t if number == 0 else 1)
        assert step["uncached_flops"] >= llm.costs.chunk(0, t, 1).flops
        assert step["cached_flops"] == (step["uncached_flops"] if number == 0 else llm.costs.chunk(t - 1, 1, 1).flops)
        assert step["recomputed"] == (None if number == 0 else (t - 1) / t)
        assert step["equal"] and step["max_delta"] <= 1e-3 and step["kl"] <= 1e-6
    sums = steps[-1]["sums"]
    for name in ("cached_us", "uncached_us", "cached_flops", "uncached_flops", "cached_tokens", "uncached_tokens"):
        assert sums[name] == sum(step[name] for step in steps)
    assert (sums["equal"], sums["compared"], sums["divergent"]) == (24, 24, None)
    assert sums["uncached_tokens"] == sum(range(n, n + 24)) and sums["cached_tokens"] == n + 23
    pool = settled(llm).pool
    assert pool.available == pool.pages and not explorer.runs._guests


def test_only_every_fourth_step_is_raced(server):
    client, _ = server
    _, steps, _ = raced(client, every=4)
    assert [step["step"] for step in steps if step["uncached_us"] is not None] == [0, 4, 8, 12, 16, 20]
    sums = steps[-1]["sums"]
    assert (sums["steps"], sums["compared"]) == (24, 6)
    assert sums["cached_us"] == sum(step["cached_us"] for step in steps[::4])


def test_the_budget_ends_a_race_and_says_where(server):
    client, _ = server
    _, steps, end = raced(client, max_tokens=400, budget_s=1e-9)
    assert end["reason"] == "budget" and len(steps) == 1 and end["context"] == steps[-1]["context"]


def test_a_fault_in_the_cached_lane_is_seen(server):
    """Decode steps at a position too far: the uncached lane, which has none, is not at fault."""
    client, explorer = server
    recorder = explorer.llm.engine.runner
    recorder.runner = Wrong(recorder.runner, lambda chunk: shifted(chunk) if chunk.sequence.cache else chunk)
    _, steps, _ = raced(client, max_tokens=8)
    assert max(step["max_delta"] for step in steps[1:]) > 1e-3 and steps[0]["max_delta"] <= 1e-3
    assert steps[-1]["sums"]["kl"] > 1e-6


def test_a_second_race_is_refused_while_one_runs(server, monkeypatch):
    client, explorer = server
    llm = explorer.llm
    go_on, first = threading.Event(), threading.Event()
    runner = llm.engine.runner.runner
    observe = runner.observe

    def slow(step, watched):
        first.set()
        go_on.wait()
        return observe(step, watched)

    monkeypatch.setattr(runner, "observe", slow)
    thread = threading.Thread(target=lambda: found.append(raced(client, max_tokens=4)))
    found = []
    thread.start()
    first.wait()
    refused = client.post("/race", json=RACE)
    assert refused.status_code == 429 and "a race is under way" in refused.json()["error"]["message"]
    go_on.set()
    thread.join()
    assert found[0][2]["reason"] == "length"
    assert raced(client, max_tokens=2)[2]["reason"] == "length", "the next one may begin"


def test_a_race_needs_room_for_both_lanes(tiny):
    with served(tiny, pages=8) as (client, explorer):
        answer = client.post("/race", json=RACE | {"max_tokens": 80})
        assert answer.status_code == 503 and answer.json()["error"]["kind"] == "capacity"
        assert raced(client, max_tokens=8)[2]["reason"] == "length"
        assert settled(explorer.llm).pool.available == 8
