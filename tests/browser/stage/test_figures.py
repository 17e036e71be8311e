"""Every number on the page is the engine's: against the API and closed formulas, exactly, and with faults planted."""

import math
from dataclasses import replace

import pytest

from tests.browser.conftest import ROOT, Explored
from tests.browser.run.test_branches import logits_of, softmax
from tests.browser.served import load, serving
from tests.profiles import share
from tests.trace.definition import row_of_run
from tests.trace.test_recorder import Repeats, Twice, Wrong, stale
from tokenwright import LLM
from tokenwright.explorer import viewer as viewer_module
from tokenwright.trace.frame_codec import NUMBERS, pack

STEPS = share(64)
PROMPT = "Once upon a time, there was a little fox who"
TOTALS = {
    "total_layer_tokens": "layer_tokens",
    "total_flops": "flops",
    "total_forward_tokens": "length",
    "total_step_us": "step_us",
    "total_kv_read": "kv_read",
}


def exact(value):
    """A number of the API as the page must write it."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def same(shown, value):
    return float(shown) == value if isinstance(value, float) else shown == str(exact(value))


def check_against_the_api(explored):
    """The shown step's every number, and the sums up to it."""
    check_numbers(explored.stats(), explored.steps(explored.state["step"] + 1))


def check_numbers(stats, steps):
    """What is shown of the last of these steps."""
    step = steps[-1]
    for name, wire in NUMBERS.items():
        shown, source = stats[name]
        assert same(shown, step[name]), f"{name}: the page says {shown}, the engine {step[name]}"
        assert source == wire.source
    for total, name in TOTALS.items():
        assert int(stats[total][0]) == sum(int(step[name]) for step in steps), total


