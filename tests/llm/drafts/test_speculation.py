"""Speculation never changes a bit: random requests on random engines, with drafts and without, are equal by ==.

The drafts are the proposer's own, or those of one that knows the texts: they hold for a while, and then fail; or those
of a draft model, the model in another format or another model. A copy of the model is never wrong: where its own K and
V were not those of the text, after whatever became of its pages, that would show.
"""

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.engines import assert_at_rest, held
from tests.llm.test_lora import CASES, make_adapter
from tests.models.fixtures import make_checkpoint
from tests.profiles import share
from tokenwright import LLM, SamplingParams
from tokenwright.decode import SuffixProposer
from tokenwright.decode.drafts.draft_model import DraftModel
from tokenwright.decode.drafts.step_costs import StepCosts
from tokenwright.errors import RequestError
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.outputs import Completion
from tokenwright.sampling_params import Grammar

# PEFT, which makes the adapters, over a newer transformers
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROUNDS = 40
FREE = StepCosts({1: 1.0, 64: 1.0})  # then every guess is drafted
STORY = "Once upon a time there was a little girl named Lily. She loved to play in the park. "
PEOPLE = Grammar.json_schema(
    {
        "type": "array",
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}, "is_hungry": {"type": "boolean"}},
            "required": ["name", "is_hungry"],
            "additionalProperties": False,
        },
    }
)
NOTHING: Any = None
FAMILIES = ("stories", "llama2", "gemma2", "qwen3-moe", "deepseek2")
HYBRIDS = ("qwen3-next", "granite4", "lfm2", "falcon-h1")  # with states, which go back to where a chunk began


WEIGHTS = ("native", "int8", "bfloat16", "int4", "native")
DRAFTS = {"gemma2": "llama2", "deepseek2": "qwen3-moe", "qwen3-moe": "gemma2"}  # of another family, now and then


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """A model of each family, one with adapters, in formats that go round."""
    folder, found = tmp_path_factory.mktemp("speculation"), {}
    for name, weights in zip(FAMILIES + HYBRIDS, WEIGHTS + WEIGHTS[1:], strict=True):
        path = "stories" if name == "stories" else str(make_checkpoint(folder / name, name).path)
        adapters: dict[str, Path] = {}
        if name == "llama2":
            adapters = {
                str(i): make_adapter(Path(path), folder / f"{i}", i, **CASES["attention"][1])[0] for i in (1, 2)
            }
        found[name] = LoadedModel(path, weights=weights, adapters=adapters)
    return found


class Knowing(SuffixProposer):
    """Drafts that are mostly what the text becomes; else the proposer's own."""

    def __init__(self, texts: list[tuple[int, ...]], seed: int, vocab_size: int) -> None:
        super().__init__(FREE)
        self.texts = texts
        self.seed = seed
        self.vocab_size = vocab_size

    def propose(self, sequences: Any, most: Any, step: Any) -> Any:
        own = super().propose(sequences, most, step)
        return [self._known(*each) for each in zip(sequences, most, own, strict=True)]

    def _known(self, sequence: Any, most: int, own: Any) -> Any:
        known = tuple(sequence.tokens)
        draw = random.Random(f"{self.seed} {len(known)} {known[-3:]}")
        texts = [text for text in self.texts if text[: len(known)] == known]
        if not texts or draw.random() < 0.3:
            return own
        right = list(draw.choice(texts)[len(known) : len(known) + draw.randint(0, min(most, 7))])
        held = draw.randint(0, len(right))
        return [one if at < held else draw.randrange(self.vocab_size) for at, one in enumerate(right)]


