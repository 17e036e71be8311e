"""The panels' routes: the page pool and its batches, a token's way through a layer, all heads, and what they cost."""

import base64
import json
import math
import threading
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.bench.fixtures import read_little
from tests.engines import assert_at_rest, settled, until
from tests.serve.conftest import begin, served, watching
from tests.trace.definition import row_of_run
from tokenwright import LLM
from tokenwright.backends.torch.border import tensor
from tokenwright.explorer import batches, player
from tokenwright.explorer.explorer import step_costs
from tokenwright.explorer.panels import conversations
from tokenwright.explorer.panels import lab as lab_routes
from tokenwright.explorer.panels.drafting import drafts_of
from tokenwright.explorer.panels.heads import NEEDED, THRESHOLDS
from tokenwright.llm.prompts.memory import PromptTerms
from tokenwright.trace.replay import AttentionReplay


class Compared(str):
    """A name that counts how often one of its kind is compared."""

    times = 0

    def __eq__(self, other):
        Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_turns_are_grouped_by_sessions_without_comparing_each_with_each():
    count = 400

    def turn(at, shared=False):
        asked = PromptTerms(session=Compared(f"s{at % (count // 2)}"), shared=shared)
        return SimpleNamespace(name=f"answer {at}", before="", ended=at, asked=asked)

    groups = conversations._grouped([turn(at) for at in reversed(range(count))])
    assert [[one.ended for one in group] for group in groups[:2]] == [[199, 399], [198, 398]]
    assert len(groups) == count // 2 and Compared.times < 10 * count
    assert len(conversations._grouped([turn(1, True), turn(201, True)])) == 2, "a key of the cache is no conversation"


PROMPT = "one two three four five six seven eight nine ten one two three four five six seven eight nine ten one two"


def ended(client, **wanted):
    """A run that was played to its end, with its pages still there or not."""
    card = begin(client, **wanted)
    with watching(client, card["run"]) as page:
        page.until(lambda p: p.state == "paused")
        page.send(op="play", pace=None)
        page.until(lambda p: p.state == "done")
    return card["run"]


def paused(client, steps=4, **wanted):
    """A run that has made some steps and holds its pages."""
    card = begin(client, **wanted)
    with watching(client, card["run"]) as page:
        page.until(lambda p: p.state == "paused")
        for _ in range(steps):
            page.send(op="step")
        page.until(lambda p: len(p.frames) == steps and p.state == "paused")
    return card["run"]


