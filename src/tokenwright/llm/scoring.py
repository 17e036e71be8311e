"""Scores given texts, without generating: log-probabilities, embeddings, and the relevance of documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import POOLINGS, Pooling, PoolingConfig
from tokenwright.checks import check_bool, shown
from tokenwright.engine import Request
from tokenwright.errors import CheckpointError, EngineError, RequestError
from tokenwright.llm.asking import ModelEngine, afinish, finish, in_thread
from tokenwright.llm.input_processor import Prompt, prompts_of
from tokenwright.llm.model import PreparedModel
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.sampling_params import SamplingParams, check_unicode

TASK = "Given a web search query, retrieve relevant passages that answer the query"
RULE = 'Note that the answer can only be "yes" or "no".'
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    f"provided. {RULE}<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MARKS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Answered:
    ids: tuple[int, ...]
    params: SamplingParams


def check_pooling(pooling: PoolingConfig) -> None:
    """Raises RequestError if the checkpoint's embeddings need a step that is not supported."""
    if pooling.lacking:
        raise RequestError(f"the embeddings of this checkpoint need {pooling.lacking}, which is not computed here")


class Relevance:
    """Compares queries and documents for one model. Thread-safe.

    A reranker (Qwen3-Reranker) answers yes or no: `answers` has their ids, the relevance is the probability of yes. Its
    sentence-transformers files, template or name show it. Any other model gives the embeddings' cosine.
    """

    def __init__(self, loaded: PreparedModel) -> None:
        self._tokenizer = loaded.facts.tokenizer
        self._prompts: Mapping[str, str] = loaded.facts.pooling.prompts
        self.answers = _answers(loaded)

    def asked(self, query: str, document: str, instruction: str = "") -> Answered:
        """The request for a reranker's answer. Raises RequestError for a text that is not Unicode."""
        assert self.answers is not None, "the model answers"
        for text in (query, document, instruction):
            check_unicode("a text to compare", text)
        pair = f"<Instruct>: {instruction or TASK}\n<Query>: {query}\n<Document>: {document}"
        control = self._tokenizer.control
        ids = self._tokenizer.encode_parts([*control.split(BEFORE), pair, *control.split(AFTER)])
        # One drawn id of two, at temperature 1, gives the probability of both.
        return Answered(tuple(ids), SamplingParams(allowed_ids=self.answers, max_tokens=1, seed=0, ignore_eos=True))

    def score(self, token: int, sampler_logprob: float) -> float:
        """The probability of yes, from the drawn answer and its log-probability."""
        assert self.answers is not None, "the model answers"
        chance = float(np.exp(sampler_logprob))
        return chance if token == self.answers[0] else 1.0 - chance

    def query(self, text: str, instruction: str = "") -> str:
        """The text to embed for a query: after the checkpoint's own prompt, or an instruction."""
        return f"Instruct: {instruction}\nQuery: {text}" if instruction else self._prompts.get("query", "") + text

    def document(self, text: str) -> str:
        return self._prompts.get("document", self._prompts.get("passage", "")) + text


def cosines(query: NDArray[np.float32], documents: NDArray[np.float32]) -> NDArray[np.float64]:
    """The cosines [n] of a query [width] and documents [n, width]; 0 for an embedding of zeros."""
    one, others = query.astype(np.float64), documents.astype(np.float64)
    lengths = np.linalg.norm(one) * np.linalg.norm(others, axis=1)
    found: NDArray[np.float64] = (others @ one) / np.where(lengths > 0, lengths, 1.0)
    return found


def _answers(loaded: PreparedModel) -> tuple[int, int] | None:
    tokenizer = loaded.facts.tokenizer
    if loaded.facts.pooling.answers is not None:
        if max(loaded.facts.pooling.answers) >= loaded.facts.config.vocab_size:
            raise CheckpointError(f"{loaded.facts.name}: the ids of its LogitScore are beyond the vocabulary")
        return loaded.facts.pooling.answers
    named = "rerank" in Path(loaded.facts.name).name.lower()
    if not (named or RULE in (tokenizer.chat_template or "")) or not tokenizer.control.ids.keys() >= set(MARKS):
        return None
    try:
        each = [tokenizer.encode(answer, add_special=False) for answer in ("yes", "no")]
    except RequestError:
        return None
    (yes, *more), (no, *others) = each
    return None if more or others else (yes, no)


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
