"""What a model computes of given texts, with nothing written: log-probabilities and embeddings."""

from collections.abc import Sequence
from functools import partial
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tokenwright.engine import Request, SamplingParams
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.engine import LLMEngine
from tokenwright.llm.input_processor import Prompt, prompts_of
from tokenwright.llm.output_processor import OutputProcessor


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

    def embed(self, texts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
        """The embedding of each text: the mean of its tokens' hidden states after the final norm, [texts, width].

        Computed in one batch; what a text gets does not depend on the others. A text is tokenised as a prompt is, with
        its special tokens. The rows are not scaled to unit length.

        Raises RequestError for a text without tokens, ContextError or CapacityError for one that is too long,
        EngineError if one failed in the engine.
        """
        return self._embedded(self._finish(self._embeddings(texts), at_end=False))

    async def aembed(self, texts: Prompt | Sequence[Prompt]) -> NDArray[np.float32]:
        """`embed` for asyncio."""
        return self._embedded(await self._afinish(await self._prepared(partial(self._embeddings, texts))))

    def _embeddings(self, texts: Prompt | Sequence[Prompt]) -> list[Request]:
        return [self._requests.embedding(text) for text in prompts_of(texts)]

    def _embedded(self, transcripts: Sequence[OutputProcessor]) -> NDArray[np.float32]:
        """The means of ended requests, [texts, width]."""
        for transcript in transcripts:
            if transcript.error is not None:
                raise EngineError(f"a text could not be embedded: {transcript.error}") from transcript.error
        means = [transcript.hidden.mean() for transcript in transcripts]
        return np.array(means, dtype=np.float32).reshape(-1, self.graph.width)

    def _scores(self, texts: Sequence[list[int]], start: int) -> list[NDArray[np.float64]]:
        """The log-probabilities of each text's tokens from position `start` on, all in one batch."""
        params = SamplingParams(temperature=0.0, max_tokens=0)
        scored = self._finish([self._requests.build(text, params, prompt_logprobs_from=start) for text in texts])
        for transcript in scored:
            if transcript.error is not None:
                raise EngineError(f"the text could not be scored: {transcript.error}") from transcript.error
        return [np.array(transcript.prompt_logprobs, dtype=np.float64) for transcript in scored]
