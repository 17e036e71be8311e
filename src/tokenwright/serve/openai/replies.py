"""OpenAI's replies: objects, chunks, log-probabilities, usage and errors, made from what the service says."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Sequence

import tokenwright
from tokenwright.engine import TopLogprob
from tokenwright.llm.chat.ids import new_hex
from tokenwright.llm.outputs import Piece
from tokenwright.serve.http.reply_text import Json, dumps, llama_timings, timings_of
from tokenwright.serve.openai.custom_tools import CustomCalls, input_of
from tokenwright.serve.service.types import Answer, Delta, Problem, Timings, TokenCounts, ToolCallDelta
from tokenwright.text import TextStream, Tokenizer

LEAST = -9999.0  # for a probability of 0, whose logarithm JSON cannot write

_TYPES = {
    "invalid": "invalid_request_error",
    "key": "authentication_error",
    "forbidden": "permission_error",
    "missing": "not_found_error",
    "size": "invalid_request_error",
    "busy": "rate_limit_error",
    "unavailable": "service_unavailable_error",
    "engine": "server_error",
}
_CODES = {"key": "invalid_api_key", "missing": "not_found", "busy": "rate_limit_exceeded"}


def error_body(problem: Problem, request_id: str) -> Json:  # noqa: ARG001  (other APIs repeat the id)
    """An error as OpenAI's clients read it; lengths as llama.cpp's do."""
    code = "model_not_found" if problem.param == "model" else problem.code or _CODES.get(problem.kind)
    kind = _TYPES[problem.kind]
    found: Json = {"message": problem.message, "type": kind, "param": problem.param, "code": code}
    if problem.lengths is not None:
        found["n_prompt_tokens"], found["n_ctx"] = problem.lengths
    return {"error": found}


def usage_of(counts: Iterable[TokenCounts]) -> Json:
    """The usage of one or several generations."""
    each = list(counts)
    prompt, written = sum(one.prompt for one in each), sum(one.completion for one in each)
    truncated = sum(one.truncated for one in each)
    accepted = sum(one.accepted for one in each)
    details = {
        "reasoning_tokens": sum(one.reasoning for one in each),
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(one.drafted for one in each) - accepted,
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": cached_of(each) | cut(truncated),
        "completion_tokens_details": details,
    }


def cached_of(counts: Sequence[TokenCounts]) -> Json:
    """The fields of a usage for tokens that were found in the cache; those from a disk, where there are some."""
    disk = sum(one.disk for one in counts)
    return {"cached_tokens": sum(one.cached for one in counts)} | ({"disk_tokens": disk} if disk else {})


def cut(tokens: int) -> Json:
    """The field of a usage for tokens that truncate_prompt_tokens has cut off, where it has."""
    return {"truncated_tokens": tokens} if tokens else {}


class Names:
    """The fields that all objects of one reply have in common. kind: "chat.completion" or "text_completion".

    fingerprint: of the server and its model.
    """

    def __init__(self, kind: str, model: str, fingerprint: str) -> None:
        self.id = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{new_hex(12)}"
        self.kind = kind
        self.created = int(time.time())
        self.model = model
        self.fingerprint = fingerprint

    @property
    def head(self) -> Json:
        """The fields before the choices."""
        found: Json = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return found | {"system_fingerprint": self.fingerprint}

    def whole(self, choices: Sequence[Json], usage: Json, timings: Timings | None) -> Json:
        """A reply in one piece."""
        found = self.head | {"choices": list(choices), "usage": usage}
        return found | _timed(timings)


def fingerprint_of(model: str) -> str:
    """Another one for another version of the server and for another model. It begins as llama.cpp's do."""
    return "b" + hashlib.sha256(f"{tokenwright.__version__} {model}".encode()).hexdigest()[:10]


def _timed(timings: Timings | None) -> Json:
    """The field of timings, in our words and in llama.cpp's."""
    return {} if timings is None else {"timings": timings_of(timings) | llama_timings(timings)}


class Tokens:
    """Log-probabilities by the names of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """A token for display."""
        return self._tokenizer.token_text(token)

    def chat(self, pieces: Sequence[Piece]) -> Json:
        """`logprobs` of a chat choice."""
        return {"content": [self._chat_token(piece) for piece in pieces], "refusal": None}

    def _chat_token(self, piece: Piece) -> Json:
        assert piece.token_id is not None, "only tokens have log-probabilities"
        tops = [self._named(top.token, top.logprob) for top in piece.top]
        return self._named(piece.token_id, piece.logprob) | {"top_logprobs": tops}

    def _named(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token, skip_special=False) or b""
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": list(data)}

    def llama(self, piece: Piece) -> Json:
        """A token and the likeliest ones of its place, in the manner of llama.cpp."""
        assert piece.token_id is not None, "only tokens have log-probabilities"
        tops = [{"id": top.token} | self._named(top.token, top.logprob) for top in piece.top]
        return {"id": piece.token_id} | self._named(piece.token_id, piece.logprob) | {"top_logprobs": tops}

    def completion(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[TopLogprob] | None],
        offsets: Offsets,
    ) -> Json:
        """`logprobs` of a completion's choice, or of the next tokens of one."""
        named = [
            None if top is None else self._tops(top, token, logprob)
            for top, token, logprob in zip(tops, ids, logprobs, strict=True)
        ]
        found: Json = {"text_offset": offsets.of(ids), "tokens": [self.text(token) for token in ids]}
        return found | {"token_logprobs": [_finite(one) for one in logprobs], "top_logprobs": named}

    def _tops(self, tops: Sequence[TopLogprob], token: int, logprob: float | None) -> Json:
        """The likeliest tokens, and the token of the text if it is not among them."""
        named: Json = {self.text(top.token): _finite(top.logprob) for top in tops}
        named.setdefault(self.text(token), _finite(logprob))
        return named


