"""Choosing tokens through the front door: several texts, beams, log-probabilities, and every way that a text ends."""

import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from tests.engines import assert_at_rest
from tokenwright import LLM, CapacityError, EngineError, Grammar, RequestError, SamplingParams
from tokenwright.backends.torch.border import tensor
from tokenwright.decode import BeamSearch, stopping
from tokenwright.engine import NoStopChecker
from tokenwright.engine.loop import Inbox

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    with LLM("stories") as llm:
        yield llm
        assert_at_rest(llm)


def one(llm, prompt=PROMPT, **params):
    return llm.generate(prompt, SamplingParams(**params))[0]


def test_n_texts_are_the_same_in_any_company_and_the_first_is_that_of_its_seed(llm):
    alone = one(llm, n=4, seed=5, max_tokens=12)
    assert len({text.text for text in alone.choices}) == 4
    assert alone.text == one(llm, seed=5, max_tokens=12).text
    crowd = [SamplingParams(seed=seed, max_tokens=9, n=1 + seed % 3) for seed in range(5)]
    crowd.insert(2, SamplingParams(n=4, seed=5, max_tokens=12))
    together = llm.generate([PROMPT] * 6, crowd)
    assert [text.text for text in together[2].choices] == [text.text for text in alone.choices]


def test_seeds_hold_through_preemption():
    """A cache for one long text and a bit: others are put off, and write what they write with room."""
    params = [SamplingParams(seed=seed, n=3, max_tokens=40, temperature=1.3) for seed in range(4)]
    prompts = [PROMPT, "The cat", "A dog said", "One day"]
    with LLM("stories", page_size=4) as roomy:
        expected = roomy.generate(prompts, params)
    with LLM("stories", page_size=4, pages=16, max_sequences=5) as tight:
        found = tight.generate(prompts, params)
        assert any(text.usage.preemptions for completion in found for text in completion.choices)
    assert [[text.token_ids for text in c.choices] for c in found] == [
        [text.token_ids for text in c.choices] for c in expected
    ]


def test_best_of_returns_the_likeliest_of_all(llm):
    all_of = one(llm, n=6, seed=2, max_tokens=10)
    ranked = sorted(all_of.choices, key=lambda text: -sum(text.logprobs) / len(text.logprobs))
    best = one(llm, n=2, best_of=6, seed=2, max_tokens=10)
    assert [text.token_ids for text in best.choices] == [text.token_ids for text in ranked[:2]]


def test_logprobs_are_the_models_and_the_samplers_apart(llm):
    done = one(llm, seed=3, max_tokens=8, temperature=0.5, top_k=5, logprobs=7)
    ids = llm.tokenizer.encode(PROMPT)
    rows, _ = llm.model([*ids, *done.token_ids])
    for place, token in enumerate(done.token_ids):
        row = tensor(rows[len(ids) + place - 1]).double()
        model = row.log_softmax(-1)
        cut = torch.where(row >= row.topk(5).values[-1], row / 0.5, -math.inf).log_softmax(-1)
        assert done.logprobs[place] == pytest.approx(float(model[token]), abs=1e-4)
        assert done.sampler_logprobs[place] == pytest.approx(float(cut[token]), abs=1e-4)
        top = done.top_logprobs[place]
        assert [other.token for other in top] == row.topk(7).indices.tolist()
        assert [other.logprob for other in top] == pytest.approx(model[[o.token for o in top]].tolist(), abs=1e-4)
        assert [other.sampler_logprob for other in top] == pytest.approx(cut[[o.token for o in top]].tolist(), abs=1e-4)


def test_greedy_had_no_choice(llm):
    done = one(llm, temperature=0, max_tokens=4)
    assert done.sampler_logprobs == (0.0,) * 4
    assert done.top_logprobs == ()


def test_prompt_logprobs_are_the_scores_and_have_their_tops(llm):
    done = one(llm, temperature=0, max_tokens=2, prompt_logprobs=3)
    assert done.prompt_logprobs == pytest.approx(llm.score(PROMPT), abs=1e-6)
    assert [len(top) for top in done.prompt_top_logprobs] == [3] * len(done.prompt_logprobs)
    best = [top[0].logprob for top in done.prompt_top_logprobs]
    assert all(highest >= own for highest, own in zip(best, done.prompt_logprobs, strict=True))
    assert one(llm, temperature=0, max_tokens=2).prompt_logprobs == ()


def test_continuations_are_scored_after_the_prompt_they_share(llm):
    prompt, ends = "The capital of France is", [" Paris.", " London.", " a big red ball", [5, 6]]
    found = llm.score(prompt, ends)
    ids = llm.tokenizer.encode(prompt)
    for end, scores in zip(ends, found, strict=True):
        own = llm.tokenizer.encode(prompt + end)[len(ids) :] if isinstance(end, str) else end
        assert scores == pytest.approx(llm.score([*ids, *own])[-len(own) :], abs=1e-4)
    assert sum(found[0]) > sum(found[1])
    with pytest.raises(RequestError, match="given as a list"):
        llm.score(prompt, " Paris")


