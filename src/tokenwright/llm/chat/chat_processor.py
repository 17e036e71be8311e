"""Makes the prompts of one model's conversations, and the grammars and readers of its answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenwright.decode.grammars.grammar import Grammars
from tokenwright.decode.grammars.grammar_kinds import schema_rule
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.engine import Grammar, SamplingParams
from tokenwright.errors import RequestError
from tokenwright.llm.chat import output_parser
from tokenwright.llm.chat.chat_options import SWITCHES, ChatRequest, Tool, read_arguments
from tokenwright.llm.chat.seen_pictures import Eyes, laid_out
from tokenwright.llm.chat.template_messages import FILLERS, TemplateMessages, TemplateOrder, thought_of
from tokenwright.llm.chat.thinking import closing, switches_of, variables_of
from tokenwright.llm.chat.tool_forms import channels
from tokenwright.llm.chat.tool_forms.channels import channel_grammar
from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.lark import LarkRules
from tokenwright.llm.chat.tool_forms.probing import TemplateTools, as_template_reads, declared, probed
from tokenwright.llm.chat.tool_forms.reading import FormReader
from tokenwright.llm.prompts.provenance import PromptPart, numbered, own_spans, parts_of, plain
from tokenwright.sampling_params import MOST_GRAMMAR
from tokenwright.text import ChatTemplate, PictureTexts, Rendered
from tokenwright.text.messages import text_of
from tokenwright.text.renderer import TextSpan

if TYPE_CHECKING:
    from tokenwright.llm.model import PreparedModel


def callable_tools(wanted: ChatRequest) -> list[Tool]:
    allowed = None if wanted.allowed_tools is None else frozenset(wanted.allowed_tools)
    return [tool for tool in wanted.tools if allowed is None or tool.name in allowed]


@dataclass(frozen=True, slots=True)
class ModelTools:
    """How one model calls tools. `special` has the ids of special tokens by name, `ends` those that end a text."""

    facts: TemplateTools
    special: Mapping[str, int]
    ends: Sequence[int]

    @property
    def form(self) -> ToolForm:
        return self.facts.form

    @property
    def marks(self) -> dict[str, int]:
        """The special tokens that calls are written with."""
        texts = tuple(self.form.literals)
        return {name: at for name, at in self.special.items() if any(name in text for text in texts)}

    def declared(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        return [declared(tool) for tool in tools] if tools and self.facts.declares else None

    def opened(self, prompt: str) -> bool:
        return bool(self.form.spoken) and prompt.endswith(self.form.mark)

    def grammar(self, wanted: ChatRequest, prompt: str, answer: str | None, channels: bool) -> Grammar:
        """The grammar of an answer; `answer` is the rule of one without calls. Raises RequestError."""
        tools = callable_tools(wanted)
        if channels:
            begun = wanted.continue_last
            return channel_grammar(tools, wanted.tool_choice, self.special, self.ends, answer, begun=begun)
        parallel, opened = wanted.parallel_tool_calls, self.opened(prompt)
        return self.form.grammar(tools, wanted.tool_choice, parallel, self.marks, answer, ends=self.ends, opened=opened)

    def silence(self) -> Grammar | None:
        """The grammar of an answer that must not call; None: calls have no mark to ban."""
        lark, form = LarkRules(self.marks, self.ends), self.form
        mark = "" if self.facts.unread else form.mark or (form.tag if form.tag in self.special else "")
        return Grammar.lark(lark.written(lark.without(mark))) if mark else None

    def reader(self, wanted: ChatRequest, prompt: str, marks: Mapping[int, str]) -> output_parser.CallReader:
        form = self.form.with_stand_ins(output_parser.stand_ins(marks))
        return FormReader(form, callable_tools(wanted), self.opened(prompt))


@dataclass(slots=True)
class _ClientSchema:
    """One schema: the client's, in JSON, and the enforced one (`held`). Errors name owner and part."""

    name: str
    owner: str
    part: str
    strict: bool
    given: str
    held: Grammar
    left_out: bool = False


