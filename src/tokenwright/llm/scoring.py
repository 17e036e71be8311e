"""What a model computes of given texts, with nothing written: log-probabilities and embeddings."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import POOLINGS, Pooling
from tokenwright.checks import check_bool, shown
from tokenwright.engine import Request, SamplingParams
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.engine import LLMEngine
from tokenwright.llm.input_processor import Prompt, prompts_of
from tokenwright.llm.output_processor import OutputProcessor
from tokenwright.llm.relevance import Relevance, cosines


class ScoringModel(LLMEngine):
    """An opened model that scores and embeds texts. Thread-safe."""

    @overload
    def score(self, prompt: Prompt) -> NDArray[np.float64]: ...

    @overload
    def score(self, prompt: Prompt, continuations: Sequence[Prompt]) -> list[NDArray[np.float64]]: ...

    def score(
        self, prompt: Prompt, continuations: Sequence[Prompt] | None = None
    ) -> NDArray[np.float64] | list[NDArray[np.float64]]:
        """The model's log-probability (natural) of each token of the prompt after the first, [tokens - 1].

        With continuations: for each of them the log-probabilities [n] of its n tokens after the prompt; they share the
        prompt's pages. Raises RequestError, EngineError.
        """
        if continuations is None:
            return self._scores([self._requests.ids(prompt)], 1)[0]
        if isinstance(continuations, str) or not isinstance(continuations, Sequence):
            raise RequestError("continuations are given as a list, also if it is only one")
        ids = self._requests.ids(prompt)
        if not ids:
            raise RequestError("a continuation is scored after a prompt, and this one has no tokens")
        return self._scores([self._requests.ids_after(prompt, ids, one) for one in continuations], len(ids))

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool | None = None
    ) -> NDArray[np.float32]:
        """The embedding of each text: its tokens' hidden states after the final norm, pooled, [texts, width].

        Computed in one batch; what a text gets does not depend on the others. A text is tokenised as a prompt is, with
        its special tokens.
        pooling: their "mean", the "last" or the "first" of them; None: as the checkpoint's files say, else the mean.
        normalize: scale the rows to unit length; None: as the files say, else not.

        Raises RequestError for a text without tokens, ContextError or CapacityError for one that is too long,
        EngineError if one failed in the engine.
        """
        requests = self._embeddings(texts, pooling, normalize)
        return self._embedded(self._finish(requests, at_end=False), pooling, normalize)

    async def aembed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool | None = None
    ) -> NDArray[np.float32]:
        """`embed` for asyncio."""
        requests = await self._prepared(partial(self._embeddings, texts, pooling, normalize))
        return self._embedded(await self._afinish(requests), pooling, normalize)

    def rerank(self, query: str, documents: Sequence[str], *, instruction: str = "") -> NDArray[np.float64]:
        """How relevant each document is to the query, [documents], computed in one batch.

        A reranker that answers yes or no gives the probability of yes; any other model the cosine of the embeddings.
        instruction: what the query asks for, for models that were trained with one. Raises the errors of `embed`.
        """
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            raise RequestError("documents are given as a list, also if there is only one")
        if not all(isinstance(one, str) for one in (query, *documents, instruction)):
            raise RequestError("a query, its documents and an instruction are texts")
        relevance = self.relevance
        if relevance.answers is None:
            texts = [relevance.query(query, instruction), *map(relevance.document, documents)]
            first, *others = self.embed(texts)
            return cosines(first, np.array(others).reshape(-1, len(first)))
        asked = [relevance.asked(query, document, instruction) for document in documents]
        ended = self._finish([self._requests.build(one.ids, one.params) for one in asked])
        _check_all(ended, "a document could not be scored")
        answers = [one.completion() for one in ended]
        return np.array([relevance.score(one.token_ids[0], one.sampler_logprobs[0]) for one in answers], np.float64)

    @cached_property
    def relevance(self) -> Relevance:
        """The form in which this model compares texts."""
        self._open_loop()
        return Relevance(self.loaded)

    def _embeddings(
        self, texts: Prompt | Sequence[Prompt], pooling: Pooling | None, normalize: bool | None
    ) -> list[Request]:
        if pooling is None:
            self.check_pooling()
        elif pooling not in POOLINGS:
            raise RequestError(f"pooling must be {', '.join(POOLINGS)} or None, not {shown(pooling)}")
        if normalize is not None:
            check_bool("normalize", normalize)
        return [self._requests.embedding(text) for text in prompts_of(texts)]

    def _embedded(
        self, transcripts: Sequence[OutputProcessor], pooling: Pooling | None, normalize: bool | None
    ) -> NDArray[np.float32]:
        """The pooled rows of ended requests, [texts, width]."""
        own = self.loaded.pooling
        _check_all(transcripts, "a text could not be embedded")
        rows = [transcript.hidden.pooled(pooling or own.pooling) for transcript in transcripts]
        found = np.array(rows, dtype=np.float32).reshape(-1, self.graph.width)
        if own.normalize if normalize is None else normalize:
            found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found

    def _scores(self, texts: Sequence[list[int]], start: int) -> list[NDArray[np.float64]]:
        """The log-probabilities of each text's tokens from position `start` on, all in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=0)
        scored = self._finish([self._requests.build(text, params, prompt_logprobs_from=start) for text in texts])
        _check_all(scored, "the text could not be scored")
        return [np.array(transcript.prompt_logprobs, dtype=np.float64) for transcript in scored]


def _check_all(transcripts: Sequence[OutputProcessor], failed: str) -> None:
    """Raises EngineError if a request has failed."""
    for transcript in transcripts:
        if transcript.error is not None:
            raise EngineError(f"{failed}: {transcript.error}") from transcript.error