def sampling(draw: random.Random, *, grammars: bool) -> SamplingParams:
    """Sampling of any kind, with penalties, bans and ends."""
    chosen: dict[str, Any] = {
        "max_tokens": draw.choice([1, 5, 20, 40]),
        "logprobs": draw.choice([None, 0, 3]),
        "ignore_eos": draw.random() < 0.5,
        "n": draw.choice([1, 1, 1, 3]),
    }
    chosen |= draw.choice(
        [
            {"temperature": 0.0},
            {"temperature": 0.8, "seed": draw.randrange(99)},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": draw.randrange(99)},
            {"mirostat": draw.choice([1, 2]), "mirostat_tau": 2.0, "seed": draw.randrange(99)},
            {"xtc_probability": 0.5, "xtc_threshold": 0.02, "seed": draw.randrange(99)},
        ]
    )
    if chosen["n"] > 1 and chosen.get("temperature") == 0.0:
        chosen["n"] = 1
    if draw.random() < 0.4:
        chosen |= draw.choice(
            [
                {"repetition_penalty": 1.3, "repetition_window": 12},
                {"presence_penalty": 0.5, "frequency_penalty": 0.4},
                {"dry_multiplier": 2.0, "dry_allowed_length": 1},
                {"min_tokens": min(4, chosen["max_tokens"])},
                {"logit_bias": {9: 2.0}, "banned_ids": (12, 13)},
            ]
        )
    if draw.random() < 0.3:
        chosen |= {"stop": draw.choice([("e ", ". She"), ("a",)]), "include_stop": draw.random() < 0.5}
    if grammars and draw.random() < 0.4:
        chosen["ignore_eos"] = False
        chosen["grammar"] = draw.choice(
            [PEOPLE, Grammar.regex(r"(the cat sat\. )+"), Grammar.choice(["yes please", "no"])]
        )
    if draw.random() < 0.1:
        chosen = {"max_tokens": 6, "beams": 3, "temperature": 0.0}
    elif draw.random() < 0.1:
        chosen["prompt_logprobs"] = 1
    return SamplingParams(**chosen)


def engine_options(draw: random.Random, window: bool) -> dict[str, Any]:
    """An engine that has too few pages for all texts, or enough."""
    options: dict[str, Any] = {
        "kv": draw.choice(["native", "int8", "int4", "fp8", "k=int8,v=int8,first=5"]),
        "page_size": draw.choice([1, 4, 16]),
        "token_budget": draw.choice([8, 32, 512]),
        "max_sequences": draw.choice([4, 16]),
    }
    options["pages"] = draw.choice([256, 400]) // options["page_size"]
    if window and draw.random() < 0.4:
        options |= {"window": draw.choice([6, 30]), "sinks": draw.choice([0, 4])}
    return options


def schedule(
    draw: random.Random, loaded: LoadedModel, *, grammars: bool, window: bool
) -> tuple[list[dict[str, Any]], dict[str, Any], int | None]:
    """Requests, the options of an engine, and after how many tokens the last request is ended by its client."""
    ids = loaded.facts.tokenizer.encode(STORY * 2)
    prompts = [ids[: draw.randint(1, len(ids))] for _ in range(draw.randint(2, 6))]
    asked = [
        {
            "prompt": prompt,
            "params": sampling(draw, grammars=grammars),
            "salt": draw.choice(["", "a"]),
            "adapter": draw.choice([None, *loaded.adapters]),
        }
        for prompt in prompts
    ]
    for one in asked:
        if one["params"].n > 1 or one["params"].beams > 1:
            one["salt"] = ""
    options, cut = engine_options(draw, window=window), draw.choice([None, 3])
    if loaded.facts.graph.recurrent:
        options["token_budget"] = min(options["token_budget"], 32)  # a chunk leaves many states
    if any(one["params"].beams > 1 for one in asked):
        options["pages"] = (3840 if loaded.facts.graph.recurrent else 480) // options[
            "page_size"
        ]  # there are fewer states
    if asked[-1]["params"].beams > 1 or asked[-1]["params"].n > 1:
        cut = None
    return asked, options, cut


def told(completion: Completion) -> list[Any]:
    """All that a completion says, but for its cost."""
    return [replace(one, usage=NOTHING, others=()) for one in completion.choices]