class ClientSchemas:
    """The schemas of a request, for its grammar. Raises RequestError for a strict one that cannot be enforced whole."""

    def __init__(
        self, grammars: Callable[[], Grammars], budget: Budget, tools: Sequence[Tool], answer: Grammar | None
    ) -> None:
        self._made, self._budget = grammars, budget
        self._tools, self._answer = tools, answer
        self._losses = 0
        self.left_out: list[str] = []  # not enforced: "tools.search.uniqueItems", or "schema" for a whole one
        self._of_tools = [
            self._held(f"tools.{tool.name}", f"tools: {tool.name}", "parameters", tool.strict, _arguments(tool))
            for tool in tools
        ]
        self._of_answer = None
        if answer is not None and answer.client:
            owner = answer.strict or "the form of the answer"
            self._of_answer = self._held("schema", owner, "schema", bool(answer.strict), answer)

    @cached_property
    def _grammars(self) -> Grammars:
        return self._made()

    @property
    def tools(self) -> list[Tool]:
        pairs = zip(self._tools, self._of_tools, strict=True)
        return [replace(tool, parameters=json.loads(schema.held.text)) for tool, schema in pairs]

    @property
    def answer(self) -> Grammar | None:
        return self._answer if self._of_answer is None else self._of_answer.held

    def loosen(self, error: RequestError) -> None:
        """Leave out the schemas that no grammar can hold; all if each can be held, or at the second call.

        Raises RequestError for an invalid or strict schema, and `error`, the grammar's, if nothing is left to drop.
        """
        self._losses += 1
        schemas = [one for one in (*self._of_tools, self._of_answer) if one is not None and not one.left_out]
        failing = []
        if self._losses == 1:
            failing = [one for one in schemas if self._grammars.complaint(one.held, self._budget)]
        for one in failing or schemas:
            if place := self._grammars.mistake(one.given, self._budget):
                raise RequestError(f"{one.owner}: {place} of its {one.part} is wrong: {error}") from None
            if one.strict:
                raise RequestError(f"{one.owner} is strict, and its {one.part} cannot be enforced: {error}") from None
            self._leave_out(one)
        if not schemas:
            raise error

    def _held(self, name: str, owner: str, part: str, strict: bool, given: Grammar) -> _ClientSchema:
        """The enforceable part of a client's schema. Raises RequestError if it is strict and that is not all."""
        whole = name if name == part else f"{name}.{part}"
        schema = _ClientSchema(whole, owner, part, strict, given.text, replace(given, client=False))
        found = self._grammars.enforceable(given.text, self._budget)
        if found is not None and len(found[0]) > MOST_GRAMMAR:  # with its references written out
            found = None
        if strict and (found is None or found[1]):
            place = f"its {part}" if found is None else found[1][0]
            raise RequestError(
                f"{owner} is strict, and {place} cannot be enforced here; leave it out, or set strict to false"
            )
        if found is None:
            self._leave_out(schema)
        else:
            schema.held = replace(schema.held, text=found[0])
            self.left_out += [f"{name}.{place.rpartition('.')[2]}" for place in found[1]]
        return schema

    def _leave_out(self, schema: _ClientSchema) -> None:
        kind = json.loads(schema.given).get("type")
        loose = {"type": kind} if isinstance(kind, str) else {}
        schema.held, schema.left_out = replace(Grammar.json_schema(loose), whitespace=schema.held.whitespace), True
        self.left_out.append(schema.name)


