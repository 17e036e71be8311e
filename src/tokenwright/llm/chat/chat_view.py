"""The chat methods of LLM."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenwright.checks import check_bool, hinting
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.engine import Request
from tokenwright.errors import RequestError
from tokenwright.llm.asking import UNKNOWN, afinish, finish, in_thread, transcript
from tokenwright.llm.chat.answer_reader import AnswerReader
from tokenwright.llm.chat.chat_options import AskedOptions, ChatRequest, form_of
from tokenwright.llm.engine_view import EngineView
from tokenwright.llm.input_processor import RequestOptions
from tokenwright.llm.output_processor import Stream, completions_of
from tokenwright.llm.outputs import Completion, Piece
from tokenwright.llm.prompts.memory import PromptTerms
from tokenwright.llm.prompts.watch import PromptOrigin
from tokenwright.sampling_params import SamplingParams
from tokenwright.text import Message, Rendered
from tokenwright.text.messages import check_messages, text_of


@dataclass(frozen=True, slots=True)
class _ChatPrepared:
    request: Request
    reader: AnswerReader
    origin: PromptOrigin


class ChatView(EngineView):
    def render(self, messages: Sequence[Message], markup: bool = False, **options: Any) -> Rendered:
        """The prompt of a conversation: its text, for display, and its ids.

        markup: encode control tokens that are written in the messages as such; by default they are text. options: of
        `chat`, as far as they concern the prompt, such as tools and enable_thinking.
        Raises RequestError if the model has no chat template, or if the template refuses the messages or fails.
        """
        check_bool("markup", markup)
        asked, others = AskedOptions.split({"markup": markup, **options})
        self.llm_engine.inputs.params(None, others)  # refuses unknown options
        return self._rendered(asked.request(messages), asked.answers)

    def _rendered(self, wanted: ChatRequest, answers: Mapping[int, Sequence[int]] | None = None) -> Rendered:
        assert wanted.messages is not None, "a conversation has messages"
        _ = self.template  # raises for a model without one
        for message in check_messages(wanted.messages):
            self.llm_engine.inputs.check_length(text_of(message["content"]))
        return self.conversations.rendered(wanted, answers)

    @hinting
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        enable_thinking: bool | None = None,
        thinking_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        response_format: Any = None,
        continue_final_message: bool = False,
        markup: bool = False,
        answers: Mapping[int, Sequence[int]] | None = None,
        cache: bool = True,
        salt: str = "",
        adapter: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """The model's answer in a conversation: its content, reasoning and tool_calls. A message has role and content.

        tools: OpenAI's objects, or Python functions with annotations; calls follow their schemas. tool_choice: auto,
            none, required, or the name of one.
        enable_thinking: whether the model reasons first, if it can; None: as the template says. thinking_budget: the
            most tokens of reasoning. chat_template_kwargs: further variables of the template.
        response_format: a Pydantic model, or OpenAI's object with a JSON schema, for the content; `parsed`: its value.
        continue_final_message: go on from the text of the last message, the assistant's.
        answers: the token ids of earlier answers by the index of their message, so that their cached pages are found.
        markup: as in `render`; the rest as in `generate`. Raises the errors of both.
        """
        options = AskedOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            enable_thinking=enable_thinking,
            thinking_budget=thinking_budget,
            chat_template_kwargs=chat_template_kwargs,
            response_format=response_format,
            continue_final_message=continue_final_message,
            markup=markup,
            answers=answers,
            cache=cache,
            salt=salt,
            adapter=adapter,
        )
        asked = self._asked(messages, params, options, sampling)
        [answer] = finish(self.llm_engine, [asked.request], asked.origin)
        answer.reader = asked.reader
        [completion] = completions_of([answer])
        return completion

    @hinting
    def chat_stream(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Stream:
        """The answer of `chat`, piece by piece, with its options and errors; `completion` has the rest."""
        own, sampling = AskedOptions.split(options)
        asked, engine = self._asked(messages, params, own, sampling, streamed=True), self.llm_engine
        inbox = engine.inbox()
        [handle] = engine.submit([asked.request], inbox)
        answer = transcript(engine, handle, asked.origin)
        answer.reader = asked.reader
        return Stream(handle, inbox, answer, owner=engine)

    async def achat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """`chat` for asyncio."""
        own, sampling = AskedOptions.split(options)
        asked = await in_thread(self.llm_engine, partial(self._asked, messages, params, own, sampling))
        [answer] = await afinish(self.llm_engine, [asked.request], asked.origin)
        answer.reader = asked.reader
        [completion] = completions_of([answer])
        return completion

    async def achat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Piece, None]:
        """`chat_stream` for asyncio."""
        own, sampling = AskedOptions.split(options)
        prepare = partial(self._asked, messages, params, own, sampling, streamed=True)
        asked = await in_thread(self.llm_engine, prepare)
        async with aclosing(self._apieces(asked.request, asked)) as pieces:
            async for piece in pieces:
                yield piece

    async def _apieces(self, request: Request, chat: _ChatPrepared | None = None) -> AsyncGenerator[Piece, None]:
        engine = self.llm_engine
        [handle] = engine.submit([request], engine.streams.listener())
        answer = transcript(engine, handle, UNKNOWN if chat is None else chat.origin)
        answer.reader = None if chat is None else chat.reader
        with engine.streams.open(handle, answer) as stream:
            while (pieces := await stream.pieces()) is not None:
                for piece in pieces:
                    yield piece

    def _asked(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        options: AskedOptions,
        sampling: Mapping[str, Any],
        *,
        streamed: bool = False,
    ) -> _ChatPrepared:
        wanted, chat, inputs = options.request(messages), self.conversations, self.llm_engine.inputs
        params = inputs.params(params, sampling)
        form, parse = form_of(options.response_format)
        if form is not None and params.grammar is not None:
            raise RequestError("response_format and grammar each say the form of the answer; leave one of them out")
        prompt = self._rendered(wanted, options.answers)
        schemas = chat.schemas(wanted, form or params.grammar, Budget())
        params = replace(params, grammar=chat.grammar(wanted, prompt.text, schemas))
        build = inputs.streamed if streamed else inputs.build
        tags = chat.tags(wanted, prompt.text, params)
        thoughts = None if tags is None else tags.thoughts(wanted.thinking_budget)
        how = RequestOptions(options.cache, options.salt, options.adapter, thoughts=thoughts, pictures=prompt.pictures)
        request = build(prompt.ids, params, how)
        origin = PromptOrigin(PromptTerms(settings=chat.settings(wanted)), partial(chat.parts, wanted, prompt))
        return _ChatPrepared(request, AnswerReader(chat.reader(wanted, prompt.text, tags), parse), origin)
