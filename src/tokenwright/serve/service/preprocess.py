"""From a `GenerationRequest` to an engine request: renders, tokenises, compiles; slow, so it runs in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenwright.checks import check_whole
from tokenwright.decode import TextStopChecker
from tokenwright.decode.grammar import schema_rule
from tokenwright.engine import Grammar, Request, SamplingParams
from tokenwright.errors import ContextError, RequestError
from tokenwright.serve.service.output_parser import NewReader, PlainReader, SortingReader, ThinkTags, tags_of
from tokenwright.serve.service.template_messages import TemplateMessages, without_oldest
from tokenwright.serve.service.thinking import ThoughtGate, TokenMasks, closing, switches_of, variables_of
from tokenwright.serve.service.tool_forms.channels import CHANNEL, CHANNELS, LAST, MARKS, ChannelReader, uses_channels
from tokenwright.serve.service.tool_forms.probing import probed
from tokenwright.serve.service.tools import ModelTools, callable_tools
from tokenwright.serve.service.types import PRIORITIES, GenerationRequest

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.llm.llm import LLM

_SLOW = ("grammar", "logit_bias", "stop", "stop_ids", "dry_multiplier")  # each may be long
MOST_LOGPROBS = 2**20  # of one reply, of all its texts and of the prompt
ANY_OBJECT = Grammar.json_schema({"type": "object"})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request of the engine, with what its answer needs.

    text: the prompt as text, for display. reader: makes the reader of one text. at_end: its texts are only known at the
    end. truncated: tokens that were cut off the prompt.
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
        self._source = "" if template is None else template.tools_source
        self._think_tags = tags_of(self._source)
        self._switches = switches_of(self._source)
        self._adapted = TemplateMessages(self._source)
        control, special = llm.tokenizer.control.ids, llm.tokenizer.special_ids
        named = {name: at for name, at in control.items() if at in special}
        self._channels = uses_channels(self._source, named)
        form = CHANNELS if self._channels else None
        facts = probed(self._printed, self._source, form) if template is not None else None
        self._tools = None if facts is None else ModelTools(facts, named, tuple(llm.loaded.eos_ids))
        tags = self._think_tags
        marks = MARKS if self._channels else () if tags is None else (tags.start, tags.end)
        steering = {name: named[name] for name in marks if name in named}
        steering |= {} if self._tools is None or self._channels else self._tools.marks
        self._marks: Mapping[int, str] = {at: name for name, at in steering.items()}
        self._masks = TokenMasks(llm.tokenizer, llm.loaded.config.vocab_size, llm.loaded.eos_ids)
        llm.check_length("")  # what these two compute once takes a while
        llm.prepare([0], llm.sampling(max_tokens=0))

    def _printed(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """What the template prints for a conversation. Raises RequestError."""
        return self._llm.template.render(messages, False, tools=tools).text

    @property
    def thinks(self) -> bool:
        """Whether the model's template has think tags, or channels."""
        return self._think_tags is not None or self._channels

    @property
    def calls(self) -> bool:
        """Whether the model's template knows of tools."""
        return self._tools is not None and self._tools.facts.own

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
        short = wanted.prompt is not None and len(wanted.prompt) + len(wanted.prediction) <= self._quick_prompt
        given = wanted.overrides
        return short and not (wanted.gap or wanted.json_object or any(given.get(name) for name in _SLOW))

    def prepare(self, wanted: GenerationRequest) -> Prepared:
        """Raises RequestError, ContextError."""
        ids, text = self.prompt(wanted)
        truncated = max(0, len(ids) - (wanted.truncate_prompt_tokens or len(ids)))
        ids = ids[truncated:]
        adapter = wanted.model if wanted.model in self._llm.loaded.adapters else None
        if wanted.embed and adapter:
            raise RequestError(f"{adapter} is an adapter, and embeddings are those of the model alone; name the model")
        if wanted.embed:
            return Prepared(self._llm.prepare_embedding(ids), text, PlainReader, False, truncated)
        params = self._llm.sampling(**self._overrides(wanted, text, len(ids)))
        _check_logprobs(params, len(ids), wanted.together)
        at_end = params.beams > 1 or params.choices > params.n
        if at_end and wanted.streamed:
            name = "beams" if params.beams > 1 else "best_of"
            raise RequestError(f"{name} cannot be streamed: its texts are known at the end alone; leave stream out")
        shared = {"salt": wanted.caller.salt, "prediction": wanted.prediction}
        request = self._llm.prepare(ids, params, adapter=adapter, **shared)
        tags = self._tags(wanted, text, params)
        if tags is not None:
            self._let_think(request, wanted.thinking_budget, tags)
        return Prepared(request, text, self._reader(wanted, text, tags), at_end, truncated)

    def _let_think(self, request: Request, budget: int | None, tags: ThinkTags) -> None:
        """Let grammar and stop strings of a request that was just made begin after its thoughts, and limit these."""
        checker, params = request.stop_checker, request.params
        held = budget is not None or checker_holds(params)
        if held and isinstance(checker, TextStopChecker):  # beams are ranked by their own tokens
            checker.constraint = ThoughtGate(checker.constraint, tags, self._llm.tokenizer, self._masks, budget)

    def prompt(self, wanted: GenerationRequest, *, add_special: bool = True) -> tuple[Sequence[int], str]:
        """The ids of the prompt, uncut, and its text. Raises RequestError.

        add_special: with the tokens that the tokenizer adds to a text.
        """
        if wanted.drop_oldest and wanted.messages is not None:
            wanted = self._shortened(wanted)
        self._check_lengths(wanted)
        if (gap := wanted.gap) is not None:
            return self._infill.ids(str(wanted.prompt), gap.suffix, gap.files, gap.begun), str(wanted.prompt)
        if wanted.prompt is not None:
            return self._ids(wanted.prompt, add_special), wanted.prompt if isinstance(wanted.prompt, str) else ""
        return self._rendered(wanted)

    def _shortened(self, wanted: GenerationRequest) -> GenerationRequest:
        """The request without its oldest messages, so that there is room for an answer. Raises RequestError."""
        context = min(self._llm.context, wanted.context or self._llm.context)
        most = context - min(wanted.overrides.get("max_tokens") or 1, context // 2)
        while True:
            assert wanted.messages is not None, "only a conversation is shortened"
            texts = [str(one.get("content") or "") for one in wanted.messages]
            least = sum(map(self._llm.tokenizer.least_tokens, texts))
            length = least if least > most else len(self._rendered(wanted)[0])
            messages = without_oldest(wanted.messages, 1 - most / length) if length > most else []
            if not messages:
                return wanted
            wanted = replace(wanted, messages=messages)

    def _rendered(self, wanted: GenerationRequest) -> tuple[Sequence[int], str]:
        """The ids of a conversation, and its text. Raises RequestError."""
        assert wanted.messages is not None, "`check` has seen to it"
        variables = variables_of(wanted.thinking, wanted.variables, self._switches)
        messages: Sequence[Mapping[str, Any]] = self._adapted.known(wanted.messages)
        tools = None
        if self._tools is not None:
            given = wanted.tools if _may_call(wanted) else ()
            messages, tools = self._tools.messages(messages, given), self._tools.declared(given)
        if wanted.continue_last:
            ids, text = self._continued(messages, tools, variables)
        else:
            template, begins = self._llm.template, wanted.generation_prompt
            rendered = template.render(messages, begins, tools=tools, variables=variables)
            ids, text = rendered.ids, rendered.text
            if wanted.thinking is False and self._think_tags is not None and not self._switches and begins:
                more = closing(text, self._think_tags)
                ids, text = (*ids, *self._llm.tokenizer.encode(more, add_special=False)), text + more
        return ids, text

    def _check_lengths(self, wanted: GenerationRequest) -> None:
        """Raises RequestError for a text that by its length cannot fit the context, before it takes time."""
        if wanted.truncate_prompt_tokens is None:
            contents = [message.get("content") for message in wanted.messages or ()]
            gap = () if wanted.gap is None else (wanted.gap.suffix, *(text for _, text in wanted.gap.files))
            for text in (wanted.prompt, *gap, *contents):
                if isinstance(text, str):
                    self._llm.check_length(text)

    def _ids(self, prompt: str | Sequence[int], add_special: bool) -> list[int]:
        """The token ids of a prompt. Raises RequestError."""
        if not isinstance(prompt, str):
            return list(prompt)
        return self._llm.tokenizer.encode(prompt, add_special=add_special)

    def _continued(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> tuple[Sequence[int], str]:
        """The prompt up to the end of the last message's text, which is an answer: its thoughts are over."""
        template, last = self._llm.template, messages[-1]
        if len(messages) < 2:
            raise RequestError("messages: an answer can be continued only after another message")
        start = template.render(messages[:-1], tools=tools, variables=variables)
        own = str(last.get("content") or "").rstrip()
        ids, text = [*start.ids], start.text
        tags, encode = self._think_tags or ThinkTags(), self._llm.tokenizer.encode
        thought = str(last.get("reasoning_content") or "") if self.thinks else ""
        if thought or text.rstrip().endswith(tags.start):
            opening = "" if text.rstrip().endswith(tags.start) else f"{tags.start}\n"
            ids += encode(opening, add_special=False) if opening else []
            ids += encode(thought, add_special=False, parse_special=False) if thought else []
            ids += encode(f"\n{tags.end}\n\n", add_special=False)
            text += f"{opening}{thought}\n{tags.end}\n\n"
        return [*ids, *encode(own, add_special=False, parse_special=False)], text + own

    def _overrides(self, wanted: GenerationRequest, text: str, prompt: int) -> dict[str, Any]:
        found = {name: value for name, value in wanted.overrides.items() if value is not None}
        if wanted.json_object:
            found["grammar"] = ANY_OBJECT
        if _may_call(wanted) and self._tools is not None:
            answer = _answer_rule(found["grammar"]) if "grammar" in found else None
            found["grammar"] = self._tools.grammar(wanted, text, answer, self._channels)
        elif self._channels and wanted.messages is not None and self._tools is not None and "grammar" in found:
            found["grammar"] = self._tools.grammar(wanted, text, _answer_rule(found["grammar"]), True)
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

    def _tags(self, wanted: GenerationRequest, text: str, params: SamplingParams) -> ThinkTags | None:
        """The tags of the answer's thoughts; None: it has none."""
        if self._channels and wanted.messages is not None and params.grammar is None:
            return ThinkTags(CHANNEL, LAST, opened=True)  # for stop strings alone
        if self._think_tags is None or wanted.messages is None:
            return None
        opened = text.rstrip().endswith(self._think_tags.start)
        if opened and params.beams > 1 and params.grammar is not None:
            return None  # beams follow the grammar from the first token on
        return replace(self._think_tags, opened=opened)

    def _reader(self, wanted: GenerationRequest, text: str, tags: ThinkTags | None) -> NewReader:
        tools, marks = self._tools if _may_call(wanted) else None, self._marks
        if self._channels and wanted.messages is not None:
            names = [tool.name for tool in callable_tools(wanted)] if _may_call(wanted) else []
            return lambda: ChannelReader(names, marks, wanted.reasoning)
        tags = tags if wanted.reasoning else None
        if tags is None and tools is None:
            return PlainReader
        return lambda: SortingReader(tags, None if tools is None else tools.reader(wanted, text, marks), marks)


def checker_holds(params: SamplingParams) -> bool:
    """Whether a text is held to anything that begins after its thoughts."""
    return params.grammar is not None or bool(params.stop)


def _may_call(wanted: GenerationRequest) -> bool:
    return bool(wanted.tools) and wanted.tool_choice != "none"


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


def _answer_rule(grammar: Grammar) -> str:
    """The rule of an answer beside tools. Raises RequestError for a grammar that is no JSON schema."""
    if grammar.kind != "json_schema":
        raise RequestError(f"tools and a grammar of the kind {grammar.kind} cannot be combined; give a JSON schema")
    return schema_rule(grammar.text)
