"""From a `GenerationRequest` to an engine request: renders, tokenises, compiles; slow, so it runs in threads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenwright.checks import check_whole
from tokenwright.decode.grammar import schema_rule
from tokenwright.engine import Grammar, Request, SamplingParams
from tokenwright.errors import ContextError, RequestError
from tokenwright.serve.service.output_parser import NewReader, PlainReader, SortingReader, ThinkTags
from tokenwright.serve.service.tools import ToolFormat, tool_format
from tokenwright.serve.service.types import PRIORITIES, GenerationRequest, Tool

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.llm.llm import LLM

_SLOW = ("grammar", "logit_bias", "stop", "stop_ids", "dry_multiplier")  # each may be long
MOST_LOGPROBS = 2**20  # of one reply, of all its texts and of the prompt
_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates switch reasoning
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")  # no request sets them as variables
_SYSTEM = ("system", "developer")
# Lines of system prompts that change with each request and mean nothing to a model: the billing line of Claude Code.
VOLATILE = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
ANY_OBJECT = Grammar.json_schema({"type": "object"})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request of the engine, with what its answer needs.

    text: the prompt as text, for display. reader: makes the reader of one text. at_end: its texts are known at the end
    alone. truncated: tokens that were cut off the prompt.
    """

    request: Request
    text: str
    reader: NewReader
    at_end: bool
    truncated: int


def check(wanted: GenerationRequest) -> None:
    """Raises RequestError for a request that no model can serve; it reads nothing and takes no time."""
    if (wanted.prompt is None) == (wanted.messages is None):
        raise RequestError("a request has either a prompt or messages")
    if wanted.priority not in PRIORITIES:
        raise RequestError(f"priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}, not {wanted.priority!r}")
    if wanted.truncate_prompt_tokens is not None:
        check_whole("truncate_prompt_tokens", wanted.truncate_prompt_tokens, 1)
    if wanted.gap is not None and not isinstance(wanted.prompt, str):
        raise RequestError("suffix: the prompt before a gap must be one text, not token ids or messages")
    if wanted.tools and wanted.messages is None:
        raise RequestError("tools belong to a conversation; give messages instead of a prompt")
    names = [tool.name for tool in wanted.tools]
    if len(set(names)) < len(names):
        raise RequestError("tools has two functions of the same name")
    if missing := [name for name in wanted.allowed_tools or () if name not in names]:
        raise RequestError(f"tool_choice names {missing[0]!r}, which is not among the tools")
    if wanted.continue_last and (not wanted.messages or wanted.messages[-1].get("role") != "assistant"):
        raise RequestError("messages: to continue the last message, it must be the assistant's")
    if wanted.tool_choice == "required" and not names:
        raise RequestError("tool_choice is required, but there are no tools")


