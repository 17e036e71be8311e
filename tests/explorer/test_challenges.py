"""Each challenge on the model that ships inside: a right answer passes, a wrong one is told why and what to try."""

import random
import re
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.engines import assert_at_rest, settled
from tests.models.fixtures import make_checkpoint
from tests.trace.definition import defined_row
from tokenwright import LLM, RequestError, SamplingParams
from tokenwright.explorer.learn import (
    CHALLENGES,
    CheckWork,
    agreement,
    cache_size,
    claims,
    find_heads,
    lesson,
    savings,
)
from tokenwright.explorer.learn.challenge import OPENING, STORY, repeated
from tokenwright.explorer.learn.forward import ForwardPass
from tokenwright.explorer.learn.work import Stopped
from tokenwright.explorer.panels import heads as heads_panel


@pytest.fixture(scope="module")
def llm():
    with LLM("stories", trace=True, pages=128) as model:
        yield model
        assert_at_rest(model)


@pytest.fixture(scope="module")
def models(llm, tmp_path_factory):
    """The model inside, and two of random weights, one of which has learned positions and no sinks."""
    folder = tmp_path_factory.mktemp("models")
    made = [make_checkpoint(folder / name, name)[0] for name in ("gpt2", "qwen2")]
    with LLM(made[0], pages=64, trace=True) as learned, LLM(made[1], pages=64, trace=True) as rotated:
        yield llm, learned, rotated


@pytest.fixture
def check(llm):
    def checked(challenge, **answer):
        one = CHALLENGES[challenge]
        return one.check(CheckWork(llm), one.read(answer))

    return checked


def facts(checked):
    found = {fact.name: fact.value for fact in checked.facts}
    assert len(found) == len(checked.facts), "a name is one figure"
    return found


VERDICTS = {one.name: "right" if one.right else "wrong" for one in claims.CLAIMS}

WRONG = [
    ("bound", {"format": "Answer in one word.", "max_tokens": 1}, "truncates"),
    ("bound", {"format": "Explain.", "max_tokens": 200}, "shorter form"),
    ("phases", {"prefill_tokens": 8, "prefill_new": 100, "decode_tokens": 8, "decode_new": 200}, "more to read"),
    ("share", {"order": "question first", "salt": "one for all"}, "first tokens"),
    ("share", {"order": "document first", "salt": "one each"}, "salt"),
    ("balance", {"tokens": 3757, "tokens_batch": 3757}, "batch of 8"),
    ("fit", {"level": "cache alone", "kv_heads": "8", "kv": "int8", "full_layers": 32, "window": 1}, "1.0625"),
    ("fit", {"level": "cache and weights", "kv_heads": "8", "kv": "int4", "full_layers": 32, "window": 1}, "1.35 GB"),
    ("win", {"ratio": 100.0}, "larger than 100"),
    ("sampler", {"temperature": 0.7, "top_p": 1.0, "seed": 0}, "temperature up"),
    ("steer", {"prompt": "The opposite of hot is"}, "opposite"),
    ("steer", {"prompt": "The opposite of a big day is"}, "exactly one token"),
    ("heads", {"previous": "0.0", "sink": "1.4", "induction": "5.3"}, "no previous token head"),
    ("window", {"window": 7, "sinks": 1}, "above 1.09"),
    ("window", {"window": 40, "sinks": 1}, "Find the smallest"),
    ("window", {"window": 18, "sinks": 0}, "keep some first tokens"),
    ("bits", {"k": "int4", "v": "int4"}, "changes at its token"),
    ("bits", {"k": "native", "v": "native"}, "need not be alike"),
    ("beams", {"prompt": "Her mother gave her"}, "misleads"),
    ("claims", VERDICTS | {"gib": 1, "times": 13, "linear": "right"}, "8 of 9 verdicts hold.*all earlier tokens"),
    ("claims", VERDICTS | {"gib": 4, "times": 13}, "another one"),
    ("claims", VERDICTS | {"gib": 1, "times": 20}, "2,100 to 162"),
]