def written(llm: LLM, asked: list[dict[str, Any]], cut: int | None) -> list[list[Any]]:
    """The texts of requests that join the same step; the last one is ended by its client after `cut` tokens."""
    with held(llm):
        streams = [None if one["params"].beams > 1 else llm.stream(**one) for one in asked]
    found = []
    for one, stream in zip(asked, streams, strict=True):
        if stream is None:
            found.append(told(llm.generate([one["prompt"]], one["params"], adapter=one["adapter"])[0]))
        elif cut is not None and one is asked[-1]:
            pieces = [next(stream, None) for _ in range(cut)]
            stream.close()
            found.append([pieces])
        else:
            list(stream)
            found.append(told(stream.completion))
    assert_at_rest(llm)
    return found


def with_draft(loaded: LoadedModel, draft: str, weights: str, options: dict[str, Any]) -> LLM:
    """An LLM whose draft model's steps cost nearly nothing, and read and write no page that the text does not have."""
    llm = LLM(loaded, draft=draft, draft_weights=weights, **options)
    proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
    proposer.costs, proposer.own = FREE, StepCosts({1: 0.01, 64: 0.01})
    drafter = proposer.model._drafter
    store, compute = drafter.store, drafter.forward

    def checked(step: Any) -> Any:
        for chunk in step.chunks:
            tables, rows = [table.pages for table in chunk.sequence.tables], range(chunk.start, chunk.stop)
            store.chunk_rows(tables, range(len(rows)), chunk.start)  # a KeyError ends the drafts
            assert all(len(store.slots(group, pages, rows)) == len(rows) for group, pages in enumerate(tables))
            assert rows and len(chunk.tokens) == len(rows)
        return compute(step)

    drafter.forward = checked
    return llm


def has_failed(llm: LLM) -> bool:
    proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
    return bool(proposer.model.failed)


def check_round(models: dict[str, LoadedModel], number: int, folder: Path) -> None:
    """Texts with drafts of every source are those without."""
    draw = random.Random(number)
    hybrid = number // len(FAMILIES) % 2 == 1
    name = HYBRIDS[number % len(HYBRIDS)] if hybrid else FAMILIES[number % len(FAMILIES)]
    loaded = models[name]
    asked, options, cut = schedule(draw, loaded, grammars=name == "stories", window=name in ("stories", "llama2"))
    with LLM(loaded, speculate="off", **options) as llm:
        without = written(llm, asked, cut)
        whole = [
            (*one["prompt"], *choice.token_ids)
            for one, found in zip(asked, without, strict=True)
            for choice in found
            if isinstance(choice, Completion)
        ]
    for proposer in (Knowing(whole, number, loaded.facts.config.vocab_size), SuffixProposer(FREE), None):
        with LLM(loaded, **options) as llm:
            scheduler = llm.llm_engine.inspect(lambda engine: engine.scheduler)
            scheduler.proposer = proposer or scheduler.proposer
            assert written(llm, asked, cut) == without
    other = models[DRAFTS[name]] if name in DRAFTS and draw.random() < 0.3 else loaded
    other = models["llama2"] if hybrid else other
    draft, weights, file = other.facts.name, draw.choice(["native", "int8", "int4"]), folder / f"{number}.kv"
    with with_draft(loaded, draft, weights, options) as llm:
        assert written(llm, asked, cut) == without and not has_failed(llm)
        saved = llm.save_cache(file, asked[0]["prompt"])
    with with_draft(loaded, draft, weights, options) as llm:
        assert not saved or llm.load_cache(file) == saved
        assert written(llm, asked, cut) == without and not has_failed(llm)


