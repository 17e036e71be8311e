"""Scores of given texts, without generating: log-probabilities and embeddings."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import POOLINGS, Pooling
from tokenwright.checks import check_bool, shown
from tokenwright.engine import Request, SamplingParams
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.asking import ModelEngine, afinish, finish, in_thread
from tokenwright.llm.input_processor import Prompt, prompts_of
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.relevance import Relevance, check_pooling, cosines


def score(
    engine: ModelEngine, prompt: Prompt, continuations: Sequence[Prompt] | None = None
) -> NDArray[np.float64] | list[NDArray[np.float64]]:
    inputs = engine.inputs
    if continuations is None:
        return _scores(engine, [inputs.ids(prompt)], 1)[0]
    if isinstance(continuations, str) or not isinstance(continuations, Sequence):
        raise RequestError("continuations are given as a list, also if it is only one")
    ids = inputs.ids(prompt)
    if not ids:
        raise RequestError("a continuation is scored after a prompt, and this one has no tokens")
    return _scores(engine, [inputs.ids_after(prompt, ids, one) for one in continuations], len(ids))


def _scores(engine: ModelEngine, texts: Sequence[list[int]], start: int) -> list[NDArray[np.float64]]:
    """The log-probabilities of each text's tokens from position `start` on, all in one batch."""
    params, build = SamplingParams(temperature=0.0, max_tokens=0), engine.inputs.build
    scored = finish(engine, [build(text, params, prompt_logprobs_from=start) for text in texts])
    _check_all(scored, "the text could not be scored")
    return [np.array(transcript.prompt_logprobs, dtype=np.float64) for transcript in scored]


def embed(
    engine: ModelEngine, texts: Prompt | Sequence[Prompt], pooling: Pooling | None = None, normalize: bool | None = None
) -> NDArray[np.float32]:
    requests = _embeddings(engine, texts, pooling, normalize)
    return _embedded(engine, finish(engine, requests, at_end=False), pooling, normalize)


async def aembed(
    engine: ModelEngine, texts: Prompt | Sequence[Prompt], pooling: Pooling | None, normalize: bool | None
) -> NDArray[np.float32]:
    requests = await in_thread(engine, partial(_embeddings, engine, texts, pooling, normalize))
    return _embedded(engine, await afinish(engine, requests), pooling, normalize)


def rerank(
    engine: ModelEngine, relevance: Relevance, query: str, documents: Sequence[str], instruction: str = ""
) -> NDArray[np.float64]:
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise RequestError("documents are given as a list, also if there is only one")
    if not all(isinstance(one, str) for one in (query, *documents, instruction)):
        raise RequestError("a query, its documents and an instruction are texts")
    if relevance.answers is None:
        texts = [relevance.query(query, instruction), *map(relevance.document, documents)]
        first, *others = embed(engine, texts)
        return cosines(first, np.array(others).reshape(-1, len(first)))
    asked = [relevance.asked(query, document, instruction) for document in documents]
    ended = finish(engine, [engine.inputs.build(one.ids, one.params) for one in asked])
    _check_all(ended, "a document could not be scored")
    answers = [one.completion() for one in ended]
    return np.array([relevance.score(one.token_ids[0], one.sampler_logprobs[0]) for one in answers], np.float64)


def _embeddings(
    engine: ModelEngine, texts: Prompt | Sequence[Prompt], pooling: Pooling | None, normalize: bool | None
) -> list[Request]:
    if pooling is None:
        check_pooling(engine.facts.pooling)
    elif pooling not in POOLINGS:
        raise RequestError(f"pooling must be {', '.join(POOLINGS)} or None, not {shown(pooling)}")
    if normalize is not None:
        check_bool("normalize", normalize)
    return [engine.inputs.embedding(text) for text in prompts_of(texts)]


def _embedded(
    engine: ModelEngine, transcripts: Sequence[OutputProcessor], pooling: Pooling | None, normalize: bool | None
) -> NDArray[np.float32]:
    own = engine.facts.pooling
    _check_all(transcripts, "a text could not be embedded")
    rows = [transcript.hidden.pooled(pooling or own.pooling) for transcript in transcripts]
    found = np.array(rows, dtype=np.float32).reshape(-1, engine.facts.graph.width)
    if own.normalize if normalize is None else normalize:
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found


def _check_all(transcripts: Sequence[OutputProcessor], failed: str) -> None:
    for transcript in transcripts:
        if transcript.error is not None:
            raise EngineError(f"{failed}: {transcript.error}") from transcript.error