@pytest.mark.parametrize(("challenge", "answer", "told"), WRONG)
def test_a_wrong_answer_is_told_why(check, challenge, answer, told):
    checked = check(challenge, **answer)
    assert not checked.passed and re.search(told, checked.message), checked
    assert checked.facts, "with the figures that it used"


@pytest.mark.parametrize("challenge", CHALLENGES)
def test_no_challenge_passes_with_what_its_form_begins_with(models, challenge):
    """On models of every kind: an answer that was not given is no answer."""
    one = CHALLENGES[challenge]
    for model in models:
        passed = False
        with suppress(RequestError):
            answer = one.read({field.name: field.start for field in one.fields})
            passed = one.check(CheckWork(model), answer).passed
        assert not passed, model.config


RIGHT = [
    ("bound", {"format": "Answer in one word.", "max_tokens": 16}),
    ("phases", {"prefill_tokens": 1000, "prefill_new": 4, "decode_tokens": 8, "decode_new": 400}),
    ("share", {"order": "document first", "salt": "one for all"}),
    ("balance", {"tokens": 3759, "tokens_batch": 470}),
    ("fit", {"level": "cache alone", "kv_heads": "8", "kv": "float16", "full_layers": 8, "window": 4096}),
    ("fit", {"level": "cache and weights", "kv_heads": "8", "kv": "int4", "full_layers": 8, "window": 4096}),
    ("win", {"ratio": 320.0}),
    ("steer", {"prompt": "The opposite of day is"}),
    ("heads", {"previous": "4.1", "sink": "1.4", "induction": "5.3"}),
    ("window", {"window": 8, "sinks": 1}),
    ("beams", {"prompt": "The dog ran after the"}),
    ("claims", VERDICTS | {"gib": 1, "times": 13}),
]


@pytest.mark.parametrize(("challenge", "answer"), RIGHT)
def test_a_right_answer_passes(check, challenge, answer):
    checked = check(challenge, **answer)
    assert checked.passed, checked


def test_every_challenge_has_both(check):
    """Those of which the answer has to be searched have tests of their own."""
    own = {"agree", "predict", "sampler"}
    right = {name for name, _ in RIGHT} | own | {"bits"}
    assert right == CHALLENGES.keys() == {name for name, *_ in WRONG} | own - {"sampler"}
    assert Counter(one.card for one in CHALLENGES.values()).keys() == {
        "loop", "phases", "qkv", "notebook", "savings", "dial", "smaller", "training",
    }  # fmt: skip
    assert len(CHALLENGES) == 15


def test_the_clock_decides_about_no_answer(check, monkeypatch):
    """A clock that says the opposite changes figures, and no verdict of a challenge about fewer tokens."""
    text = CheckWork.text

    def slow(work, llm, prompt, params, **rest):
        found = text(work, llm, prompt, params, **rest)
        usage = found.usage
        fast = usage.completion_tokens > 16 or (len(prompt) > 300 and not usage.reused_tokens)
        return replace(found, usage=replace(usage, token_s=((0.001 if fast else 9.0),) * usage.completion_tokens))

    monkeypatch.setattr(CheckWork, "text", slow)
    for challenge, answer in RIGHT:
        if challenge in ("bound", "share"):
            assert check(challenge, **answer).passed, challenge


def test_the_figures_of_the_claims_are_the_published_ones(check):
    """The figure that decides a sentence comes with the right verdict on it, and not before."""
    found = facts(check("claims", **VERDICTS, gib=0, times=0))
    assert (found["heads"], found["batch"], found["cache"]) == (2**30, 2**33, 2**32)
    assert found["weights"] > 3 * found["cache"] and found["megabyte"] == 320 * 1024 * 131_072
    assert (found["cached"], found["naive"], round(found["ratio"], 1)) == (162, 2100, 13.0)
    assert found["products"] == 15_009_316_864 and round(found["linear"]) == 4
    assert set(facts(check("claims", **dict.fromkeys(VERDICTS, "open"), gib=0, times=0))) == {"verdicts"}