@pytest.mark.parametrize("number", range(share(ROUNDS)))
def test_texts_with_drafts_are_those_without(models: dict[str, LoadedModel], number: int, tmp_path: Path) -> None:
    check_round(models, number, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("hundred", range(30))
def test_texts_of_many_rounds(models: dict[str, LoadedModel], hundred: int, tmp_path: Path) -> None:
    for number in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        check_round(models, number, tmp_path)


def copied(models: dict[str, LoadedModel], number: int) -> tuple[int, int]:
    """Drafts of a copy of the model, and how many were wrong of themselves, through preemptions and forks.

    Every seventh position gets a wrong one, so that much is rejected.
    """
    draw = random.Random(number)
    name = FAMILIES[number % len(FAMILIES)]
    loaded, ids = models[name], models[name].facts.tokenizer.encode(STORY * 2)
    options = engine_options(draw, window=name in ("stories", "llama2")) | {"kv": "native"}
    options["pages"] = 200 // options["page_size"]
    asked = []
    for _ in range(draw.randint(2, 6)):
        params = {"max_tokens": draw.choice([9, 40]), "ignore_eos": True, "temperature": draw.choice([0.0, 0.8, 1.2])}
        params |= {"seed": draw.randrange(99), "n": draw.choice([1, 1, 3]) if params["temperature"] else 1}
        params |= draw.choice([{}, {"repetition_penalty": 1.3}, {"top_p": 0.9, "mirostat": 2}])
        asked.append({"prompt": ids[: draw.randint(1, len(ids))], "params": SamplingParams(**params)})
    made: list[tuple[Any, int, list[int]]] = []
    with with_draft(loaded, loaded.facts.name, WEIGHTS[FAMILIES.index(name)], options) as llm:
        proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
        proposer.earlier.capacity, proposer._repeated = 0, lambda *_: None  # no drafts from repeated text
        propose, extend = proposer.propose, proposer.model.extend

        def noted(sequences: Any, *arguments: Any) -> Any:
            drafts = propose(sequences, *arguments)
            made.extend((one, len(one.tokens), list(its)) for one, its in zip(sequences, drafts, strict=True))
            return drafts

        def spoilt(texts: Any) -> Any:
            found = extend(texts)
            for text in texts:
                if text.tokens and (len(text.sequence.tokens) + len(text.tokens)) % 7 == 0:
                    text.tokens[-1] = (text.tokens[-1] + 1) % 300
            return found

        proposer.propose, proposer.model.extend = noted, spoilt
        with held(llm):
            streams = [llm.stream(**one) for one in asked]
        for stream in streams:
            list(stream)
        more = [*asked[0]["prompt"], *streams[0].completion.token_ids]
        list(llm.stream(more, max_tokens=12, temperature=0.0, ignore_eos=True))
        assert_at_rest(llm)
        assert not has_failed(llm)
        assert not proposer.model._filled and not proposer._followed, "texts that have ended take no memory"
    wrong = 0
    for sequence, known, drafts in made:
        misses = (at for at, token in enumerate(drafts, known) if sequence.tokens[at : at + 1] != [token])
        first = next(misses, len(sequence.tokens))
        wrong += first < len(sequence.tokens) and (first + 1) % 7 != 0
    return sum(len(drafts) for _, _, drafts in made), wrong


@pytest.mark.parametrize("number", dict.fromkeys((7, *range(share(2 * len(FAMILIES))))))  # in 7 a window moves on
def test_a_copy_of_the_model_is_never_wrong(models: dict[str, LoadedModel], number: int) -> None:
    drafted, wrong = copied(models, number)
    assert drafted > 0 and wrong == 0


def stale(self: Any, sequence: Any, computed: int, drafts: Any) -> int:
    """A planted fault: whatever the model has computed, the draft model is believed to have computed too."""
    return computed


def left_behind(self: Any, sequence: Any, computed: int, drafts: Any) -> int:
    """A planted fault: what a guess that was not kept has left is taken for the text's own."""
    found = self._filled.get(sequence.id)
    return FILLED(self, sequence, computed, drafts) if found is None else found.known + len(found.guessed)


FILLED = DraftModel._filled_of


@pytest.mark.parametrize("fault", [stale, left_behind], ids=lambda one: one.__name__)
def test_a_draft_model_with_wrong_k_and_v_is_seen(
    models: dict[str, LoadedModel], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftModel, "_filled_of", fault)
    assert any(copied(models, number)[1] for number in range(10))


def test_a_draft_model_of_another_tokenizer_is_refused(models: dict[str, LoadedModel]) -> None:
    with pytest.raises(RequestError, match="a draft model has the tokenizer of the model, and stories has another"):
        LLM(models["llama2"], draft="stories")
    with pytest.raises(RequestError, match="give draft as well"):
        LLM("stories", draft_weights="int4")


@pytest.mark.parametrize(
    ("own", "its", "device"),
    [
        ({}, {"vocab_size": 384}, "native"),
        ({"vocab_size": 384}, {}, "native"),
        ({}, {"max_position_embeddings": 40}, "native"),
        ({}, {"num_hidden_layers": 1, "num_key_value_heads": 2}, "native"),
        ({"vocab_size": 384}, {"num_hidden_layers": 1}, "reference"),
    ],
    ids=str,
)
def test_a_draft_model_may_have_other_sizes(
    own: dict[str, int], its: dict[str, int], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More or fewer rows than the model has, a shorter context, other layers; with any kernels."""
    if device == "reference":
        monkeypatch.setenv("TOKENWRIGHT_KERNELS", "reference")
    loaded = LoadedModel(make_checkpoint(tmp_path / "model", "llama2", changes=own).path)
    draft = str(make_checkpoint(tmp_path / "draft", "llama2", changes=its).path)
    ids = loaded.facts.tokenizer.encode(STORY)[:20]
    asked = [
        {"max_tokens": 50, "ignore_eos": True, "temperature": 0.0, "logprobs": 2},
        {"max_tokens": 50, "ignore_eos": True, "seed": 3, "top_k": 50, "repetition_penalty": 1.2},
    ]
    with LLM(loaded, speculate="off") as llm:
        without = [told(llm.generate([ids], SamplingParams(**one))[0]) for one in asked]
    with with_draft(loaded, draft, "native", {}) as llm:
        done = [llm.generate([ids], SamplingParams(**one))[0] for one in asked]
        assert not has_failed(llm)
    if device == "native":
        assert [told(one) for one in done] == without
    assert [one.token_ids for one in done] == [found[0].token_ids for found in without]
    assert sum(one.usage.drafted_tokens for one in done) > 0


def test_a_draft_model_that_fails_ends_no_text(models: dict[str, LoadedModel]) -> None:
    loaded = models["stories"]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    [plain] = LLM(loaded, speculate="off").generate([STORY], params)
    for step in range(4):
        with with_draft(loaded, "stories", "int4", {}) as llm:
            proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
            compute, calls = proposer.model._drafter.forward, count()

            def failing(batch: Any, compute: Any = compute, calls: Any = calls, step: int = step) -> Any:
                if next(calls) == step:
                    raise MemoryError
                return compute(batch)

            proposer.model._drafter.forward = failing
            [done] = llm.generate([STORY], params)
        assert done.token_ids == plain.token_ids and proposer.model.failed


def test_drafts_are_computed_and_kept(models: dict[str, LoadedModel]) -> None:
    """The comparison above is one of drafts: repeated text has some that hold, and the counts say so."""
    with LLM(models["stories"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        stream = llm.stream(STORY * 3, params)
        list(stream)
        usage = stream.completion.usage
        assert 0 < usage.accepted_tokens <= usage.drafted_tokens
        rejected = usage.drafted_tokens - usage.accepted_tokens
        assert usage.forward_tokens + usage.reused_tokens == usage.prompt_tokens + 100 - 1 + rejected
    with LLM(models["stories"], speculate="off") as llm:
        [done] = llm.generate([STORY * 3], params)
        assert done.usage.drafted_tokens == done.usage.accepted_tokens == 0


def test_another_word_for_it_is_refused() -> None:
    with pytest.raises(RequestError, match="speculate must be suffix, mtp or off, not 'n-gram'"):
        LLM("stories", speculate="n-gram")