def pool(client, **query):
    answer = client.get("/pages", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


# Pages


def test_the_pool_card_is_the_pool(server):
    client, explorer = server
    run = paused(client, prompt=PROMPT, max_tokens=20)
    [group] = (card := pool(client, run=run))["groups"]
    sequence = explorer.player(run).run.sequence
    engine = settled(explorer.llm)
    [table] = sequence.tables
    assert {page["page"]: page["place"] for page in group["listed"]} == {found: n for n, found in table.items()}
    assert sum(page["filled"] for page in group["listed"]) == sequence.computed == card["sequences"][0]["computed"]
    assert all(page["owners"] == [0] and page["refcount"] == 1 for page in group["listed"])
    assert (group["used"], group["cached"], group["free"]) == (len(table), 0, engine.pool.pages - len(table))
    assert group["page_bytes"] == 16 * explorer.llm.costs.bytes_per_token
    assert card["sequences"][0]["whose"] == "run"


def test_a_batch_shares_the_pages_of_its_common_beginning(server):
    client, explorer = server
    prompts = [f"{PROMPT} {end}" for end in ("a", "b", "c")]
    batch = client.post("/batches", json={"prompts": prompts, "max_tokens": 8}).json()["batch"]
    assert pool(client, batch=batch)["groups"][0]["used"] == 0, "nothing is computed before the page asks for it"
    assert client.post(f"/batches/{batch}/write", json={"tokens": 2}).status_code == 204
    until(lambda: all(one["state"] == "paused" and one["text"] for one in pool(client, batch=batch)["sequences"]))
    card = pool(client, batch=batch)
    [group], sequences = card["groups"], card["sequences"]
    prompt = explorer.llm.tokenizer.encode(PROMPT)
    full = len(prompt) // 16
    shared = [page for page in group["listed"] if page["refcount"] == 3]
    assert [page["place"] for page in shared] == list(range(full)), "the full pages of what they have in common"
    assert all(page["owners"] == [0, 1, 2] for page in shared)
    assert group["saved_bytes"] == 2 * full * group["page_bytes"]
    assert [one["reused"] for one in sequences] == [0, 16 * full, 16 * full], "prefix hits"
    alone = explorer.llm.generate(prompts, max_tokens=8, temperature=0.0)
    assert [one["text"] for one in sequences] != ["", "", ""]
    for one, whole in zip(sequences, alone, strict=True):
        assert whole.text.startswith(one["text"])
    assert client.delete(f"/batches/{batch}").status_code == 204
    assert client.get("/pages", params={"batch": batch}).status_code == 404
    assert_at_rest(explorer.llm)
    assert pool(client)["groups"][0]["cached"] > 0, "what they have computed can be found again"


def test_a_batch_that_nobody_asks_about_ends(tiny, monkeypatch):
    monkeypatch.setattr(batches.Batches.__init__, "__defaults__", (player.undriven, 0.05))
    with served(tiny, pages=64) as (other, its):
        batch = other.post("/batches", json={"prompts": [PROMPT], "max_tokens": 8}).json()
        assert batch["lease_s"] == 0.05
        until(lambda: not settled(its.llm).scheduler.sequences)


def test_others_texts_are_not_told(server):
    client, _ = server
    card = begin(client, prompt="a secret", max_tokens=4)
    seen = client.get("/pages").text
    assert "secret" not in seen
    assert pool(client)["sequences"][0]["whose"] == "other"
    client.delete(f"/runs/{card['run']}")


# A token's way through a layer


def test_a_block_is_what_the_model_computes(server):
    """Against the sums that its own stages must make, the cost model, and attention rows of the recorder."""
    client, explorer = server
    run = paused(client, prompt=PROMPT, max_tokens=20)
    step = 3
    frame = client.get(f"/runs/{run}/steps/{step}").json()
    last = frame["start"]
    model = explorer.llm.graph
    results = {}
    for layer in range(model.layers):
        view = client.get(f"/runs/{run}/block", params={"step": step, "layer": layer}).json()
        stages = {stage["name"]: stage for stage in view["stages"]}
        assert view["position"] == last and view["context"] == last + 1
        assert list(stages) == [
            "input", "norm", "query", "key", "value", "attention", "output", "residual", "mlp_norm", "hidden",
            "mlp_output", "result",
        ]  # fmt: skip
        config = explorer.llm.config
        assert stages["query"]["shape"] == stages["attention"]["shape"] == [config.heads, config.head_size]
        assert stages["key"]["shape"] == [config.kv_heads, config.head_size]
        assert math.isclose(sum(n * n for n in stages["key"]["heads"]), stages["key"]["norm"] ** 2, rel_tol=1e-9)
        assert math.isclose(sum(stage["share"] for stage in view["stages"]), 1, rel_tol=1e-9)
        assert sum(stage["flops"] for stage in view["stages"]) == view["flops"]
        assert view["model_flops"] == frame["flops_derived"]
        assert layer == 0 or stages["input"]["norm"] == results[layer - 1], "a layer gets what the one before gives"
        results[layer] = stages["result"]["norm"]
        for read in view["reads"]:
            row = client.get(
                f"/runs/{run}/attention", params={"step": step, "layer": layer, "head": read["head"]}
            ).json()
            assert row["argmax"] == read["position"]
            assert abs((base64.b64decode(row["codes"])[row["argmax"]] / 255) ** 2 - read["weight"]) <= 0.004
    layers = sum(
        client.get(f"/runs/{run}/block", params={"step": step, "layer": n}).json()["flops"] for n in range(model.layers)
    )
    assert layers + 2 * model.head.multiplied == view["model_flops"]
    shares = [one["share"] for one in view["by_context"]]
    assert shares == sorted(shares) and shares[0] < shares[-1], "attention's share grows with the text"


def test_an_earlier_token_and_a_freed_cache_give_the_same(server):
    client, explorer = server
    run = paused(client, prompt=PROMPT, max_tokens=20)
    query = {"step": 3, "layer": 1, "position": 5}
    before = client.get(f"/runs/{run}/block", params=query).json()
    first = client.get(f"/runs/{run}/block", params=query | {"step": 0}).json()
    explorer.player(run).close()
    explorer.player(run).join()
    after = client.get(f"/runs/{run}/block", params=query).json()
    assert before == first
    for one, other in zip(before["stages"], after["stages"], strict=True):
        assert math.isclose(one["norm"], other["norm"], rel_tol=1e-5)
    for wrong in ({"position": 400}, {"position": -1}, {"layer": 99}, {"step": 99}):
        assert client.get(f"/runs/{run}/block", params=query | wrong).status_code == 400


# All heads


def weights_of(explorer, run, *place):
    return np.array(row_of_run(explorer.run(run), *place))


def test_heads_are_named_by_their_mass(server):
    check_masses(*server)


def test_shifted_weights_turn_the_masses_red(server, monkeypatch):
    real = AttentionReplay.weights
    monkeypatch.setattr(AttentionReplay, "weights", lambda *args: np.roll(real(*args), 1, -1))
    with pytest.raises(AssertionError):
        check_masses(*server)


def check_masses(client, explorer):
    """The means from reference rows of every position, and the names from the means."""
    tokens = 24
    run = ended(client, prompt="ab", max_tokens=tokens)
    ids, step = explorer.player(run).run.tokens, tokens - 1
    card = client.get(f"/runs/{run}/atlas", params={"step": step}).json()
    config = explorer.llm.config
    assert [(one["layer"], one["head"]) for one in card["heads"]] == [
        (layer, head) for layer in range(config.layers) for head in range(config.heads)
    ]
    stop = len(ids) - 1
    counted = range(16, stop)
    start = stop - tokens + 1  # tokens before the first step's pick
    for layer, head in ((0, 0), (1, 3)):
        one = next(one for one in card["heads"] if (one["layer"], one["head"]) == (layer, head))
        rows = {p: weights_of(explorer, run, p - start + 1, layer, head) for p in counted}
        assert abs(one["sink"] - np.mean([rows[p][0] for p in counted])) < 1e-5
        assert abs(one["previous"] - np.mean([rows[p][p - 1] for p in counted])) < 1e-5
        assert abs(one["local"] - np.mean([rows[p][p - 7 : p + 1].sum() for p in counted])) < 1e-5
        codes = base64.b64decode(one["codes"])
        assert max(abs((code / 255) ** 2 - w) for code, w in zip(codes, rows[stop - 1], strict=True)) <= 0.004
    assert card["rows"] == len(counted)
    for one in card["heads"]:
        means = [one["previous"], one["induction"], one["sink"], one["local"]]
        reached = [
            kind
            for kind, mean, least in zip(card["kinds"], means, THRESHOLDS, strict=True)
            if mean is not None and mean >= least
        ]
        assert one["kind"] == (reached[0] if reached else "mixed")


def test_a_matrix_is_its_rows_and_a_lens_ends_at_the_choice(server):
    client, explorer = server
    tokens = 12
    run = ended(client, prompt="ab", max_tokens=tokens)
    step = tokens - 1
    matrix = client.get(f"/runs/{run}/matrix", params={"step": step, "layer": 1, "head": 2}).json()
    size = matrix["size"]
    found = np.frombuffer(base64.b64decode(matrix["codes"]), np.uint8).reshape(size, size)
    assert size == matrix["tokens"] == len(explorer.player(run).run.tokens) - 1
    assert not np.triu(found, 1).any(), "nobody reads what comes later"
    for back in range(3):
        row = weights_of(explorer, run, step - back, 1, 2)
        assert np.abs((found[size - 1 - back, : len(row)] / 255) ** 2 - row).max() <= 0.004
    lens = client.get(f"/runs/{run}/lens", params={"step": step}).json()
    frame = client.get(f"/runs/{run}/steps/{step}").json()
    last = lens["rows"][-1]
    assert [row["layer"] for row in lens["rows"]] == list(range(-1, explorer.llm.config.layers))
    assert lens["chosen"]["id"] == frame["token"] and last["rank"] == frame["rank"]
    assert math.isclose(last["chosen"], math.exp(frame["logprob"]), rel_tol=1e-4)
    assert last["token"]["id"] == frame["candidates"][0]["token"]


def test_a_long_text_is_pooled_and_repetitions_are_judged(server):
    client, explorer = server
    ids = torch.randint(3, 60, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    text = explorer.llm.tokenizer.decode(ids * 30)
    run = paused(client, steps=1, prompt=text, max_tokens=2)
    stop = client.get(f"/runs/{run}/steps/0").json()["length"]
    assert stop > 256
    matrix = client.get(f"/runs/{run}/matrix", params={"step": 0, "layer": 0, "head": 0}).json()
    assert (matrix["cell"], matrix["tokens"]) == (-(-stop // 256), stop) and matrix["size"] <= 256
    whole = weights_of(explorer, run, 0, 0, 0)
    last = np.frombuffer(base64.b64decode(matrix["codes"]), np.uint8)[-matrix["size"] :]
    assert (last[-1] / 255) ** 2 >= whole[-(stop % matrix["cell"] or matrix["cell"]) :].max() - 0.004
    card = client.get(f"/runs/{run}/atlas", params={"step": 0}).json()
    assert card["rows"] == 128 and card["repeats"] >= NEEDED
    assert all(one["induction"] is not None for one in card["heads"])


# The calculator


def calculate(client, **wanted):
    answer = client.post("/calculate", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("model", "weights", "base", "slope", "per_token"),
    [
        ("gpt2", "float32", 247_064_064, 36_864, 73_728),
        ("Qwen2.5-0.5B", "bfloat16", 987_922_432, 86_016, 12_288),
        ("Meta-Llama-3-8B", "bfloat16", 15_009_316_864, 524_288, 131_072),
    ],
)
def test_the_calculator_has_the_published_figures(door, model, weights, base, slope, per_token):
    client, _ = door
    card = calculate(client, model=model, weights=weights, context=100)
    assert (card["base_flops"], card["slope_flops"], card["kv_per_token"]) == (base, slope, per_token)
    assert card["kv_total"] == 100 * per_token
    assert card["decode_flops"] == base + 100 * slope
    pages = -(-100 // 16) + 1  # and the scratch page
    assert card["kv_planned"] == card["kv_allocated"] == pages * 16 * per_token, card["refused"]


def test_the_calculator_knows_the_loaded_model(server, monkeypatch):
    read_little(monkeypatch)
    client, explorer = server
    llm = explorer.llm
    card = calculate(client)
    assert card["loaded_bytes"] == llm.weight_bytes == card["weight_bytes"]
    assert card["context"] == llm.context and card["kv_per_token"] == llm.costs.bytes_per_token
    assert card["kv_allocated"] == card["kv_planned"] >= card["kv_total"] == llm.kv_bytes(llm.context)
    small = calculate(client, context=100, batch=3, kv="int8", window=20)
    assert small["kv_total"] == 3 * 20 * small["kv_per_token"] < card["kv_total"]
    assert card["tokens_per_s"] is None and card["bandwidth"] is None, "nothing was measured yet"
    measured = calculate(client, measure=True, batch=2)
    assert math.isclose(measured["tokens_per_s"], 2 * measured["bandwidth"] / measured["decode_bytes"])
    assert calculate(client)["bandwidth"] == measured["bandwidth"], "it is measured once"
    huge = calculate(client, context=10**8, batch=65536)
    assert huge["kv_allocated"] is None and "free" in huge["refused"]


# The cache lab


def lab(client, run, status=200, **wanted):
    answer = client.post(f"/runs/{run}/lab", json=wanted)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_the_full_cache_changes_nothing_and_a_small_one_does(server):
    client, explorer = server
    run = ended(client, prompt=PROMPT, max_tokens=60)
    engines = _engines()  # other tests' among them
    ids = explorer.player(run).run.tokens
    same = lab(client, run)
    assert (same["mean_kl"], same["max_kl"], same["changed"]) == (0, 0, [])
    assert same["tokens"] == same["positions"] == same["same"] == len(ids) - 1
    assert same["full_bytes"] == same["kept_bytes"] == (len(ids) - 1) * explorer.llm.costs.bytes_per_token
    assert same["pages"] == -(-(len(ids) - 1) // 16)
    small = lab(client, run, kv="int4", window=20, sinks=2, page_size=8)
    assert small["kept_bytes"] < small["page_bytes"] < same["full_bytes"] / 4
    assert small["mean_kl"] > 0 and len(small["changed"]) == small["positions"] - small["same"]
    assert _engines() <= engines, "the second engine is closed"
    assert_at_rest(explorer.llm)


def _engines():
    return {thread for thread in threading.enumerate() if thread.name == "tokenwright engine"}


def test_the_labs_figures_are_those_of_the_two_caches(server):
    check_lab(*server)


def test_a_full_cache_in_the_labs_place_turns_it_red(server, monkeypatch):
    real = lab_routes._Sums.add
    monkeypatch.setattr(lab_routes._Sums, "add", lambda self, full, _, following: real(self, full, full, following))
    with pytest.raises(AssertionError):
        check_lab(*server)


def check_lab(client, explorer):
    """From two engines of their own, over the same weights."""
    run = ended(client, prompt=PROMPT, max_tokens=40)
    ids = list(explorer.player(run).run.tokens)
    found = lab(client, run, kv="int8", window=24)
    with LLM(explorer.llm.loaded, kv="int8", window=24, pages=64) as other:
        full, _ = explorer.llm.model(ids[:-1])
        rows, _ = other.model(ids[:-1])
        scores = other.score(ids) - explorer.llm.score(ids)
    kl = torch.nn.functional.kl_div(
        tensor(rows).log_softmax(-1), tensor(full).log_softmax(-1), reduction="none", log_target=True
    )
    assert np.allclose(found["kl"], kl.sum(-1).numpy(), atol=1e-5)
    assert np.allclose(found["delta"], scores, atol=1e-5)
    assert math.isclose(found["mean_kl"], np.mean(found["kl"]), rel_tol=1e-6)
    changed = {one["position"]: (one["full"]["id"], one["lab"]["id"]) for one in found["changed"]}
    pairs = zip(full.argmax(-1).tolist(), rows.argmax(-1).tolist(), strict=True)
    assert changed == {n + 1: pair for n, pair in enumerate(pairs) if pair[0] != pair[1]}


def test_the_lab_refuses_what_the_model_does_not_support(server):
    client, _ = server
    run = ended(client)
    for wrong in ({"kv": "int3"}, {"sinks": 4}, {"window": 0}, {"page_size": 1000}, {"more": 1}):
        lab(client, run, 400, **wrong)
    assert lab(client, run)["mean_kl"] == 0, "a refusal leaves the lab free"


# Beams


def test_a_search_is_the_engines(server):
    client, explorer = server
    wanted = {"prompt": PROMPT, "beams": 4, "max_tokens": 10}
    card = client.post("/beams", json=wanted).json()
    llm = explorer.llm
    [right] = llm.generate(PROMPT, llm.sampling(beams=4, n=4, max_tokens=10))
    assert [one["text"] for one in card["best"]] == [text.text for text in right.choices]
    [greedy] = llm.generate(PROMPT, llm.sampling(temperature=0.0, max_tokens=10))
    assert card["greedy_text"] == greedy.text
    nodes = card["nodes"]
    for node in nodes:
        before = 0.0 if node["parent"] < 0 else nodes[node["parent"]]["score"]
        assert math.isclose(node["score"], before + node["logprob"], rel_tol=1e-9, abs_tol=1e-9)
    for rank, one in enumerate(card["best"]):
        assert nodes[one["node"]]["rank"] == rank and nodes[one["node"]]["reason"] == one["reason"]
        assert math.isclose(nodes[one["node"]]["score"], one["sum"])
    assert [one["score"] for one in card["best"]] == sorted((one["score"] for one in card["best"]), reverse=True)
    along = [node for node in nodes if node["greedy"]]
    assert [node["token"]["id"] for node in along] == list(greedy.token_ids[: len(along)])
    assert math.isclose(card["gain"], card["best_sum"] - card["greedy_sum"])
    assert_at_rest(llm)


# Drafts


def test_drafts_are_those_of_the_runs_text_so_far(server):
    client, explorer = server
    run = paused(client, steps=40, prompt=PROMPT, max_tokens=50, temperature=0, ignore_eos=True)
    of = explorer.player(run).run
    costs = step_costs(explorer.llm.llm_engine)
    assert costs.of(8) < 8, "a table of costs"
    for free in (False, True):
        answer = client.get(f"/runs/{run}/drafts", params={"free": free})
        assert answer.status_code == 200, answer.text
        assert answer.json() == json.loads(json.dumps(asdict(drafts_of(of, costs, free=free))))
    card = answer.json()
    assert card["drafted"] > 0 and card["free"]
    assert sum(len(step["written"]) for step in card["each"]) == 40
    early = begin(client, prompt=PROMPT)["run"]
    refused = client.get(f"/runs/{early}/drafts")
    assert refused.status_code == 400 and "no token yet" in refused.json()["error"]["message"]
    assert client.get("/runs/none/drafts").status_code == 404