def test_published_sizes_of_the_cache():
    """EXPLORER's figures for 131,072 tokens in the shape of Llama-3-8B, in GB."""
    sizes = {
        68.72: (32, "float16", 32, 1), 17.18: (8, "float16", 32, 1), 9.13: (8, "int8", 32, 1),
        4.83: (8, "int4", 32, 1), 4.70: (8, "float16", 8, 4096),
    }  # fmt: skip
    for right, shape in sizes.items():
        assert round(cache_size.llama_cache(*shape) / 1e9, 2) == right


TRACES = {  # where the keys and the values of the first layer differ: the written tokens are 72 to 135
    agreement.SHIFTED: ("72 to 134", "nowhere"),
    agreement.TWICE: ("2 to 134", "nowhere"),
    agreement.MASK: ("nowhere", "nowhere"),
    agreement.STALE: ("17 to 32", "17 to 32"),
    agreement.EOS: ("nowhere", "nowhere"),
}


@pytest.mark.parametrize("fault", TRACES)
def test_a_planted_fault_leaves_its_trace_and_is_named(llm, check, fault):
    [case] = [name for name, planted in agreement.planted(llm).items() if planted == fault]
    checked = check("agree", case=case, fault=fault)
    found = facts(checked)
    assert checked.passed, checked
    assert (found["case_keys"], found["case_values"]) == TRACES[fault]
    near = agreement.tolerance(llm)
    assert (found["equal"], found["apart"] <= near) == (64, True)
    healthy = found["case_equal"] == 64 and found["case_apart"] <= near
    assert healthy is (fault == agreement.EOS), "the other faults change logits"
    assert (found["cached_tokens"] != found["uncached_tokens"]) is (fault == agreement.EOS)


def test_a_fault_with_another_name_is_told_what_would_be_seen(llm, check):
    [case] = [name for name, planted in agreement.planted(llm).items() if planted == agreement.STALE]
    wrong = check("agree", case=case, fault=agreement.TWICE)
    assert not wrong.passed and "no values" in wrong.message and facts(wrong)["case_keys"] == "17 to 32"
    look = check("agree", case=case, fault=agreement.LOOK)
    assert not look.passed and "Name it" in look.message and facts(look) == facts(wrong)


def test_the_reference_pass_is_the_engines(llm):
    """Its logits, of a chunk and of single rows, against the engine's model as a function."""
    ids, work = llm.tokenizer.encode(STORY), CheckWork(llm)
    right = llm.model(ids)[0]
    text = ForwardPass(work, len(ids))
    rows = np.concatenate([text.rows(ids[:40], 0), *(text.rows(ids[n : n + 1], n) for n in range(40, len(ids)))])
    assert abs(rows - right).max() < 0.2, "the engine's cache is in bf16"
    assert (rows.argmax(-1) == right.argmax(-1)).mean() > 0.95


