"""The 200 requests of `bits.py`, in 20 sessions. A session is one LLM and the calls to it.

A request is the same in every environment; the options of its session's LLM (weight format, dtype and KV codec) rotate
with the environment, so that the environments together cover every weight format with every codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from tokenwright import Grammar, SamplingParams

How = Literal["generate", "stream", "astream", "score"]

WEIGHTS = (  # format, dtype
    ("native", "float32"), ("native", "bfloat16"), ("int8", "bfloat16"), ("int4", "float32"), ("int4:64", "bfloat16"),
    ("int8:32", "float32"), ("native", "float16"),
)  # fmt: skip
CODECS = ("native", "int8", "int4", "fp8", "k=int8,v=int4,first=20", "k=fp8,v=int8,native=0+-1")

MODELS = ("stories", "gpt2", "stories", "qwen3", "stories", "mistral", "stories", "smollm3")
SMALL = {"pages": 14, "max_sequences": 32}
OPTIONS: tuple[Mapping[str, int], ...] = (
    {"pages": 400},
    SMALL,  # texts are preempted and recomputed
    {"pages": 400, "token_budget": 7},  # prompts are computed in chunks
    {**SMALL, "swap_memory": 1 << 24},  # texts are preempted and swapped out
    {"pages": 400, "window": 20, "sinks": 3, "token_budget": 64},
    {"pages": 96, "page_size": 5, "token_budget": 33},
    {"pages": 400, "max_sequences": 5},  # texts wait
)
BATCHES = ((17, 1, 1, 1), (8, 2), (2, 1, 1, 1), (8, 1, 1), (2, 1, 1, 1))  # sizes in each session; 50 requests

STEMS = (
    "Once upon a time there was a little girl named Lily. She loved to play outside in the sun. One day",
    "The next day was bright, and Tom went to the park with his dog.",
    "Sue said: \"I have a list: apples, pears, apples, pears",
    "A big red ball",
)  # fmt: skip
TAILS = ("", ", she saw", " and", " a cat with a hat. The cat", " who", " the end of it all was")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_MANY = {
    "temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.97, "repetition_penalty": 1.1,
    "repetition_window": 20, "presence_penalty": 0.2, "frequency_penalty": 0.1, "dry_multiplier": 0.5,
    "logit_bias": ((40, 1.5), (7, -2.0)), "banned_ids": (11, 12), "bad_words": ("dog",), "min_tokens": 4,
    "logprobs": 2,
}  # fmt: skip
KINDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9},
    _MANY,
    {"temperature": 0.0, "grammar": Grammar.json_schema(SCHEMA), "logprobs": 1},
    {"temperature": 1.0, "n": 3, "top_p": 0.9},
    {"temperature": 0.0, "ignore_eos": True, "stop": ("day", "e"), "min_tokens": 3},
    {"beams": 4, "n": 2, "logprobs": 1},
    {"temperature": 1.2, "top_n_sigma": 1.5},
    {"temperature": 0.8, "grammar": Grammar.regex("[A-Z][a-z]{2,9} (is|was) [0-9]{3}\\.")},
    {"temperature": 0.0, "prompt_logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 1.0, "stop": ("a", "."), "include_stop": True, "top_k": 20},
    {"beams": 4, "n": 4, "beam_groups": 2, "diversity_penalty": 0.7, "length_penalty": 0.5},
    {"temperature": 1.0, "grammar": Grammar.choice(["yes, she did", "yes, he did", "no"]), "logprobs": 4},
    {"temperature": 0.9, "n": 2, "best_of": 4},
    {"temperature": 0.7, "grammar": Grammar.lark('start: "(" start ")" | /[a-z]{1,4}/')},
    {"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 1},
    {"beams": 3, "early_stopping": "never", "length_penalty": 1.5, "ignore_eos": True, "prompt_logprobs": 0},
    {"temperature": 1.0, "allowed_ids": tuple(range(2, 90)), "stop_ids": (30, 31, 32, 33, 34)},
    {"temperature": 1.0, "ignore_eos": True, "top_p": 0.7, "frequency_penalty": 0.5},
)


@dataclass(frozen=True)
class Call:
    """Prompts of one call. `names` identify their requests; all methods but `generate` take one prompt."""

    names: tuple[str, ...]
    how: How
    prompts: tuple[str, ...]
    params: tuple[SamplingParams, ...]
    cache: bool
    salt: str


@dataclass(frozen=True)
class Session:
    """Calls to one LLM. `options` are arguments of LLM."""

    number: int
    model: str
    options: Mapping[str, int]
    calls: tuple[Call, ...]

    def opened(self, setting: int) -> dict[str, Any]:
        """The arguments of LLM but the model. With two successive settings, the sessions cover 40 of the 42 pairs."""
        cell = 20 * setting + self.number
        weights, dtype = WEIGHTS[cell % len(WEIGHTS)]
        return {"weights": weights, "dtype": dtype, "kv": CODECS[cell % len(CODECS)], **self.options}


def sessions() -> tuple[Session, ...]:
    """All sessions; 200 requests."""
    numbers = count()
    return tuple(_session(number, numbers) for number in range(20))


def _session(number: int, numbers: Iterator[int]) -> Session:
    model = MODELS[number % len(MODELS)]
    options = dict(OPTIONS[number % len(OPTIONS)])
    if model == "gpt2":
        options.pop("sinks", None)  # learned positions allow no sinks
    batches = BATCHES[number % len(BATCHES)]
    return Session(number, model, options, tuple(_call(model, size, number, numbers) for size in batches))


def _call(model: str, size: int, session: int, numbers: Iterator[int]) -> Call:
    ids = [next(numbers) for _ in range(size)]
    prompts = tuple(_prompt(at, model, session) for at in ids)
    params = tuple(_params(at, model) for at in ids)
    how = _how(ids[0], params[0]) if size == 1 else "generate"
    cache = how == "score" or ids[0] % 4 != 3
    salt = "other" if ids[0] % 5 == 4 else ""
    return Call(tuple(f"{session:02}.{at:03}" for at in ids), how, prompts, params, cache, salt)


def _prompt(number: int, model: str, session: int) -> str:
    """A prompt; half of a session's prompts share a prefix. Small models tokenize bytes, so theirs are shorter."""
    stem = STEMS[(session if number % 2 else number // 2) % len(STEMS)]
    return (stem if model == "stories" else stem[-24:]) + TAILS[number % len(TAILS)]


def _params(number: int, model: str) -> SamplingParams:
    kind = dict(KINDS[number % len(KINDS)])
    kind.setdefault("max_tokens", 8 + number * 7 % 17)
    if kind.get("temperature"):
        kind["seed"] = 1000 + number
    if model != "stories" and "stop_ids" in kind:
        kind["stop_ids"] = tuple(range(30, 80, 3))
    return SamplingParams(**kind)


def _how(number: int, params: SamplingParams) -> How:
    """The method for a request: only `generate` takes beam search and best_of."""
    if params.beams > 1 or params.best_of is not None:
        return "generate"
    ways: tuple[How, ...] = ("stream", "generate", "astream", "score", "stream")
    return ways[number % len(ways)]
