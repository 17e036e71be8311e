"""How relevant a document is to a query: the answer of a reranker, or the cosine of two embeddings.

A reranker such as Qwen3-Reranker is a language model trained to answer yes or no; the relevance is the probability of
yes. Its files of sentence-transformers, its template or its name show it, as its config.json is any other model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenwright.checkpoints.files.pooling import PoolingConfig
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.llm.model import PreparedModel
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
    """A text to be answered by yes or no, as ids, and the parameters of its answer."""

    ids: tuple[int, ...]
    params: SamplingParams


def check_pooling(pooling: PoolingConfig) -> None:
    """Raises RequestError if the checkpoint's embeddings need more than is computed here."""
    if pooling.lacking:
        raise RequestError(f"the embeddings of this checkpoint need {pooling.lacking}, which is not computed here")


class Relevance:
    """Compares queries and documents for one model. Thread-safe. answers: a reranker's ids of yes and no, else None."""

    def __init__(self, loaded: PreparedModel) -> None:
        self._tokenizer = loaded.tokenizer
        self._prompts: Mapping[str, str] = loaded.facts.pooling.prompts
        self.answers = _answers(loaded)

    def asked(self, query: str, document: str, instruction: str = "") -> Answered:
        """The request for a reranker's answer. Raises RequestError for a text that is no Unicode."""
        assert self.answers is not None, "the model answers"
        for text in (query, document, instruction):
            check_unicode("a text to compare", text)
        pair = f"<Instruct>: {instruction or TASK}\n<Query>: {query}\n<Document>: {document}"
        control = self._tokenizer.control
        ids = self._tokenizer.encode_parts([*control.split(BEFORE), pair, *control.split(AFTER)])
        # Of two ids at temperature 1, one that is drawn tells the probability of both.
        return Answered(tuple(ids), SamplingParams(allowed_ids=self.answers, max_tokens=1, seed=0, ignore_eos=True))

    def score(self, token: int, sampler_logprob: float) -> float:
        """The probability of yes, from the answer that was drawn and its log-probability."""
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
    """The ids of yes and no. Raises CheckpointError for files that name ids beyond the vocabulary."""
    tokenizer = loaded.tokenizer
    if loaded.facts.pooling.answers is not None:
        if max(loaded.facts.pooling.answers) >= loaded.config.vocab_size:
            raise CheckpointError(f"{loaded.name}: the ids of its LogitScore are beyond the vocabulary")
        return loaded.facts.pooling.answers
    named = "rerank" in Path(loaded.name).name.lower()
    if not (named or RULE in (tokenizer.chat_template or "")) or not tokenizer.control.ids.keys() >= set(MARKS):
        return None
    try:
        each = [tokenizer.encode(answer, add_special=False) for answer in ("yes", "no")]
    except RequestError:
        return None
    (yes, *more), (no, *others) = each
    return None if more or others else (yes, no)