def check_formulas(model, stats, prompt):
    """Counts by the closed forms of the model's shape, computed here."""
    number = {name: int(float(value)) for name, (value, _) in stats.items() if value not in ("", "true", "false")}
    t = number["seq_len"] - 1  # the context of the last row that was computed
    n = t if number["start"] == 0 else 1
    slope = 4 * model["heads"] * model["head_size"] * model["layers"]
    block, head, kv = model["block_weights"], model["head_weights"], model["kv_bytes_per_token"]
    assert number["start"] == t - n and number["length"] == n
    assert number["layer_tokens"] == n * model["layers"]
    assert number["flops"] == 2 * block * n + 2 * head + n * slope * t  # the hidden half of a chunk runs too
    assert number["flops_derived"] == 2 * block * n + 2 * head + slope * sum(range(t - n + 1, t + 1))
    assert number["kv_read"] == t * kv and number["kv_written"] == n * kv
    assert number["kv_resident"] == (t * kv if stats["cache"][0] == "true" else 0)
    assert number["kv_allocated"] == -(-t // model["page_size"]) * model["page_size"] * kv
    assert number["seq_len"] == number["prompt_tokens"] + number["generated_tokens"]
    assert number["prompt_tokens"] == prompt
    assert number["generated_tokens"] == number["step"] + 1


@pytest.mark.parametrize("cache", [True, False])
def test_each_number_of_each_step(explored, cache):
    explored.run(PROMPT, STEPS, renderer="2d")
    prompt = len(explored.post("tokenize", {"text": PROMPT})["tokens"])
    if not cache:
        explored.press("n")
    explored.pace(None)
    explored.press("Space")
    explored.until_state("done")
    explored.scrub(0)
    steps, model, lengths = explored.api("/trace.json")["steps"], explored.get("model"), []
    for step, stats in enumerate(explored.walk(STEPS - 1)):
        assert stats["step"][0] == str(step)
        check_numbers(stats, steps[: step + 1])
        check_formulas(model, stats, prompt)
        lengths.append(int(stats["length"][0]))
    naive = range(prompt, prompt + STEPS)
    forward = sum(lengths)
    assert len(lengths) == STEPS and forward == (prompt + STEPS - 1 if cache else sum(naive))
    assert explored.stats()["total_forward_tokens"][0] == str(forward)


def test_the_numbers_are_right_while_it_runs(animated):
    animated.run(PROMPT, 12, renderer="2d")
    for _ in range(3):
        animated.step()
        animated.until("document.querySelector('.page').dataset.written === 'true'")
        check_against_the_api(animated)


def test_the_formula_of_a_token_names_the_format_of_the_cache(browser):
    with serving(lambda report: LLM("stories", trace=True, report=report, pages=64, kv="int8")) as server:
        context = browser.new_context(reduced_motion="reduce")
        explored = Explored(context.new_page(), server.address).run(PROMPT, 2, stop=0)
        per_token = explored.tab.locator("[data-stat=kv_per_token]")
        assert int(per_token.get_attribute("data-value")) == server.llm.costs.bytes_per_token
        assert "the KV format (int8), scales included" in per_token.get_attribute("title")
        context.close()


def test_the_recorded_run_shows_the_golden_numbers(explored, server):
    """With no engine behind it: the golden trace file, opened as anybody may open one."""
    explored.empty()
    with explored.tab.expect_file_chooser() as chooser:
        explored.share("Open a trace")
    chooser.value.set_files(ROOT / "web" / "public" / "recorded.json")
    explored.until_state("replay")
    recorded = explored.get("recorded.json")
    explored.scrub(0)
    for step, stats in zip(recorded["steps"], explored.walk(len(recorded["steps"]) - 1), strict=True):
        for name in NUMBERS:
            assert same(stats[name][0], step[name]), name
    text = explored.tab.locator("[data-text]").evaluate("e => e.textContent")
    assert text == recorded["run"]["prompt"] + "".join(step["text"] for step in recorded["steps"])


# Planted faults: each must turn a check above red. They are sweeps, as they are about the checks.


@pytest.mark.sweep
def test_work_done_twice_turns_the_formulas_red(explored, server, monkeypatch):
    recorder = server.llm.engine.runner
    monkeypatch.setattr(recorder, "runner", Twice(recorder.runner, None))
    explored.run(PROMPT, 4, stop=1)
    check_against_the_api(explored)
    with pytest.raises(AssertionError):
        check_formulas(explored.get("model"), explored.stats(), 12)


@pytest.mark.sweep
def test_a_frame_that_lies_turns_the_comparison_red(explored, monkeypatch):
    monkeypatch.setattr(viewer_module, "pack", lambda frame: pack(replace(frame, kv_read=frame.kv_read + 1)))
    explored.run(PROMPT, 4, stop=1)
    with pytest.raises(AssertionError, match="kv_read"):
        check_against_the_api(explored)


def rows(explored, server, picks):
    """The worst difference between the page's rows and the reference, for (step, layer, head)."""
    worst = 0.0
    for step, layer, head in picks:
        explored.scrub(step)
        state = explored.state
        for keys, way in (("[]", layer - state["layer"]), ("{}", head - state["head"])):
            for _ in range(abs(way)):
                explored.press(keys[way > 0])
        explored.until(
            f"window.__explorer.row?.layer === {layer} && window.__explorer.row.head === {head} "
            f"&& window.__explorer.state.step === {step}"
        )
        row = explored.tab.evaluate("window.__explorer.row")
        right = row_of_run(server.explorer.run(explored.state["run"]), step, layer, head)
        assert len(row["codes"]) == len(right), "nothing beyond the row's own position"
        weights = [(code / 255) ** 2 for code in row["codes"]]
        worst = max([worst, *(abs(a - b) for a, b in zip(weights, right, strict=True))])
        assert right[row["argmax"]] == max(right)
        assert abs(sum(weights) - 1) <= 0.01
    return worst


PICKS = [(0, 0, 0), (7, 4, 3), (11, 5, 7), (3, 2, 5), (9, 1, 4), (11, 3, 1)]


def test_attention_rows_are_the_references(explored, server):
    explored.run(PROMPT, 12, stop=11)
    explored.until_state("done")
    assert rows(explored, server, PICKS) <= 0.004


@pytest.mark.sweep
def test_a_stale_page_turns_the_rows_red(browser):
    with serving(load) as server:  # of its own: what it computes stays in its cache
        recorder = server.llm.engine.runner
        recorder.runner = Wrong(recorder.runner, stale)
        context = browser.new_context(reduced_motion="reduce")
        explored = Explored(context.new_page(), server.address).run(PROMPT, 12, stop=11)
        with pytest.raises(AssertionError):
            assert rows(explored, server, [(step, 4, 3) for step in range(5, 12)]) <= 0.004
        context.close()


@pytest.mark.parametrize("prompt", [PROMPT, "A 😀 日本 é ", "def f(n):\n    return"])
def test_the_text_is_the_models(explored, server, prompt):
    explored.run(prompt, 10, seed=3, stop=None)
    state = explored.state
    frames = [explored.api(f"/steps/{n}") for n in range(state["steps"])]
    ids = [frame["token"] for frame in frames]
    assert state["ids"][-len(ids) :] == ids
    parts = {
        part: explored.tab.locator(f"[data-part={part}]").evaluate("e => e.textContent")
        for part in ("prompt", "generated")
    }
    whole = explored.tab.locator("[data-text]").evaluate("e => e.textContent")
    [completion] = server.llm.generate(prompt, server.llm.sampling(temperature=0.7, seed=3, max_tokens=10))
    assert parts == {"prompt": prompt, "generated": completion.text}
    assert whole == prompt + completion.text
    assert explored.post("detokenize", {"ids": state["ids"]}) == {"text": whole}
    if "\ufffd" not in completion.text:
        assert "\ufffd" not in explored.tab.locator("body").inner_text()


def shown_bars(explored):
    """The shown candidates: id, the model's probability, the sampler's."""
    return explored.tab.eval_on_selector_all(
        "[data-candidate]", "all => all.map(e => [+e.dataset.candidate, +e.dataset.p, +e.dataset.sampled])"
    )


def check_bars(explored, step):
    """The bars are the most probable ids of the whole vocabulary, by the logits of the step."""
    chances = softmax(logits_of(explored, step))
    bars = shown_bars(explored)
    assert len(bars) >= 8
    best = sorted(chances, reverse=True)[: len(bars)]
    assert [p for _, p, _ in bars[:-1]] == pytest.approx(best[:-1], rel=1e-4), "the last may be the chosen one"
    assert all(p == pytest.approx(chances[token], rel=1e-4) for token, p, _ in bars)


@pytest.mark.sweep
def test_repeated_candidates_turn_the_bars_red(explored, server, monkeypatch):
    recorder = server.llm.engine.runner
    monkeypatch.setattr(recorder, "runner", Repeats(recorder.runner, None))
    explored.run(PROMPT, 4, stop=0)
    check_bars(explored, 0)
    explored.step()
    with pytest.raises(AssertionError):
        check_bars(explored, 1)


def test_the_bars_are_the_models_chances(explored):
    explored.run(PROMPT, 6, stop=3)
    check_bars(explored, 3)
    frame = explored.api("/steps/3")
    for (token, p, sampled), candidate in zip(shown_bars(explored), frame["candidates"], strict=False):
        assert (token, sampled) == (candidate["token"], candidate["sampled"])
        assert p == pytest.approx(math.exp(candidate["logprob"]), rel=1e-9)
