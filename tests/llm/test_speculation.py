"""Speculation never changes a bit: random requests on random engines, with drafts and without, are equal by ==.

The drafts are the proposer's own, or those of one that knows the texts: they hold for a while, and then fail.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import assert_at_rest, held
from tests.llm.test_lora import CASES, make_adapter
from tests.models.fixtures import make_checkpoint
from tests.profiles import share
from tokenwright import LLM, SamplingParams
from tokenwright.decode import SuffixProposer
from tokenwright.decode.step_costs import StepCosts
from tokenwright.errors import RequestError
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.outputs import Completion
from tokenwright.sampling_params import Grammar

# PEFT, which makes the adapters, over a newer transformers
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROUNDS = 24
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """A model of each family, one with adapters, in formats that go round."""
    folder, found = tmp_path_factory.mktemp("speculation"), {}
    for name, weights in zip(FAMILIES, ("native", "int8", "bfloat16", "int4", "native"), strict=True):
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
    options["pages"] = draw.choice([200, 400]) // options["page_size"]
    options["swap_memory"] = draw.choice([0, 1 << 20])
    if window and draw.random() < 0.4:
        options |= {"window": draw.choice([6, 30]), "sinks": draw.choice([0, 4])}
    return options


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


@pytest.mark.parametrize("number", range(share(ROUNDS)))
def test_texts_with_drafts_are_those_without(models: dict[str, LoadedModel], number: int) -> None:
    draw = random.Random(number)
    name = FAMILIES[number % len(FAMILIES)]
    loaded = models[name]
    ids = loaded.tokenizer.encode(STORY * 2)
    prompts = [ids[: draw.randint(1, len(ids))] for _ in range(draw.randint(2, 6))]
    asked = [
        {
            "prompt": prompt,
            "params": sampling(draw, grammars=name == "stories"),
            "salt": draw.choice(["", "a"]),
            "adapter": draw.choice([None, *loaded.adapters]),
        }
        for prompt in prompts
    ]
    for one in asked:
        if one["params"].n > 1 or one["params"].beams > 1:
            one["salt"] = ""
    options, cut = engine_options(draw, window=name in ("stories", "llama2")), draw.choice([None, 3])
    if asked[-1]["params"].beams > 1 or asked[-1]["params"].n > 1:
        cut = None
    with LLM(loaded, speculate="off", **options) as llm:
        without = written(llm, asked, cut)
        whole = [
            (*one["prompt"], *choice.token_ids)
            for one, found in zip(asked, without, strict=True)
            for choice in found
            if isinstance(choice, Completion)
        ]
    for number_of_drafts in (Knowing(whole, number, loaded.config.vocab_size), SuffixProposer(FREE), None):
        with LLM(loaded, **options) as llm:
            scheduler = llm.llm_engine.inspect(lambda engine: engine.scheduler)
            scheduler.proposer = number_of_drafts or scheduler.proposer
            assert written(llm, asked, cut) == without


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
    with pytest.raises(RequestError, match="speculate must be suffix or off, not 'n-gram'"):
        LLM("stories", speculate="n-gram")