def test_beams_score_at_least_what_greedy_does(llm):
    greedy = one(llm, temperature=0, max_tokens=12)
    best = one(llm, beams=8, n=8, max_tokens=12, length_penalty=0.0)
    assert best.score >= sum(greedy.logprobs) - 1e-6
    assert [text.score for text in best.choices] == sorted((text.score for text in best.choices), reverse=True)
    for text in best.choices:
        assert text.score == pytest.approx(sum(text.logprobs), abs=1e-6)
        assert text.logprobs == pytest.approx(llm.score(PROMPT, [list(text.token_ids)])[0], abs=1e-4), (
            "a beam's pages hold its own text"
        )


def test_times_of_a_search_begin_with_its_first_tokens(llm):
    """The prompt is computed in several steps, each of which delivers prompt logprobs."""
    search = SamplingParams(beams=2, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    with LLM(llm.loaded, pages=64, token_budget=16) as short:
        inbox, times = Inbox(), []
        [handle] = short.submit([short.prepare(list(range(300, 360)), search)], inbox)
        transcript = short.transcript(handle)
        while not transcript.ended:
            for delivery in inbox.get():
                transcript.add(delivery)
                times.append(delivery.time - handle.submitted)
    assert len(transcript.prompt_logprobs) == 59 and len(times) == 4 + 2
    assert transcript.completion().usage.token_s == tuple(times[-3:])


def test_beams_end_at_stop_strings_which_cross_tokens(llm):
    done = one(llm, beams=4, n=4, max_tokens=24, stop=["girl named", "y named T"])
    stopped = [text for text in done.choices if text.finish_reason == "stop"]
    assert stopped
    for text in done.choices:
        assert "girl named" not in text.text
        assert (text.stopped in ("girl named", "y named T")) == (text.finish_reason == "stop")
    kept = one(llm, beams=4, n=4, max_tokens=24, stop=["girl named", "y named T"], include_stop=True)
    assert {text.text.removesuffix(str(text.stopped)) for text in kept.choices} == {text.text for text in done.choices}


def test_beams_and_texts_keep_to_a_grammar(llm):
    grammar = Grammar.regex("(yes|no), [A-Z][a-z]{2,5}!")
    for params in ({"beams": 4, "n": 4}, {"n": 4, "seed": 1}, {"temperature": 0}):
        done = one(llm, grammar=grammar, max_tokens=24, **params)
        for text in done.choices:
            assert re.fullmatch("(yes|no), [A-Z][a-z]{2,5}!", text.text), text
            assert text.finish_reason in ("grammar", "eos")


def test_what_greedy_writes_under_a_schema_is_json_of_it(llm):
    schema = {"type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}, "old": {"type": "boolean"}}}
    schema |= {"required": ["name", "old"], "additionalProperties": False}
    done = one(llm, "A child:", grammar=Grammar.json_schema(schema), temperature=0, max_tokens=60)
    value = json.loads(done.text)
    assert value["name"] in ("Tom", "Lily")
    assert isinstance(value["old"], bool)


def test_each_end_has_its_reason(llm):
    greedy = {"temperature": 0, "max_tokens": 16}
    whole = one(llm, **greedy)
    third = whole.token_ids[2]
    assert whole.finish_reason == "length"
    by_id = one(llm, **greedy, stop_ids=[third])
    assert (by_id.finish_reason, by_id.stopped, by_id.token_ids) == ("stop_id", third, whole.token_ids[:3])
    kept = one(llm, **greedy, stop_ids=[third], include_stop=True)
    assert kept.text == by_id.text + llm.tokenizer.token_text(third)
    by_text = one(llm, **greedy, stop=[whole.text[5:9]])
    assert (by_text.finish_reason, by_text.text) == ("stop", whole.text[:5])
    assert one(llm, "The capital of France is", **greedy).finish_reason == "eos"
    with LLM("stories", pages=70) as small:
        long = [5] * (small.context - 3)
        assert one(small, long, **greedy, ignore_eos=True).finish_reason == "context"


def test_the_first_tokens_end_nothing(llm):
    prompt, greedy = "The capital of France is", {"temperature": 0, "max_tokens": 30}
    short = one(llm, prompt, **greedy)
    assert short.finish_reason == "eos"
    longer = one(llm, prompt, **greedy, min_tokens=12, stop=["."])
    assert len(longer.token_ids) > 12
    assert not any(token in llm.eos_ids for token in longer.token_ids[:12])


def test_a_deadline_ends_a_text_and_what_was_held_back_is_shown(llm, monkeypatch):
    whole = one(llm, temperature=0, max_tokens=20)
    monkeypatch.setattr(llm.engine.scheduler, "proposer", None)  # one token a step
    now = itertools.count()
    monkeypatch.setattr(stopping.TextStopChecker, "finished", deadline_after(8, now))
    stop = whole.text[10:] + "never"  # it holds all back from there on
    with llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=20, stop=[stop])) as stream:
        pieces = list(stream)
    done = stream.completion
    assert done.finish_reason == "time"
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]
    assert done.text == "".join(piece.text for piece in pieces) == llm.tokenizer.decode(done.token_ids)
    assert len(done.text) > 10


