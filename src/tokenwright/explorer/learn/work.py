"""Engines for a check, over the loaded model and within limits: it never computes in the engine that serves."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenwright.arrays import Floats
from tokenwright.backends.runner import Model
from tokenwright.cache import layer_specs
from tokenwright.engine import SamplingParams
from tokenwright.errors import RequestError
from tokenwright.formats import KVFormat
from tokenwright.llm.input_processor import Prompt
from tokenwright.llm.llm import LLM
from tokenwright.llm.outputs import Completion

LIMIT_S = 60.0  # seconds a check
MOST_TOKENS = 1024  # of a check's text
PAGE = 16


class Stopped(RequestError):
    """The check was cancelled, or took too long."""


class CheckWork:
    def __init__(self, llm: LLM, seconds: float = LIMIT_S) -> None:
        self.llm = llm
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._cancelled = False

    def cancel(self) -> None:
        """End the check at its next step; any thread may call it."""
        self._cancelled = True

    def check(self) -> None:
        if self._cancelled:
            raise Stopped("the check was cancelled")
        if time.monotonic() > self._until:
            raise Stopped(f"the check was stopped after {self.seconds:g} s; ask for less, or use a smaller model")

    @property
    def context(self) -> int:
        return min(MOST_TOKENS, self.llm.context)

    @contextmanager
    def engine(self, tokens: int, *, texts: int = 1, page_size: int = PAGE, trace: bool = False) -> Iterator[LLM]:
        self.check()
        pages = texts * -(-min(tokens, self.context) // page_size)
        with LLM(
            self.llm.loaded.again(trace=trace),
            pages=pages,
            page_size=page_size,
            max_sequences=texts,
            speculate="off",
            token_budget=max(self.llm.options.token_budget, texts),
        ) as own:
            yield own

    def text(
        self, llm: LLM, prompt: Prompt, params: SamplingParams, *, cache: bool = True, salt: str = ""
    ) -> Completion:
        with llm.stream(prompt, params, cache=cache, salt=salt) as stream:
            for _ in stream:
                self.check()
            return stream.completion

    def beams(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> Completion:
        self.check()
        limit = max(0.0, self._until - time.monotonic())
        [best] = llm.generate(prompt, params, max_seconds=limit)
        self.check()
        return best

    def logits(self, tokens: Sequence[int], **cache: Any) -> Floats:
        """Logits [n, vocabulary] of a whole text in one pass; cache: `kv`, `window` and `sinks`."""
        self.check()
        loaded = self.llm.loaded.again()
        kv = KVFormat.parse(cache.pop("kv", "native"))
        specs = layer_specs(loaded.facts.graph, loaded.facts.dtype, kv, **cache)
        logits, _ = Model(loaded.decoder, specs, loaded.facts.device)(tokens)
        self.check()
        return logits

    def ids(self, prompt: str) -> list[int]:
        ids = self.llm.tokenizer.encode(prompt)
        if len(ids) >= self.context:
            raise RequestError(f"the text has {len(ids)} tokens; a check reads fewer than {self.context}")
        return ids

    def greedy(self, ids: Sequence[int], tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        with self.engine(len(ids) + tokens) as llm:
            return list(self.text(llm, list(ids), params).token_ids)