class Offsets:
    """Where the tokens of a text begin: characters before each, counted as the text is decoded.

    prompt: the ids before the text. start: the offset of its first token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), start: int = 0) -> None:
        self._stream = TextStream(tokenizer, prompt=prompt)
        self._at = start

    def of(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens. One that begins inside a character has that character's."""
        found = []
        for token in ids:
            found.append(self._at)
            self._at += len(self._stream.push(token))
        return found


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)


def message_of(answer: Answer, customs: Collection[str] = (), *, older: bool = False) -> Json:
    """The message of a chat choice. customs: the names of the custom tools. older: its call is a function_call."""
    text = answer.text
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = text or None
    if answer.tool_calls and older:
        call = answer.tool_calls[0]
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif answer.tool_calls:
        message["tool_calls"] = [
            _called(call.id, call.name, call.arguments, call.name in customs) for call in answer.tool_calls
        ]
    return message


def _called(identity: str, name: str, arguments: str, custom: bool) -> Json:
    if custom:
        return {"id": identity, "type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


class Chunks:
    """The chunks of a stream as lines, made by putting strings together: this is done for every token.

    usage: every chunk says that it has none, because one at the end has it. customs: the names of the custom tools.
    older: calls are function_call.
    """

    def __init__(self, names: Names, usage: bool, customs: Collection[str] = (), *, older: bool = False) -> None:
        kind = names.kind if names.kind == "text_completion" else f"{names.kind}.chunk"
        self._head = "data: " + dumps(names.head | {"object": kind})[:-1] + ',"choices":['
        self.usage: Json | None = None  # so far, in every chunk
        self._tail = ',"usage":null}\n\n' if usage else "}\n\n"
        self._customs = customs
        self._older = older
        self._calls: dict[int, CustomCalls] = {}  # by choice, where there are custom tools

    def line(self, choice: str) -> str:
        """A chunk with one choice."""
        tail = self._tail if self.usage is None else f',"usage":{dumps(self.usage)}}}\n\n'
        return f"{self._head}{choice}]{tail}"

    def last(self, usage: Json | None, timings: Timings | None) -> str:
        """The chunk with the usage, and perhaps the timings."""
        more: Json = {} if usage is None else {"usage": usage}
        more |= _timed(timings)
        return f"{self._head}],{dumps(more)[1:]}\n\n"

    def chat(self, delta: Delta, tokens: Tokens, first: bool) -> str:
        """The chunks of one delta of a chat; `first`: of its choice. None has two fields: some clients read one."""
        lines = []
        if first:
            lines.append(self.chat_choice(delta.choice, '{"role":"assistant","content":""}'))
        parts = []
        if delta.reasoning:
            parts.append(f'"reasoning_content":{dumps(delta.reasoning)}')
        if delta.text:
            parts.append(f'"content":{dumps(delta.text)}')
        if self._older:
            parts += [f'"function_call":{dumps(_older(call))}' for call in delta.tool_calls if call.index == 0]
        elif calls := self._fragments(delta):
            parts.append(f'"tool_calls":{dumps(calls)}')
        lines += [self.chat_choice(delta.choice, f"{{{part}}}") for part in parts[:-1]]
        if parts or delta.tokens:
            logprobs = dumps(tokens.chat(delta.tokens)) if delta.tokens else "null"
            lines.append(self.chat_choice(delta.choice, f"{{{''.join(parts[-1:])}}}", logprobs))
        if delta.finish is not None:
            lines.append(self.chat_choice(delta.choice, "{}", finish=f'"{finish_of(delta, older=self._older)}"'))
        return "".join(lines)

    def _fragments(self, delta: Delta) -> list[Json]:
        """The calls of a delta. Those of custom tools come whole."""
        if not self._customs:
            return [_fragment(call, custom=False) for call in delta.tool_calls]
        calls = self._calls.setdefault(delta.choice, CustomCalls(self._customs))
        found = [_fragment(call, custom=custom) for call, custom in calls.take(delta.tool_calls)]
        rest = calls.rest() if delta.finish is not None else ()
        return found + [_fragment(call, custom=custom) for call, custom in rest]

    def chat_choice(self, choice: int, delta: str, logprobs: str = "null", finish: str = "null") -> str:
        """A chunk with one choice of a chat."""
        return self.line(f'{{"index":{choice},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}')

    def completion(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> str:
        """A chunk with one choice of a completion."""
        reason = "null" if finish is None else f'"{finish}"'
        found = "null" if logprobs is None else dumps(logprobs)
        return self.line(f'{{"index":{index},"text":{dumps(text)},"logprobs":{found},"finish_reason":{reason}}}')


def _fragment(call: ToolCallDelta, *, custom: bool) -> Json:
    if custom:
        about = {"name": call.name, "input": call.arguments}
        return {"index": call.index, "id": call.id, "type": "custom", "custom": about}
    function: Json = {} if call.name is None else {"name": call.name}
    found: Json = {"index": call.index, "function": function | {"arguments": call.arguments}}
    return found if call.id is None else found | {"id": call.id, "type": "function"}


def _older(call: ToolCallDelta) -> Json:
    name: Json = {} if call.name is None else {"name": call.name}
    return name | {"arguments": call.arguments}


def finish_of(answer: Answer | Delta, *, older: bool = False) -> str:
    """The finish reason of a text; one that was cancelled has no client left that could read it.

    older: a call is a function_call.
    """
    return "function_call" if older and answer.finish == "tool_calls" else answer.finish or "stop"