def deadline_after(steps, now):
    def finished(self):
        return stopping.FinishReason.TIME if next(now) >= steps else None

    return finished


def test_a_real_deadline_ends_texts_and_searches(llm):
    for params in ({"temperature": 0}, {"beams": 3, "n": 3}):
        done = one(llm, max_tokens=900, max_seconds=0.05, ignore_eos=True, **params)
        assert done.finish_reason == "time"
        assert all(text.finish_reason == "time" for text in done.choices)
    late = one(llm, max_tokens=5, max_seconds=0.0)
    assert (late.finish_reason, len(late.token_ids) <= 1) == ("time", True)


def test_an_abort_ends_all_texts_of_a_request(llm):
    stream = llm.stream(PROMPT, SamplingParams(n=3, seed=1, max_tokens=500, ignore_eos=True))
    pieces = list(itertools.islice(stream, 7))
    assert {piece.choice for piece in pieces} == {0, 1, 2}
    stream.close()
    assert {text.finish_reason for text in stream.completion.choices} == {"aborted"}


def test_what_is_known_at_the_end_alone_does_not_stream(llm):
    for params in ({"beams": 2}, {"best_of": 2}):
        with pytest.raises(RequestError, match="use generate"):
            llm.stream(PROMPT, SamplingParams(**params))


def test_nothing_left_to_choose_fails_its_own_text_alone(llm):
    ids = llm.tokenizer.encode("yes", add_special=False)
    dead = SamplingParams(grammar=Grammar.choice(["yes"]), banned_ids=range(4000), temperature=0)
    with pytest.raises(EngineError, match="nothing is left to choose") as failed:
        llm.generate([PROMPT, PROMPT], [dead, SamplingParams(temperature=0, max_tokens=3)])
    assert failed.value.completions[0] is None
    assert len(failed.value.completions[1].token_ids) == 3
    assert ids
    with pytest.raises(EngineError, match="nothing is left to choose"):
        llm.generate(PROMPT, SamplingParams(grammar=Grammar.choice(["yes"]), banned_ids=range(4000), beams=2))


@pytest.mark.parametrize("name", ["banned_ids", "allowed_ids", "stop_ids", "logit_bias"])
def test_ids_beyond_the_vocabulary_are_refused(llm, name):
    value = {4096: 1.0} if name == "logit_bias" else [4096]
    with pytest.raises(RequestError, match=f"{name} has the id 4096; the model's ids are 0 to 4095"):
        llm.generate(PROMPT, SamplingParams(**{name: value}))


def test_more_beams_than_run_at_once_are_refused():
    with LLM("stories", max_sequences=3) as small, pytest.raises(CapacityError, match="4 beams advance in one step"):
        one(small, beams=4)


def test_suggestions_for_drawing_are_left_out_of_a_search(llm):
    assert llm.sampling(beams=3) == SamplingParams(beams=3)
    assert llm.sampling().temperature == llm.generation.temperature != 1.0


def test_bad_words_are_not_written(llm):
    free = one(llm, temperature=0, max_tokens=30).text
    assert " little" in free
    held = one(llm, temperature=0, max_tokens=30, bad_words=["little", "Lily"]).text
    assert "little" not in held
    assert "Lily" not in held


def test_a_word_that_is_nothing_to_the_tokenizer_is_refused(llm, monkeypatch):
    """WordPiece drops spaces: such a word has no tokens that could be kept from being written."""
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **_: [7] if text.strip() else [])
    with pytest.raises(RequestError, match="bad_words has '  ', which is nothing to this model's tokenizer"):
        llm.generate([5, 6], SamplingParams(bad_words=["  "]))


@pytest.mark.parametrize("params", [{"n": 3, "seed": 1}, {"n": 3, "best_of": 4, "seed": 1}])
def test_texts_that_end_before_they_part_are_as_many_as_were_asked_for(llm, params):
    done = one(llm, max_tokens=0, **params)
    assert [(text.text, text.finish_reason) for text in done.choices] == [("", "length")] * 3


