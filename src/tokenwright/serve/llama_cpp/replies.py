"""Replies of llama.cpp's server."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tokenwright.engine import FinishReason
from tokenwright.llm.outputs import Piece
from tokenwright.sampling_params import SamplingParams
from tokenwright.serve.http.exchange import Exchange
from tokenwright.serve.http.reply_text import Json, LlamaTimings, dumps, llama_timings
from tokenwright.serve.llama_cpp.bodies import LlamaBody
from tokenwright.serve.openai.logprobs import LlamaToken, Tokens
from tokenwright.serve.openai.replies import error_body
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.types import Delta

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM

SAME = (  # settings with llama.cpp's names
    *("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "ignore_eos"),
)
ENDS = (FinishReason.EOS, FinishReason.STOP_ID, FinishReason.GRAMMAR)


class Infilled(TypedDict, total=False):
    """The reply of /infill and /completion, or a stream's last event; earlier events have only the first fields."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    completion_probabilities: list[LlamaToken]
    model: str
    tokens_evaluated: int
    tokens_cached: int
    tokens_predicted: int
    generation_settings: Json
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    timings: LlamaTimings


class LlamaEmbedding(TypedDict):
    """The embedding of a text: a list of one vector."""

    index: int
    embedding: list[list[float]]


class LoraAdapter(TypedDict):
    """An adapter; requests choose it as their model."""

    id: int
    path: str
    scale: float


class AppliedTemplate(TypedDict):
    prompt: str


class GenerationSettings(TypedDict):
    """The defaults of a request's fields. n_ctx: the context."""

    n_ctx: int
    params: Json


class Props(TypedDict):
    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    """A slot of the engine, with its request's tokens so far."""

    id: int
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    n_decoded: int


class LlamaText:
    """Writes the reply to a prompt. index: of the prompt in the request."""

    def __init__(self, body: LlamaBody, generation: Generation, llm: "LLM", model: str, index: int = 0) -> None:
        self._body = body
        self._generation = generation
        self._llm = llm
        self._tokens = Tokens(llm.tokenizer)
        self._model = model
        self._index = index
        self._lines = False
        generation.reader.keeps_tokens |= body.stream

    def whole(self, answer: Delta) -> Mapping[str, Any]:
        self._lines = "\n" in answer.text
        ids = [*self._generation.completion().token_ids] if self._body.return_tokens else []
        return self._chosen(self._end(answer, answer.text, ids) | self._probabilities(answer.tokens))

    def _probabilities(self, pieces: Sequence[Piece]) -> Infilled:
        if self._body.n_probs is None or not pieces:
            return {}
        return {"completion_probabilities": self._tokens.llama(pieces)}

    def _chosen(self, reply: Infilled) -> Mapping[str, Any]:
        found: Json = {}
        for path in self._body.response_fields or ():
            value: Any = reply
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            found |= {} if value is None else {path: value}
        return found if self._body.response_fields else reply

    def events(self, exchange: Exchange) -> AsyncIterator[bytes]:

        def line(event: Mapping[str, Any]) -> bytes:
            return f"data: {dumps(event)}\n\n".encode()

        def take(delta: Delta) -> Iterator[Infilled]:
            ids = [piece.token_id for piece in delta.tokens if piece.token_id is not None]
            if delta.text or ids:
                self._lines = self._lines or "\n" in delta.text
                found = Infilled(index=self._index, content=delta.text, tokens=ids, stop=False)
                yield found | self._probabilities(delta.tokens)

        return exchange.events(
            self._generation,
            line,
            take,
            lambda delta: [self._chosen(self._end(delta, "", []))],
            lambda problem: error_body(problem, exchange.about.request_id),
        )

    def _end(self, last: Delta, text: str, ids: list[int]) -> Infilled:
        counts = self._generation.counts()
        word = last.stopped if isinstance(last.stopped, str) else ""
        kind: Literal["eos", "limit", "word"] = "word" if word else "eos" if last.reason in ENDS else "limit"
        return {
            "index": self._index,
            "content": text,
            "tokens": ids,
            "stop": True,
            "model": self._model,
            "tokens_evaluated": counts.prompt,
            "tokens_cached": counts.cached,
            "tokens_predicted": counts.completion,
            "generation_settings": self._settings(self._generation.params),
            "prompt": self._generation.prepared.text or self._llm.tokenizer.decode(self._generation.prompt_ids),
            "has_new_line": self._lines,
            "truncated": kind == "limit" and counts.prompt + counts.completion >= self._llm.context,
            "stop_type": kind,
            "stopping_word": word,
            "timings": llama_timings(self._generation.timings()),
        }

    def _settings(self, params: SamplingParams) -> Json:
        biases = [{"token": token, "bias": bias} for token, bias in params.logit_bias]
        never = [*params.banned_ids, *(sorted(self._llm.eos_ids) if params.ignore_eos else ())]
        return {name: getattr(params, name) for name in SAME} | {
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": params.repetition_window or -1,
            "stop": [*params.stop],
            "n_predict": params.max_tokens,
            "logit_bias": biases + [{"token": token, "bias": None} for token in never],
            "n_probs": self._body.n_probs or 0,
            "stream": self._body.stream,
        }