def _arguments(tool: Tool) -> Grammar:
    try:
        return Grammar("json_schema", json.dumps(tool.parameters), client=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tools: the parameters of {tool.name} cannot be written as JSON: {error}") from None


class ChatProcessor:
    """Prepares a model's conversations and reads its answers, for LLM and the server. Thread-safe."""

    def __init__(self, loaded: "PreparedModel") -> None:
        self._loaded = loaded
        self._tokenizer = loaded.facts.tokenizer
        self._eyes = Eyes(loaded)
        source = "" if loaded.template is None else loaded.template.tools_source
        self.think_tags = next((tags for tags in output_parser.TAGS if tags.end in source), None)
        self._switches = switches_of(source)
        self._adapted = TemplateMessages(source)
        self._order = TemplateOrder(lambda messages: self._printed(messages, None))
        control, special = loaded.facts.tokenizer.control.ids, loaded.facts.tokenizer.special_ids
        named = {name: at for name, at in control.items() if at in special}
        self._channels = all(mark in source and mark in named for mark in channels.MARKS[:4])
        form = channels.CHANNELS if self._channels else None
        facts = probed(self._printed, source, form) if loaded.template is not None else None
        self.tools = None if facts is None else ModelTools(facts, named, tuple(loaded.eos_ids))
        tags = self.think_tags
        marks = channels.MARKS if self._channels else () if tags is None else (tags.start, tags.end)
        steering = {name: at for name, at in named.items() if any(name in mark for mark in marks)}
        steering |= {} if self.tools is None or self._channels else self.tools.marks
        self._marks: Mapping[int, str] = {at: name for name, at in steering.items()}
        self._special = {at: name for name, at in named.items() if at not in loaded.eos_ids}

    @property
    def _template(self) -> ChatTemplate:
        return self._loaded.template or ChatTemplate(self._tokenizer)  # which raises

    def _printed(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return self._template.render(plain(messages), False, tools=tools).text

    @property
    def thinks(self) -> bool:
        return self.think_tags is not None or self._channels

    @property
    def calls(self) -> bool:
        return self.tools is not None and self.tools.facts.own

    def rendered(self, wanted: ChatRequest, answers: Mapping[int, Sequence[int]] | None = None) -> Rendered:
        """The prompt of a conversation. answers: as in `ChatTemplate.render`. Raises RequestError."""
        assert wanted.messages is not None, "a conversation has messages"
        seen = self._eyes.look(wanted.messages)
        written: Sequence[Mapping[str, Any]] = wanted.messages if seen is None else seen.messages
        variables = variables_of(wanted.thinking, wanted.variables, self._switches)
        known = self._adapted.known(map(self._with_arguments, written))
        messages: Sequence[Mapping[str, Any]] = numbered(known)
        tools = None
        if self.tools is not None:
            given = wanted.tools if wanted.tools and wanted.may_call else ()
            messages, tools = as_template_reads(messages, self.tools.facts, given), self.tools.declared(given)
        arranged = self._order.arranged(messages)
        messages = plain(arranged)
        texts, markup = None if seen is None else seen.texts, wanted.markup
        begins = wanted.generation_prompt and not wanted.continue_last
        if wanted.continue_last:
            rendered = self._continued(messages, tools, variables, texts)
        else:
            kept = _kept(answers or {}, written, messages)
            rendered = self._template.render(
                messages, begins, markup=markup, answers=kept, tools=tools, variables=variables, pictures=texts
            )
        rendered = replace(rendered, spans=own_spans(rendered.spans, arranged))
        if seen is not None:
            rendered = laid_out(rendered, seen)
        if wanted.thinking is False and self.think_tags is not None and not self._switches and begins:
            return self._followed(rendered, closing(rendered.text, self.think_tags))
        return rendered

    def _with_arguments(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if not message.get("tool_calls") or (self.tools is not None and self.tools.facts.text_arguments):
            return message
        functions = [(one, one["function"]) for one in message["tool_calls"]]
        read = [{**one, "function": {**of, "arguments": read_arguments(of["arguments"])}} for one, of in functions]
        return {**message, "tool_calls": read}

    def _followed(self, rendered: Rendered, text: str) -> Rendered:
        ids = (*rendered.ids, *self._tokenizer.encode(text, add_special=False))
        whole = rendered.text + text
        return replace(rendered, text=whole, ids=ids, marks=(*rendered.marks, (len(ids), len(whole))))

    def settings(self, wanted: ChatRequest) -> str:
        variables = variables_of(wanted.thinking, wanted.variables, self._switches)
        return repr((wanted.thinking, sorted(variables.items(), key=str)))

    def parts(self, wanted: ChatRequest, rendered: Rendered) -> tuple[PromptPart, ...]:
        tag = self.think_tags.end if self.think_tags is not None else ""
        return parts_of(self._tokenizer, rendered, wanted.messages or (), tag)

    def _continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        pictures: PictureTexts | None,
    ) -> Rendered:
        """The prompt up to the end of the last message, an answer after its reasoning, which the model continues."""
        last = messages[-1]
        if len(messages) < 2:
            raise RequestError("messages: an answer can be continued only after another message")
        start = self._template.render(messages[:-1], tools=tools, variables=variables, pictures=pictures)
        own = text_of(last.get("content")).rstrip()
        ids, text = [*start.ids], start.text
        tags, encode = self.think_tags or output_parser.ThinkTags(), self._tokenizer.encode
        thought = thought_of(last) if self.thinks else ""
        if self._channels:
            analysis = f"{channels.CHANNEL}analysis{channels.MESSAGE}"
            before = [analysis, thought, f"{channels.END}{channels.START}assistant"] if thought else []
            for at, part in enumerate([*before, channels.LAST]):
                ids += encode(part, add_special=False, parse_special=at != 1 or not thought)
                text += part
        elif thought or text.rstrip().endswith(tags.start):
            opening = "" if text.rstrip().endswith(tags.start) else f"{tags.start}\n"
            ids += encode(opening, add_special=False) if opening else []
            ids += encode(thought, add_special=False, parse_special=False) if thought else []
            ids += encode(f"\n{tags.end}\n\n", add_special=False)
            text += f"{opening}{thought}\n{tags.end}\n\n"
        marks = [(len(ids), len(text))]
        ids += encode(own, add_special=False, parse_special=False)
        marks.append((len(ids), len(text) + len(own)))
        span = TextSpan(len(text), len(text) + len(own), len(messages) - 1, "content", 0)
        spans, marks = (*start.spans, span), [*start.marks, *marks]
        return replace(start, text=text + own, ids=tuple(ids), spans=spans, marks=tuple(marks))

    def schemas(self, wanted: ChatRequest, answer: Grammar | None, budget: Budget) -> ClientSchemas:
        """The enforceable parts of a conversation's schemas. Raises RequestError for a strict one that loses a part."""
        tools = callable_tools(wanted) if self.tools is not None and wanted.tools and wanted.may_call else []
        loaded = self._loaded
        return ClientSchemas(lambda: loaded.vocabulary.grammars(loaded.eos_ids), budget, tools, answer)

    def grammar(self, wanted: ChatRequest, prompt: str, schemas: ClientSchemas) -> Grammar | None:
        grammar = schemas.answer
        if self.tools is None:
            return grammar
        # If calls are not read, their marks may be special tokens, which a grammar of text does not allow.
        if wanted.tools and wanted.may_call and not (self.tools.facts.unread and wanted.tool_choice == "auto"):
            wanted = replace(wanted, tools=schemas.tools)
            answer = None if grammar is None else _answer_rule(grammar)
            return self.tools.grammar(wanted, prompt, answer, self._channels)
        if self._channels and wanted.messages is not None and (grammar is not None or wanted.tools):
            return self.tools.grammar(wanted, prompt, None if grammar is None else _answer_rule(grammar), True)
        return self.tools.silence() if grammar is None and wanted.tools else grammar

    def tags(self, wanted: ChatRequest, prompt: str, params: SamplingParams) -> output_parser.ThinkTags | None:
        if self._channels and wanted.continue_last:
            return None
        if self._channels and wanted.messages is not None and params.grammar is None:
            return output_parser.ThinkTags(channels.CHANNEL, channels.LAST, opened=True)  # stop strings skip reasoning
        if self.think_tags is None or wanted.messages is None:
            return None
        opened = prompt.rstrip().endswith(self.think_tags.start)
        if opened and params.beams > 1 and params.grammar is not None:
            return None  # beams follow the grammar from the first token on
        quiet = wanted.thinking is False or any(wanted.variables.get(name) is False for name in SWITCHES)
        if not opened and params.grammar is not None and quiet:
            return None  # else reasoning, which the client does not want, could take all the tokens
        return replace(self.think_tags, opened=opened)

    def reader(self, wanted: ChatRequest, prompt: str, tags: output_parser.ThinkTags | None) -> output_parser.NewReader:
        read = wanted.reads_calls and bool(wanted.tools) and wanted.may_call
        tools, marks = self.tools if read else None, self._marks
        shown = self._special if wanted.shows_special else {}
        if self._channels and wanted.messages is not None:
            names = [tool.name for tool in callable_tools(wanted)] if read else []
            return lambda: channels.ChannelReader(names, marks, wanted.reasoning, shown)
        if tags is None and tools is None and wanted.reads_calls and not shown:
            return output_parser.PlainReader

        def new() -> output_parser.SortingReader:
            calls = None if tools is None else tools.reader(wanted, prompt, marks)
            return output_parser.SortingReader(tags, calls, marks, apart=wanted.reasoning, shown=shown)

        return new


def _kept(
    answers: Mapping[int, Sequence[int]], given: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> dict[int, Sequence[int]]:
    """The ids of answers by message of the prompt. Raises RequestError for ids of another or of a joined message."""
    if not answers:
        return {}
    places = [
        [at for at, one in enumerate(each) if one.get("role") == "assistant" and not any(one is own for own in FILLERS)]
        for each in (given, messages)
    ]
    if len(places[0]) != len(places[1]):
        raise RequestError("answers cannot be kept here: the template joins messages of the assistant")
    moved = dict(zip(*places, strict=True))
    if wrong := answers.keys() - moved.keys():
        raise RequestError(f"answers has ids for message {min(wrong)}, which is no message of the assistant")
    return {moved[at]: ids for at, ids in answers.items()}


def _answer_rule(grammar: Grammar) -> str:
    if grammar.kind != "json_schema":
        raise RequestError(f"tools and a grammar of the kind {grammar.kind} cannot be combined; give a JSON schema")
    return schema_rule(grammar)