def test_a_search_that_only_scores_its_prompt_has_a_reason(llm):
    done = one(llm, beams=3, max_tokens=0, prompt_logprobs=1)
    assert (done.finish_reason, done.token_ids, len(done.choices)) == ("length", (), 1)
    assert done.prompt_logprobs == one(llm, temperature=0, max_tokens=0, prompt_logprobs=1).prompt_logprobs


@pytest.mark.parametrize("token_budget", [3, 7, 512])
def test_the_logprobs_of_a_searchs_prompt_are_those_of_any_request(llm, token_budget):
    """However the prompt is cut: whoever writes the first token in the same step scores it by the same totals."""
    right = one(llm, temperature=0, max_tokens=2, prompt_logprobs=2)
    with LLM("stories", token_budget=token_budget) as other:
        for params in ({"beams": 3}, {"temperature": 0.0}):
            done = one(other, max_tokens=2, prompt_logprobs=2, **params)
            assert done.prompt_logprobs == right.prompt_logprobs
            assert done.prompt_top_logprobs == right.prompt_top_logprobs


def test_the_time_that_a_grammar_takes_to_compile_counts(llm, monkeypatch):
    clock = itertools.count(10.0, 100.0)  # each look at it is 100 seconds after the one before
    monkeypatch.setattr("tokenwright.llm.input_processor.time", SimpleNamespace(monotonic=lambda: next(clock)))
    compiled = llm.loaded.vocabulary.grammars(llm.eos_ids)
    monkeypatch.setattr(compiled, "compile", lambda *_, **__: next(clock) and None)
    stop_checker = llm.llm_engine.inputs._stop_checker(
        SamplingParams(grammar=Grammar.choice(["yes"]), max_seconds=5.0), []
    )
    assert stop_checker.deadline == 15.0


def test_a_suggested_least_length_gives_way_to_the_length_that_is_asked(llm, monkeypatch):
    inputs = llm.llm_engine.inputs
    monkeypatch.setattr(inputs, "_suggested", {**inputs._suggested, "min_tokens": 9})
    assert llm.sampling().min_tokens == 9
    assert llm.sampling(max_tokens=4).min_tokens == 4
    for wrong in ("many", -1, math.inf):
        with pytest.raises(RequestError, match="max_tokens must be a whole number"):
            llm.sampling(max_tokens=wrong)


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


UNSHOWN = "thousands of digits or levels"
PAIR = ["a", "b\ud800"]
WRONG = {
    "temperature": [-1, math.nan, math.inf, True, "hot"], "top_k": [-5, 1.5], "top_p": [0, 2, math.nan],
    "seed": [-1, 2**64], "max_tokens": [-1, 2**63, True], "stop": ["", ["a", ""], [1]], "ignore_eos": ["no"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("params", "told"),
    [
        *(({name: value}, name) for name, values in WRONG.items() for value in values),
        *(({name: 10**5000}, "thousands of digits") for name in ("max_tokens", "temperature", "seed")),
        *(({name: nested(100_000)}, UNSHOWN) for name in ("stop", "logit_bias", "grammar", "beams")),
        ({"logit_bias": [10**5000]}, UNSHOWN),
        *(
            ({"stop_ids": endless}, "stop_ids has more than 1,048,576 ids")
            for endless in (range(2**20 + 1), range(10**30))
        ),
        *(({"beams": width}, "beams must be") for width in (0, -1, True, 2.0, 257, 10**4)),
        *(({name: PAIR}, f"{name} has half of a surrogate pair") for name in ("stop", "bad_words", "dry_breakers")),
        ({"allowed_ids": []}, "allowed_ids has none"),
        ({"allowed_ids": [5], "banned_ids": [5]}, "banned_ids has all of allowed_ids"),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_params_that_no_text_can_have_are_refused_by_name(params, told):
    with pytest.raises(RequestError, match=told):
        SamplingParams(**params)


def test_a_list_of_ids_may_be_as_long_as_that():
    assert len(SamplingParams(banned_ids=range(2**20)).banned_ids) == 2**20


@pytest.mark.parametrize("penalty", [-30.0, 30.0])
def test_a_length_penalty_at_its_border_can_be_reckoned_at_any_length(penalty):
    for beyond in (penalty * 1.01, penalty * 3):
        with pytest.raises(RequestError, match="length_penalty must be a number from -30 to 30"):
            SamplingParams(beams=2, length_penalty=beyond)
    search = BeamSearch(SamplingParams(beams=2, length_penalty=penalty), NoStopChecker())
    assert search._normalised(-1.0, 2**31) < 0


def test_a_schema_whose_parts_multiply_is_refused_before_it_is_written():
    schema = {"type": "string"}
    for _ in range(40):
        schema = {"anyOf": [schema, schema]}
    with pytest.raises(RequestError, match=r"has 500,0\d\d characters; 500,000 are allowed"):
        Grammar.json_schema(schema)
