"""Builds the engine's Request from a client's prompt and sampling parameters."""

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenwright.checks import check_bool, shown, unknown_name
from tokenwright.config import angle_length
from tokenwright.decode import BeamSearch, TextStopChecker
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.decode.stopping import Constraint
from tokenwright.engine import Request, Thoughts, TokenConstraints
from tokenwright.engine.pictures import Spans
from tokenwright.engine.pins import NO_RETENTION, Retention
from tokenwright.errors import RequestError
from tokenwright.llm.chat.thinking import ThoughtGate, TokenMasks
from tokenwright.llm.model import PreparedModel
from tokenwright.sampling_params import DRAWING, SamplingParams, check_unicode
from tokenwright.text import TextStream

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]  # text, or token ids; a tensor of torch is taken too
NOTHING: Mapping[str, Any] = {}
QUICK_PROMPT = 512  # characters or ids: tokenising them takes less time than another thread's answer


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's use of the cache and the weights."""

    cache: bool = True  # False: the naive loop
    salt: str = ""  # only requests of the same salt share cached pages
    adapter: str | None = None  # a name; requests of other adapters share no pages
    prediction: str = ""  # the expected text, for drafts
    speculate: bool = True
    thoughts: Thoughts | None = None  # the reasoning that may precede the answer
    retention: Retention = NO_RETENTION  # in the prefix cache
    budget: Budget | None = None  # of the grammar's compilation
    pictures: Spans = ()  # in the prompt


NO_OPTIONS = RequestOptions()