class Preprocessor:
    """Prepares the requests of one model. Thread-safe."""

    def __init__(self, llm: LLM) -> None:
        from tokenwright.llm.input_processor import QUICK_PROMPT  # with NumPy
        from tokenwright.text.fill_in_middle import Infill

        self._infill = Infill(llm.tokenizer)
        self._llm = llm
        self._most = llm.longest()
        self._quick_prompt = QUICK_PROMPT
        template = llm.loaded.template
        self._source = "" if template is None else llm.tokenizer.chat_template or ""
        self._format: ToolFormat | None = tool_format(self._source)
        self._thinks = "</think>" in self._source
        special = llm.tokenizer.special_ids
        marks = ("<think>", "</think>", *(() if self._format is None else self._format.marks))
        known = {name: at for name, at in llm.tokenizer.control.ids.items() if name in marks}
        self._marks: Mapping[int, str] = {at: name for name, at in known.items() if at in special}
        self._silent_mark = self._format is not None and self._format.mark in self._marks.values()
        llm.check_length("")  # what these two compute once takes a while
        llm.prepare([0], llm.sampling(max_tokens=0))

    @property
    def thinks(self) -> bool:
        """Whether the model's template has think tags."""
        return self._thinks

    @property
    def calls(self) -> bool:
        """Whether the model's template has a form for tools."""
        return self._format is not None

    def check_prompt(self, wanted: GenerationRequest) -> None:
        """Raises RequestError, ContextError for a prompt that cannot fit, before it waits. It takes no time."""
        prompt = wanted.prompt
        if prompt is None or wanted.truncate_prompt_tokens is not None:
            return
        if isinstance(prompt, str):
            self._llm.check_length(prompt)
        elif len(prompt) > self._llm.context:
            raise ContextError(len(prompt), self._llm.context)

    def quick(self, wanted: GenerationRequest) -> bool:
        """Whether `prepare` takes less time than to ask a thread: for a short prompt without constraints."""
        short = wanted.prompt is not None and len(wanted.prompt) <= self._quick_prompt
        given = wanted.overrides
        return short and not (wanted.gap or wanted.json_object or any(given.get(name) for name in _SLOW))

    def prepare(self, wanted: GenerationRequest) -> Prepared:
        """Raises RequestError, ContextError."""
        tools = self._tools(wanted)
        ids, text = self.prompt(wanted)
        truncated = max(0, len(ids) - (wanted.truncate_prompt_tokens or len(ids)))
        ids = ids[truncated:]
        adapter = wanted.model if wanted.model in self._llm.loaded.adapters else None
        if wanted.embed and adapter:
            raise RequestError(f"{adapter} is an adapter, and embeddings are those of the model alone; name the model")
        if wanted.embed:
            return Prepared(self._llm.prepare_embedding(ids), text, PlainReader, False, truncated)
        params = self._llm.sampling(**self._overrides(wanted, tools, len(ids)))
        _check_logprobs(params, len(ids), wanted.together)
        at_end = params.beams > 1 or params.choices > params.n
        if at_end and wanted.streamed:
            name = "beams" if params.beams > 1 else "best_of"
            raise RequestError(f"{name} cannot be streamed: its texts are known at the end alone; leave stream out")
        request = self._llm.prepare(ids, params, salt=wanted.caller.salt, adapter=adapter)
        return Prepared(request, text, self._reader(wanted, text, tools, params), at_end, truncated)

    def prompt(self, wanted: GenerationRequest, *, add_special: bool = True) -> tuple[Sequence[int], str]:
        """The ids of the prompt, uncut, and its text. Raises RequestError.

        add_special: with the tokens that the tokenizer adds to a text.
        """
        self._check_lengths(wanted)
        if (gap := wanted.gap) is not None:
            return self._infill.ids(str(wanted.prompt), gap.suffix, gap.files, gap.begun), str(wanted.prompt)
        if wanted.prompt is not None:
            return self._ids(wanted.prompt, add_special), wanted.prompt if isinstance(wanted.prompt, str) else ""
        assert wanted.messages is not None, "`check` has seen to it"
        variables = self._variables(wanted)
        tools = None if self._tools(wanted) is None else [_declared(tool) for tool in wanted.tools]
        messages = self._known(wanted.messages)
        if wanted.continue_last:
            ids, text = self._continued(messages, tools, variables)
        else:
            rendered = self._llm.template.render(messages, tools=tools, variables=variables)
            ids, text = rendered.ids, rendered.text
        if self._forces_mark(wanted):  # the model cannot be made to write a special token, so the prompt ends with it
            assert self._format is not None, "a mark belongs to a form"
            ids, text = (*ids, self._llm.tokenizer.control.ids[self._format.mark]), text + self._format.mark
        return ids, text

    def _known(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages as the template knows them: a developer is the system, where it has no role of that name.

        Lines that change with each request are left out, for they would undo the prefix cache. Templates leave out what
        they do not know. Raises RequestError for tool calls that the template would leave out. Their results need no
        check of their own: each follows its call.
        """
        for at, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in self._source:
                raise RequestError(f"messages.{at}: this model's chat template has no form for calls of tools")
        messages = [{**one, "content": steady(one["content"])} if one["role"] in _SYSTEM else one for one in messages]
        if "developer" in self._source:
            return messages
        return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]

    def _check_lengths(self, wanted: GenerationRequest) -> None:
        """Raises RequestError for a text that by its length cannot fit the context, before it takes time."""
        if wanted.truncate_prompt_tokens is None:
            contents = [message.get("content") for message in wanted.messages or ()]
            gap = () if wanted.gap is None else (wanted.gap.suffix, *(text for _, text in wanted.gap.files))
            for text in (wanted.prompt, *gap, *contents):
                if isinstance(text, str):
                    self._llm.check_length(text)

    def _variables(self, wanted: GenerationRequest) -> dict[str, Any]:
        """The template's variables. A model that cannot reason, or cannot help it, answers as it does."""
        found = {name: value for name, value in wanted.variables.items() if name not in _OWN_VARIABLES}
        if wanted.thinking is not None:
            for name in _SWITCHES:
                if re.search(rf"\b{name}\b", self._source):
                    found.setdefault(name, wanted.thinking)
        return found

    def _ids(self, prompt: str | Sequence[int], add_special: bool) -> list[int]:
        """The token ids of a prompt. Raises RequestError."""
        if not isinstance(prompt, str):
            return list(prompt)
        return self._llm.tokenizer.encode(prompt, add_special=add_special)

    def _continued(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> tuple[Sequence[int], str]:
        """The prompt up to the end of the last message's text."""
        template, last = self._llm.template, str(messages[-1].get("content") or "").rstrip()
        start = template.render(messages[:-1], tools=tools, variables=variables) if len(messages) > 1 else None
        if start is None:
            raise RequestError("messages: an answer can be continued only after another message")
        return [
            *start.ids,
            *self._llm.tokenizer.encode(last, add_special=False, parse_special=False),
        ], start.text + last

    def _forces_mark(self, wanted: GenerationRequest) -> bool:
        calls = self._tools(wanted) is not None and wanted.tool_choice != "auto"
        return calls and self._silent_mark

    def _tools(self, wanted: GenerationRequest) -> ToolFormat | None:
        """The form in which the model calls tools, if it may call any. Raises RequestError where it has none."""
        if not wanted.tools or wanted.tool_choice == "none":
            return None
        if self._format is None:
            raise RequestError("tools: this model's chat template has no form for tools; leave them out")
        return self._format

    def _overrides(self, wanted: GenerationRequest, tools: ToolFormat | None, prompt: int) -> dict[str, Any]:
        found = {name: value for name, value in wanted.overrides.items() if value is not None}
        if wanted.json_object:
            found["grammar"] = ANY_OBJECT
        if tools is not None:
            answer = _answer_rule(found["grammar"]) if "grammar" in found else None
            special = {name: at for at, name in self._marks.items() if name in tools.marks}
            found["grammar"] = tools.grammar(
                _callable(wanted), wanted.tool_choice, wanted.parallel_tool_calls, special, answer
            )
        if wanted.gap is not None and not found.get("ignore_eos"):
            found["stop_ids"] = (*found.get("stop_ids", ()), *self._infill.ends)
        if wanted.deadline_s is not None:
            found["max_seconds"] = min(wanted.deadline_s, found.get("max_seconds", wanted.deadline_s))
        if prompt > self._llm.context:
            raise ContextError(prompt, self._llm.context)
        found.setdefault("max_tokens", max(0, self._most - prompt))
        if wanted.context is not None:
            if prompt > wanted.context:
                limit = f"the request allows {wanted.context} for prompt and answer (num_ctx)"
                raise RequestError(f"the prompt has {prompt} tokens, and {limit}; raise it, or shorten the prompt")
            found["max_tokens"] = min(found["max_tokens"], wanted.context - prompt)
        return found

    def _reader(
        self, wanted: GenerationRequest, text: str, tools: ToolFormat | None, params: SamplingParams
    ) -> NewReader:
        tags = None
        if wanted.reasoning and self._thinks and wanted.messages is not None:
            opened = text.rstrip().endswith("<think>")
            free = tools is not None and wanted.tool_choice == "auto" and not _formed(wanted)
            held = params.grammar is not None and not free  # the grammar has no room for thoughts
            tags = None if opened and held else ThinkTags(opened=opened)
        if tags is None and tools is None:
            return PlainReader
        marks, opened = self._marks, self._forces_mark(wanted)
        called = _callable(wanted)
        return lambda: SortingReader(tags, None if tools is None else tools.reader(called, opened, marks), marks)


def steady(content: Any) -> Any:
    """A system message's text without the lines that change with each request (`VOLATILE`)."""
    return VOLATILE.sub("", content) if isinstance(content, str) else content


def _check_logprobs(params: SamplingParams, prompt: int, together: int) -> None:
    """Raises RequestError where a reply, of `together` such requests, could have log-probabilities that fill memory."""
    found = 0
    if params.logprobs is not None:
        found += max(params.choices, params.beams) * params.max_tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        found += prompt * (1 + params.prompt_logprobs)
    if found * together > MOST_LOGPROBS:
        allowed = f"{MOST_LOGPROBS:,} are allowed; lower max_tokens, n, or their number for each token"
        raise RequestError(f"logprobs: the reply may have {found * together:,} log-probabilities, and {allowed}")


def _callable(wanted: GenerationRequest) -> list[Tool]:
    """The tools that the model may call; the prompt has all."""
    return [tool for tool in wanted.tools if wanted.allowed_tools is None or tool.name in wanted.allowed_tools]


def _formed(wanted: GenerationRequest) -> bool:
    """Whether the text of the answer must have a form."""
    return wanted.json_object or wanted.overrides.get("grammar") is not None


def _answer_rule(grammar: Grammar) -> str:
    """The rule of an answer beside tools. Raises RequestError for a grammar that is no JSON schema."""
    if grammar.kind != "json_schema":
        raise RequestError(f"tools and a grammar of the kind {grammar.kind} cannot be combined; give a JSON schema")
    return schema_rule(grammar.text)


def _declared(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    about = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": about}
