"""What a model computes of given texts, with nothing written: log-probabilities and embeddings."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tokenwright.engine import Request, SamplingParams
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.engine import LLMEngine
from tokenwright.llm.input_processor import Prompt, prompts_of
from tokenwright.llm.output_processor import OutputProcessor


def score(
    engine: LLMEngine, prompt: Prompt, continuations: Sequence[Prompt] | None = None
) -> NDArray[np.float64] | list[NDArray[np.float64]]:
    """The log-probabilities of a prompt's tokens, or of continuations after it, as `LLM.score` says."""
    inputs = engine.inputs
    if continuations is None:
        return _scores(engine, [inputs.ids(prompt)], 1)[0]
    if isinstance(continuations, str) or not isinstance(continuations, Sequence):
        raise RequestError("continuations are given as a list, also if it is only one")
    ids = inputs.ids(prompt)
    if not ids:
        raise RequestError("a continuation is scored after a prompt, and this one has no tokens")
    return _scores(engine, [inputs.ids_after(prompt, ids, one) for one in continuations], len(ids))


def _scores(engine: LLMEngine, texts: Sequence[list[int]], start: int) -> list[NDArray[np.float64]]:
    """The log-probabilities of each text's tokens from position `start` on, all in one batch."""
    params, build = SamplingParams(temperature=0.0, max_tokens=0), engine.inputs.build
    scored = engine.finish([build(text, params, prompt_logprobs_from=start) for text in texts])
    for transcript in scored:
        if transcript.error is not None:
            raise EngineError(f"the text could not be scored: {transcript.error}") from transcript.error
    return [np.array(transcript.prompt_logprobs, dtype=np.float64) for transcript in scored]


def embed(engine: LLMEngine, texts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
    """The embedding of each text [texts, width], as `LLM.embed` says."""
    return _embedded(engine, engine.finish(_embeddings(engine, texts), at_end=False))


async def aembed(engine: LLMEngine, texts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
    """`embed` for asyncio."""
    requests = await engine.in_thread(partial(_embeddings, engine, texts))
    return _embedded(engine, await engine.afinish(requests))


def _embeddings(engine: LLMEngine, texts: Prompt | Sequence[Prompt]) -> list[Request]:
    return [engine.inputs.embedding(text) for text in prompts_of(texts)]


def _embedded(engine: LLMEngine, transcripts: Sequence[OutputProcessor]) -> NDArray[np.float32]:
    """The means of ended requests, [texts, width]."""
    for transcript in transcripts:
        if transcript.error is not None:
            raise EngineError(f"a text could not be embedded: {transcript.error}") from transcript.error
    means = [transcript.hidden.mean() for transcript in transcripts]
    return np.array(means, dtype=np.float32).reshape(-1, engine.facts.graph.width)