class InputProcessor:
    """Builds requests for one loaded model. context: the most tokens of one text. Thread-safe."""

    def __init__(self, loaded: PreparedModel, context: int) -> None:
        self._loaded = loaded
        self._facts = loaded.facts
        self._suggested = loaded.facts.generation.sampling
        self._angles_vary = (
            angle_length(loaded.facts.config.positions, context) is not None
        )  # with a text's length limit
        self._context = context

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        return self._loaded.eos_ids

    @cached_property
    def _masks(self) -> TokenMasks:
        return TokenMasks(self._facts.tokenizer, self._facts.config.vocab_size, self.eos_ids)

    def sampling(self, **overrides: object) -> SamplingParams:
        given = _given(overrides)
        beams = given.get("beams", 1) != 1
        if beams and given.get("temperature", 0.0) != 0.0:  # its default, 1, would pass
            raise RequestError("beam search draws nothing; leave temperature out, or beams", "temperature", "beams")
        kept = {name: value for name, value in self._suggested.items() if not (beams and name in DRAWING)}
        if "min_tokens" in kept:  # the caller's max_tokens limits the default
            most = given.get("max_tokens", SamplingParams().max_tokens)
            kept["min_tokens"] = min(kept["min_tokens"], max(0, most)) if isinstance(most, int) else 0
        return SamplingParams(**{**kept, **given})

    def quick(self, prompt: object, params: SamplingParams | None) -> bool:
        """Whether `build` is fast enough for an event loop: a short prompt, no constraints, and known end tokens."""
        short = isinstance(prompt, str | list | tuple) and len(prompt) <= QUICK_PROMPT
        plain = params is None or not (params.grammar or params.bad_words or params.dry_multiplier)
        return short and plain and "eos_ids" in self.__dict__

    def params(self, params: object, overrides: Mapping[str, Any] = NOTHING) -> SamplingParams:
        """A request's parameters with `overrides` that are not None. Raises RequestError for a wrong type or field."""
        if params is None:
            return self.sampling(**overrides)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        given = _given(overrides)
        return replace(params, **given) if given else params

    def ids(self, prompt: object) -> list[int]:
        """The token ids of a prompt. Raises RequestError for another type, and for ids out of range."""
        if isinstance(prompt, _arrays()):
            prompt = _listed(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        if isinstance(prompt, str):
            self.check_length(prompt)
        read: Any = self._facts.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        size = self._facts.config.vocab_size
        if set(map(type, read)) == {int} and min(read) >= 0 and max(read) < size:
            return list(read)
        ids: list[Any] = [int(token) if isinstance(token, np.integer) else token for token in read]
        for token in ids:
            if isinstance(token, str):
                raise RequestError("a prompt is one text, or a list of token ids; this is a list of texts")
            if type(token) is not int or not 0 <= token < size:
                raise RequestError(f"a prompt's token ids must be from 0 to {size - 1}, not {shown(token)}")
        return ids

    def check_length(self, text: str) -> None:
        least = self._facts.tokenizer.least_tokens(text)
        if least > self._context:
            raise RequestError(
                f"the prompt has {len(text):,} characters, so at least {least:,} tokens, and the model's context is "
                f"{self._context:,}; shorten it"
            )

    def ids_after(self, prompt: Prompt, ids: list[int], continuation: Prompt) -> list[int]:
        """The ids of prompt and continuation, tokenised as one text if that keeps the prompt's `ids`."""
        tokenizer = self._facts.tokenizer
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = tokenizer.encode(prompt + continuation)
            if whole[: len(ids)] == ids:
                return whole
        if isinstance(continuation, str):
            return [*ids, *tokenizer.encode(continuation, add_special=False)]
        return [*ids, *self.ids(continuation)]

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        prompt_logprobs_from: int | None = None,
        written: Sequence[int] = (),
        share: bool = True,
    ) -> Request:
        """Build a request, with a random seed if it needs one. `written`: tokens already generated after the prompt.

        prompt_logprobs_from: first position of the prompt logprobs; None: only those that `params` requests.
        share=False: neither use cached pages nor cache the request's own. Raises RequestError.
        """
        check_bool("cache", options.cache)
        ids, more = self.ids(prompt), self.ids(written)
        number = 0 if options.adapter is None else self._loaded.number(options.adapter)
        if options.salt != "":
            _check_salt(options.salt)
        if params.seed is None and not params.greedy and params.beams == 1 and params.max_tokens > 0:
            params = replace(params, seed=secrets.randbits(63))
        if params.prompt_logprobs is not None:
            prompt_logprobs_from = 1
        constraints = self.constraints(params)
        stop_checker = self._stop_checker(params, ids, options)
        for token in more:
            stop_checker.advance(token)
        stop_checker.take_text()
        search = BeamSearch(params, stop_checker) if params.beams > 1 else None
        foretold = self._facts.tokenizer.encode(options.prediction, add_special=False, parse_special=False)
        request = Request(
            prompt=(*ids, *more),
            params=params,
            stop_checker=stop_checker if search is None else search,
            cache=options.cache,
            prompt_logprobs_from=prompt_logprobs_from,
            share=share,
            constraints=constraints,
            width=params.beams,
            search=search,
            adapter=number,
            continued=len(more),
            thoughts=options.thoughts,
            prediction=tuple(foretold[: self._context]),
            speculate=options.speculate,
            retention=options.retention,
            pictures=options.pictures,
        )
        return replace(request, salt=self.salt(request.limit(self._context), options.salt, options.adapter))

    def streamed(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """`build` for a stream. Raises RequestError for parameters whose texts are known only at the end."""
        if params.beams > 1 or params.choices > params.n:
            raise RequestError(
                "best_of and beam search know their texts at the end alone; use generate instead of stream"
            )
        return self.build(prompt, params, options)

    def batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None,
        sampling: Mapping[str, Any],
        options: RequestOptions,
        adapter: str | Sequence[str | None] | None,
    ) -> list[Request]:
        """The requests of several prompts. `params`, `adapter`: one for all or one per prompt."""
        texts = prompts_of(prompts)
        if params is None or not isinstance(params, Sequence):
            each = [self.params(params, sampling)] * len(texts)
        else:
            each = [self.params(one, sampling) for one in params]
        if len(each) != len(texts):
            raise RequestError(
                f"{len(texts)} prompts came with {len(each)} sampling params; give one for all or one each"
            )
        if isinstance(adapter, Sequence) and not isinstance(adapter, str):
            adapters = list(adapter)
        else:
            adapters = [adapter] * len(texts)
        if len(adapters) != len(texts):
            raise RequestError(f"{len(texts)} prompts came with {len(adapters)} adapters; give one for all or one each")
        return [
            self.build(text, chosen, replace(options, adapter=name))
            for text, chosen, name in zip(texts, each, adapters, strict=True)
        ]

    def constraints(self, params: SamplingParams) -> TokenConstraints:
        if not params.names_tokens:
            return TokenConstraints(end_ids=frozenset() if params.ignore_eos else self.eos_ids)
        return self._loaded.vocabulary.constraints(params, self.eos_ids)

    def embedding(self, text: Prompt) -> Request:
        """A request for the hidden states of a text's tokens. Raises RequestError for a text without tokens."""
        ids = self.ids(text)
        if not ids:
            raise RequestError("a text to embed has no tokens; leave it out")
        request = self.build(ids, SamplingParams(temperature=0.0, max_tokens=0), share=False)
        return replace(request, hidden=True)

    def salt(self, limit: int, salt: str = "", adapter: str | None = None) -> bytes:
        """The salt of the prefix hashes: the caller's, the adapter, and the text's length if RoPE needs it."""
        length = angle_length(self._facts.config.positions, limit) if self._angles_vary else None
        before = b"" if adapter is None else b"\xff" + bytes.fromhex(self._loaded.adapters[adapter].digest)  # no text
        return before + (salt if length is None else f"{length} {salt}").encode()

    def _stop_checker(
        self, params: SamplingParams, prompt: Sequence[int], options: RequestOptions = NO_OPTIONS
    ) -> TextStopChecker:
        asked = time.monotonic()
        tokenizer = self._facts.tokenizer
        constraint: Constraint | None = None
        if params.grammar is not None:
            opens = all(tokenizer.token_bytes(token) is None for token in prompt)
            grammars = self._loaded.vocabulary.grammars(self.eos_ids)
            constraint = grammars.compile(params.grammar, opens=opens, budget=options.budget)
        thoughts = options.thoughts
        if thoughts is not None and params.beams == 1:  # forced tokens would change the ranks of beams
            held = thoughts.budget is not None or params.grammar is not None or params.stop
            constraint = ThoughtGate(constraint, thoughts, tokenizer, self._masks) if held else None
        return TextStopChecker(
            TextStream(tokenizer, params.stop, prompt, include_stop=params.include_stop),
            () if params.ignore_eos else self.eos_ids,
            params.stop_ids,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
            deadline=None if params.max_seconds is None else asked + params.max_seconds,
            constraint=constraint,
        )


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt (text or token ids) or several. Raises RequestError for a mixture."""
    if isinstance(prompts, str | bytes | bytearray) or not isinstance(prompts, Sequence):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int | np.integer)]
    texts = [item for item in prompts if not isinstance(item, int | np.integer)]
    if ids and texts:
        raise RequestError("token ids stand beside other prompts; put the ids of each prompt into a list of their own")
    return [ids] if ids else texts


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(SamplingParams)]
    for name in sorted(overrides.keys() - set(names)):
        raise unknown_name("sampling parameter", name, names, "text")
    return {name: value for name, value in overrides.items() if value is not None}


def _arrays() -> tuple[type[Any], ...]:
    torch = sys.modules.get("torch")
    return (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)


def _listed(ids: Any) -> list[int]:
    listed: list[int] = ids.tolist()
    if ids.ndim != 1 or any(type(token) is not int for token in listed):
        raise RequestError(
            f"an array as a prompt has ids, one after another; this one is {ids.dtype} {list(ids.shape)}"
        )
    return listed


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise RequestError(f"a salt is text, not {type(salt).__name__}")
    check_unicode("the salt", salt)