def predicted(llm, tokens):
    """By the formulas, from shapes alone."""
    config = llm.config
    block = sum(
        a * b for name, (a, b) in ((n, s) for n, s in llm.graph.shapes.items() if len(s) == 2) if "layers" in name
    )
    head, slope = config.width * config.vocab_size, 4 * config.heads * config.head_size * config.layers
    return {
        "flops": float(2 * (block + head) + slope * tokens),
        "kv_bytes": 2 * config.layers * config.kv_heads * config.head_size * 2 * tokens,
        "forward": 1,
        "uncached_flops": float(2 * block * tokens + 2 * head + slope * tokens * (tokens + 1) // 2),
        "uncached_forward": tokens,
    }


def test_five_predictions_in_a_row(llm, check):
    contexts = savings.contexts(llm)
    assert len(contexts) == 5 and all(one < other for one, other in pairwise(contexts))
    for done, tokens in enumerate(contexts):
        right = predicted(llm, tokens)
        checked = check("predict", **right, streak=done)
        assert checked.streak == done + 1 and checked.passed is (done == 4), checked
        assert {name: facts(checked)[f"right_{name}"] for name in right} == right
    wrong = check("predict", **predicted(llm, contexts[3]) | {"forward": 2}, streak=3)
    assert not wrong.passed and wrong.streak == 0 and "newest token" in wrong.message


def test_a_seed_that_draws_far_down(check):
    wrong = check("sampler", temperature=1.4445, top_p=1.0, seed=0)
    assert not wrong.passed and "other seeds" in wrong.message
    rank, seed = 0, 0
    while rank < 5:
        seed += 1
        checked = check("sampler", temperature=1.4445, top_p=1.0, seed=seed)
        rank = facts(checked)["rank"]
        assert checked.passed is (rank >= 5)
    assert abs(facts(checked)["entropy"] - 2) <= 0.05


def test_a_sink_head_is_what_the_page_calls_one(llm, check):
    """The measure of the panel Heads, on the text of the challenge: each head that is a sink there passes."""
    work = CheckWork(llm)
    with llm.run(STORY, SamplingParams(temperature=0, max_tokens=1)) as run:
        run.step()
        *_, card = heads_panel.atlas_card(run.look, run.tokens[:-1], 0, llm.config.layers, llm.config.heads)
    own = find_heads.masses(work)["sink"]
    assert max(abs(float(own[one.layer, one.head]) - one.sink) for one in card.heads) < 0.01
    [best] = [one for one in card.heads if one.kind == "sink"]
    assert (best.layer, best.head) == (1, 4)
    assert check("heads", previous="4.1", sink="1.4", induction="5.3").passed
    assert "ready prompt Story" in check("heads", previous="4.1", sink="4.4", induction="5.3").message


def test_the_masses_are_those_of_the_replayed_rows(llm):
    """The mean weight on the token before, of one head, from the rows that a run replays."""
    work = CheckWork(llm)
    segment = random.Random(7).choices(range(10, 4000), k=12)
    begin = llm.tokenizer.encode("")
    found, ids = find_heads._of(work, begin, segment * 2), begin + segment * 2
    rows = []
    with llm.run(ids[:1], SamplingParams(temperature=0, max_tokens=1)) as run:
        run.step()
        rows = [
            llm.inspect(lambda _, n=n: defined_row(run._recording.replay, ids[: n + 1], len(ids), 4, 1))
            for n in range(1, len(ids))
        ]
    previous = sum(row[-2] for row in rows) / len(rows)
    assert abs(float(found["previous"][4, 1]) - previous) < 0.01


ANSWERS = [
    ("bound", {"format": "x"}, "max_tokens is missing"),
    ("bound", {"format": "x", "max_tokens": 1, "more": 1}, "more is no field"),
    ("bound", {"format": "", "max_tokens": 1}, "“added to the question” must be text"),
    ("bound", {"format": "x" * 201, "max_tokens": 1}, "1 to 200"),
    ("bound", {"format": "x", "max_tokens": 1.5}, "whole number"),
    ("bound", {"format": "x", "max_tokens": True}, "“max tokens” must be a number"),
    ("balance", {"tokens": -1, "tokens_batch": 1}, "from 0"),
    ("fit", {"level": "both", "kv_heads": "8", "kv": "int8", "full_layers": 1, "window": 1}, "“level” must be one of"),
    ("heads", {"previous": "4", "sink": "4.4", "induction": "5.3"}, "such as 4.1"),
]


@pytest.mark.parametrize(("challenge", "answer", "told"), ANSWERS)
def test_an_answer_that_makes_no_sense_is_refused_by_its_field(challenge, answer, told):
    with pytest.raises(RequestError, match=told):
        CHALLENGES[challenge].read(answer)


@pytest.mark.parametrize(
    ("challenge", "answer", "told"),
    [
        ("heads", {"previous": "6.0", "sink": "4.4", "induction": "5.3"}, "“previous token head” must be .* to 5.7"),
        ("phases", {"prefill_tokens": 1000, "prefill_new": 400, "decode_tokens": 8, "decode_new": 2}, "1024"),
        ("beams", {"prompt": "a b c d " * 50 + "e" * 900}, "“opening”"),
    ],
)
def test_what_the_model_cannot_do_is_refused(check, challenge, answer, told):
    with pytest.raises(RequestError, match=told):
        check(challenge, **answer)


def test_a_check_ends_when_it_is_cancelled_and_when_its_time_is_over(llm):
    answer = CHALLENGES["phases"].read({"prefill_tokens": 8, "prefill_new": 500, "decode_tokens": 8, "decode_new": 500})
    with pytest.raises(Stopped, match="after 0"):
        CHALLENGES["phases"].check(CheckWork(llm, seconds=0), answer)
    work, began = CheckWork(llm), threading.Event()
    original = work.check

    def noted():
        began.set()
        original()

    work.check = noted
    found = []

    def run():
        try:
            CHALLENGES["phases"].check(work, answer)
        except Stopped as stopped:
            found.append(stopped)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(60)
    work.cancel()
    thread.join(60)
    assert not thread.is_alive() and "cancelled" in str(found[0])


def test_a_check_changes_nothing_that_is_counted_or_kept(llm, check):
    """Neither the engine's pages, nor its counters, nor its prefix cache."""
    engine = settled(llm)
    before = engine.pool.available, llm.loaded.decoder.layer_tokens
    check("predict", **predicted(llm, 40), streak=0)
    check("steer", prompt="The opposite of day is")
    assert (settled(llm).pool.available, llm.loaded.decoder.layer_tokens) == before
    assert not settled(llm).scheduler.sequences


def test_models_of_other_kinds(tmp_path):
    """Without rotation a fault and the sinks do not exist; without a chat template a question is a text."""
    folder, _ = make_checkpoint(tmp_path / "gpt2", "gpt2")
    with LLM(folder, pages=64, trace=True) as llm:
        cases = agreement.planted(llm)
        assert len(cases) == 4 and agreement.TWICE not in cases.values()
        assert {one.id for one in lesson(llm).challenges} == CHALLENGES.keys()
        sinks = CHALLENGES["window"].read({"window": 4, "sinks": 2})
        assert "no sinks" in CHALLENGES["window"].check(CheckWork(llm), sinks).message
        assert (
            "choose another"
            in CHALLENGES["agree"]
            .check(CheckWork(llm), CHALLENGES["agree"].read({"case": "E", "fault": agreement.LOOK}))
            .message
        )


def test_the_fewest_bits_are_found_by_search(llm, check):
    """Which formats keep all tokens depends on the instruction set: some of the tokens are close to a tie."""
    work = CheckWork(llm)
    prompt = work.ids(OPENING)
    ids = prompt + work.greedy(prompt, cache_size.SAME)
    ordered = sorted((cache_size._per_token(work, k, v), k, v) for k in cache_size.FORMATS for v in cache_size.FORMATS)
    size, k, v = next(one for one in ordered if cache_size._holds(work, ids, *one[1:]) == cache_size.SAME)
    checked = check("bits", k=k, v=v)
    assert checked.passed and facts(checked)["bytes"] == size < ordered[-1][0]


def test_the_smallest_window_is_found_by_search(llm):
    """That the test's answer is the smallest with its sinks."""
    work = CheckWork(llm)
    ids = cache_size.text_of(work)
    kl = cache_size.divergence(work, ids)
    most = kl(4, 0) / 3
    assert kl(8, 1) < most <= kl(7, 1) and kl(17, 0) >= most, "without sinks it takes more than twice as many"
    assert repeated([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
