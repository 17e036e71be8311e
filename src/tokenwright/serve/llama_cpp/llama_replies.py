"""Replies in the manner of llama.cpp's server: of /completion and /infill, whole and as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request

from tokenwright.engine import FinishReason
from tokenwright.llm.outputs import Piece
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.api import about
from tokenwright.serve.http.reply_text import Json, dumps, llama_timings
from tokenwright.serve.http.replying import events_of
from tokenwright.serve.llama_cpp.bodies import LlamaBody
from tokenwright.serve.openai.replies import Tokens, error_body
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.types import Answer, Delta

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM

ENDS = (FinishReason.EOS, FinishReason.STOP_ID, FinishReason.GRAMMAR)


class LlamaText:
    """Makes the reply to one prompt. index: of the prompt in the request."""

    def __init__(self, body: LlamaBody, generation: Generation, llm: LLM, model: str, index: int = 0) -> None:
        self._body = body
        self._generation = generation
        self._llm = llm
        self._tokens = Tokens(llm.tokenizer)
        self._model = model
        self._index = index
        self._lines = False
        generation.keeps_tokens |= body.stream

    def whole(self, answer: Answer) -> Json:
        """The reply in one piece."""
        self._lines = "\n" in answer.text
        ids = [*self._generation.completion().token_ids] if self._body.return_tokens else []
        found = {"index": self._index, "content": answer.text, "tokens": ids}
        return self._chosen(found | self._end(answer) | self._probabilities(answer.tokens))

    def _probabilities(self, pieces: Sequence[Piece]) -> Json:
        """The likeliest tokens of each place, where they are asked for."""
        if self._body.n_probs is None or not pieces:
            return {}
        return {"completion_probabilities": [self._tokens.llama(piece) for piece in pieces]}

    def _chosen(self, reply: Json) -> Json:
        """The fields that the request asks for; all, where it names none."""
        found: Json = {}
        for path in self._body.response_fields or ():
            value: Any = reply
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            found |= {} if value is None else {path: value}
        return found if self._body.response_fields else reply

    def events(self, request: Request) -> AsyncIterator[bytes]:
        """One event for each step, and a last one with the counts."""

        def line(event: Json) -> bytes:
            return f"data: {dumps(event)}\n\n".encode()

        def take(delta: Delta) -> Iterator[bytes]:
            ids = [piece.token_id for piece in delta.tokens if piece.token_id is not None]
            if delta.text or ids:
                self._lines = self._lines or "\n" in delta.text
                found = {"index": self._index, "content": delta.text, "tokens": ids, "stop": False}
                yield line(found | self._probabilities(delta.tokens))

        def end(delta: Delta) -> Iterator[bytes]:
            yield line(self._chosen({"index": self._index, "content": "", "tokens": []} | self._end(delta)))

        def failed(problem: Any) -> bytes:
            return line(error_body(problem, about(request).request_id))

        return events_of(request, self._generation, take, end, failed)

    def _end(self, last: Delta | Answer) -> Json:
        """What a reply says at its end."""
        counts = self._generation.counts()
        word = last.stopped if isinstance(last.stopped, str) else ""
        kind = "word" if word else "eos" if last.reason in ENDS else "limit"
        return {
            "stop": True,
            "model": self._model,
            "tokens_evaluated": counts.prompt,
            "tokens_cached": counts.cached,
            "tokens_predicted": counts.completion,
            "generation_settings": self._settings(self._generation.params),
            "prompt": self._generation.prompt_text or self._llm.tokenizer.decode(self._generation.prompt_ids),
            "has_new_line": self._lines,
            "truncated": kind == "limit" and counts.prompt + counts.completion >= self._llm.context,
            "stop_type": kind,
            "stopping_word": word,
            "timings": llama_timings(self._generation.timings()),
        }

    def _settings(self, params: SamplingParams) -> Json:
        """The parameters with which the text was written."""
        biases = [{"token": token, "bias": bias} for token, bias in params.logit_bias]
        never = [*params.banned_ids, *(sorted(self._llm.eos_ids) if params.ignore_eos else ())]
        return {
            "seed": params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "typical_p": params.typical_p,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": params.repetition_window or -1,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": [*params.stop],
            "n_predict": params.max_tokens,
            "max_tokens": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "logit_bias": biases + [{"token": token, "bias": None} for token in never],
            "n_probs": self._body.n_probs or 0,
            "stream": self._body.stream,
        }
