"""Turns a `GenerationRequest` into an engine request: renders, tokenises and compiles it, in threads.

`Preparation` serves prompts without a grammar in order of arrival; reads leave one thread free for them. API keys share
the grammar workers fairly, so that no request waits for the grammars of another key.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenwright.checks import check_whole
from tokenwright.decode.grammars.grammar_trials import WORKERS, Budget
from tokenwright.engine import FinishReason, Grammar, Request, SamplingParams
from tokenwright.engine.pictures import PictureSpan
from tokenwright.engine.pins import Mark, Retention
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import ContextError, RequestError
from tokenwright.llm.asking import UNKNOWN, cached_model
from tokenwright.llm.chat.answer_reader import AnswerReader
from tokenwright.llm.chat.chat_options import check_chat
from tokenwright.llm.chat.chat_processor import ClientSchemas
from tokenwright.llm.chat.output_parser import NewReader, PlainReader, ThinkTags
from tokenwright.llm.chat.seen_pictures import moved
from tokenwright.llm.chat.template_messages import without_oldest
from tokenwright.llm.input_processor import QUICK_PROMPT, RequestOptions
from tokenwright.llm.outputs import Piece
from tokenwright.llm.prompts.cause import FindParts
from tokenwright.llm.prompts.memory import PromptTerms
from tokenwright.llm.prompts.provenance import token_after
from tokenwright.llm.prompts.watch import PromptOrigin
from tokenwright.llm.prompts.written import with_written_ids
from tokenwright.llm.scoring import check_pooling
from tokenwright.serve.service.admission import Admission, retrieved
from tokenwright.serve.service.next_turns import common_beginning, next_turns
from tokenwright.serve.service.types import ENDING, PRIORITIES, Deadline, GenerationRequest, NotReady
from tokenwright.text import Rendered
from tokenwright.text.fill_in_middle import Infill
from tokenwright.text.messages import text_of

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM

_SLOW = ("grammar", "logit_bias", "stop", "stop_ids", "dry_multiplier", "bad_words", "allowed_ids")  # each may be long
MOST_LOGPROBS = 2**20  # of one reply: of its texts and of the prompt
ANY_OBJECT = Grammar.json_schema({"type": "object"})


@dataclass(frozen=True, slots=True)
class Prepared:
    """An engine request, and the reader of its answer."""

    request: Request
    text: str
    reader: NewReader
    at_end: bool  # the texts are known only when the request ends
    truncated: int  # tokens cut off the prompt
    loosened: tuple[str, ...] = ()  # parts of the request that the grammar cannot enforce
    origin: PromptOrigin = UNKNOWN
    wanted: GenerationRequest | None = None  # if a next turn can be prepared


class Prompt(NamedTuple):
    ids: Sequence[int]
    text: str
    parts: FindParts = tuple
    marks: tuple[Mark, ...] = ()  # cache breakpoints
    pictures: tuple[PictureSpan, ...] = ()

    def cut(self, tokens: int) -> "Prompt":
        """The prompt without its first tokens. Raises RequestError if it has pictures."""
        if tokens and self.pictures:
            raise RequestError("truncate_prompt_tokens cuts texts, and the prompt has pictures; leave it out")
        return Prompt(self.ids[tokens:], self.text) if tokens else self


def check(wanted: GenerationRequest) -> None:
    """Raises RequestError for a request that no model can serve."""
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
    check_chat(wanted)


class Preprocessor:
    """Prepares the requests of one model. Thread-safe. spare: next turns wait for an idle machine."""

    def __init__(self, llm: "LLM", spare: bool = True) -> None:
        engine = llm.llm_engine
        self._spare = spare
        self.chat = llm.conversations
        self._engine, self._inputs = engine, engine.inputs
        self._tokenizer, self._context = engine.facts.tokenizer, engine.context
        self._adapters = engine.prepared.adapters
        self._infill = Infill(self._tokenizer)
        self._most = engine.pool.longest(engine.context, engine.options.token_budget)
        self._model = cached_model(engine)
        self._inputs.check_length("")  # the first calls of these are slow
        self._inputs.build([0], self._inputs.sampling(max_tokens=0))

    def check_prompt(self, wanted: GenerationRequest) -> None:
        """Raises RequestError, ContextError at once for a prompt that cannot fit."""
        prompt = wanted.prompt
        if prompt is None or wanted.truncate_prompt_tokens is not None:
            return
        if isinstance(prompt, str):
            self._inputs.check_length(prompt)
        elif len(prompt) > self._context:
            raise ContextError(len(prompt), self._context)

    def quick(self, wanted: GenerationRequest) -> bool:
        """Whether `prepare` takes less time than a thread switch, for a short prompt without constraints."""
        short = wanted.prompt is not None and len(wanted.prompt) + len(wanted.prediction) <= QUICK_PROMPT
        given = wanted.overrides
        return short and not (wanted.gap or wanted.json_object or any(given.get(name) for name in _SLOW))

    def constrained(self, wanted: GenerationRequest) -> bool:
        return bool(wanted.json_object or wanted.overrides.get("grammar") or wanted.tools)

    def prepare(self, wanted: GenerationRequest, budget: Budget | None = None) -> Prepared:
        """Prepare a request. budget: for all its schemas and grammars. Raises RequestError, ContextError."""
        budget = budget or Budget()
        shortened = self._shortened(wanted) if wanted.drop_oldest and wanted.messages is not None else wanted
        edited, wanted = wanted.edited or shortened is not wanted, shortened
        prompt = self._prompt(wanted)
        truncated = max(0, len(prompt.ids) - (wanted.truncate_prompt_tokens or len(prompt.ids)))
        prompt = prompt.cut(truncated)
        if wanted.embed:
            return self._embedding(wanted, prompt, truncated)
        answer = ANY_OBJECT if wanted.json_object else wanted.overrides.get("grammar")
        schemas = self.chat.schemas(wanted, answer, budget)
        request, tags = self._build(wanted, prompt, schemas, budget, has_form=answer is not None)
        at_end, left_out = _at_end(request.params), schemas.left_out
        if wanted.shows_special and at_end:  # texts known only at the end have no places for these
            wanted, left_out = replace(wanted, shows_special=False), [*left_out, "skip_special_tokens"]
        reader = self.chat.reader(wanted, prompt.text, tags)
        changed = edited or truncated > 0
        terms = replace(_terms(wanted), settings=self.chat.settings(wanted), edited=changed)
        origin = PromptOrigin(terms, prompt.parts, wanted.identity)
        next_turn = None if changed or not _has_next_turn(wanted) else wanted
        loosened = tuple(dict.fromkeys(left_out))
        return Prepared(request, prompt.text, reader, at_end, truncated, loosened, origin, next_turn)

    def _embedding(self, wanted: GenerationRequest, prompt: Prompt, truncated: int) -> Prepared:
        if adapter := self._adapter(wanted):
            raise RequestError(f"{adapter} is an adapter, and adapters compute no embeddings; name the model itself")
        check_pooling(self._engine.facts.pooling)
        return Prepared(self._inputs.embedding(prompt.ids), prompt.text, PlainReader, False, truncated)

    def _build(
        self, wanted: GenerationRequest, prompt: Prompt, schemas: ClientSchemas, budget: Budget, *, has_form: bool
    ) -> tuple[Request, ThinkTags | None]:
        """Build the engine's request. `loosen` ends the loop: it drops a schema that fails, or raises its error."""
        salt = wanted.caller.salt
        options = RequestOptions(
            salt=salt,
            adapter=self._adapter(wanted),
            prediction=wanted.prediction,
            speculate=wanted.speculate,
            retention=Retention(prompt.marks, salt, wanted.session, wanted.cache_marked_only, wanted.session_ends),
            budget=budget,
            pictures=prompt.pictures,
        )
        # A grammar of channels cannot heed ignore_eos.
        free = not has_form and wanted.overrides.get("ignore_eos") and not wanted.may_call
        while True:
            grammar = None if free else self.chat.grammar(wanted, prompt.text, schemas)
            params = self._params(wanted, len(prompt.ids), grammar)
            tags = self.chat.tags(wanted, prompt.text, params)
            thoughts = None if tags is None else tags.thoughts(wanted.thinking_budget)
            try:
                return self._inputs.build(prompt.ids, params, replace(options, thoughts=thoughts)), tags
            except RequestError as error:
                schemas.loosen(error)

    def warm_next_turn(
        self, prepared: Prepared, pieces: Sequence[Piece], reason: FinishReason | None, name: str
    ) -> None:
        """Compute the beginning of the prompt that follows the answer `name`, of these pieces."""
        wanted, engine, request = prepared.wanted, self._engine, prepared.request
        if wanted is None or (record := engine.prompts.named(wanted.caller.key, name)) is None:
            return
        answer = AnswerReader(prepared.reader).fields(pieces, reason)
        prompts = [self._prompt(one) for one in next_turns(wanted, answer)]
        ids, pictures = common_beginning(one.ids for one in prompts), prompts[0].pictures if prompts else ()
        ids = ids[: min((one.start for one in pictures if one.stop > len(ids)), default=len(ids))]
        rules = WarmRules(record.ids.tolist(), computed=partial(engine.prompts.warm, record), spare=self._spare)
        if ids:
            seen = tuple(one for one in pictures if one.stop <= len(ids))
            params = SamplingParams(max_tokens=0)
            following = Request((*ids, ids[-1]), params, salt=request.salt, adapter=request.adapter, pictures=seen)
            engine.warm(following, rules)

    def _params(self, wanted: GenerationRequest, prompt: int, grammar: Grammar | None) -> SamplingParams:
        params = self._inputs.sampling(**self._overrides(wanted, prompt), grammar=grammar)
        _check_logprobs(params, prompt, wanted.together)
        if _at_end(params) and wanted.streamed:
            name = "beams" if params.beams > 1 else "best_of"
            raise RequestError(f"{name} cannot be streamed: its texts are known only at the end; leave stream out")
        return params

    def prompt(self, wanted: GenerationRequest, *, add_special: bool = True) -> Prompt:
        """The whole prompt. add_special: add the tokenizer's own tokens to a text. Raises RequestError."""
        if wanted.drop_oldest and wanted.messages is not None:
            wanted = self._shortened(wanted)
        return self._prompt(wanted, add_special=add_special)

    def _prompt(self, wanted: GenerationRequest, *, add_special: bool = True) -> Prompt:
        self._check_lengths(wanted)
        if (gap := wanted.gap) is not None:
            ids = self._infill.ids(str(wanted.prompt), gap.suffix, gap.files, gap.begun)
            return Prompt(ids, str(wanted.prompt))
        if wanted.prompt is not None:
            text = wanted.prompt if isinstance(wanted.prompt, str) else ""
            return Prompt(self._ids(wanted.prompt, add_special and wanted.add_special), text)
        rendered = self._resumed(wanted, self.chat.rendered(wanted))
        marks = {
            at: ttl_s
            for message, offset, ttl_s in wanted.cache_marks
            if (at := token_after(self._tokenizer, rendered, message, offset))
        }
        sorted_marks = tuple(Mark(at, marks[at]) for at in sorted(marks))
        parts = partial(self.chat.parts, wanted, rendered)
        return Prompt(rendered.ids, rendered.text, parts, sorted_marks, rendered.pictures)

    def _resumed(self, wanted: GenerationRequest, rendered: Rendered) -> Rendered:
        """The prompt with earlier answers in the token ids that were generated, if these fit the context."""
        adapter = self._adapter(wanted)
        number = 0 if adapter is None else self._engine.prepared.number(adapter)
        terms = replace(_terms(wanted), model=f"{self._model} {number}")
        resumed = with_written_ids(rendered, terms, self._engine.prompts, self._tokenizer)
        return rendered if resumed is rendered or len(resumed.ids) > self._context else moved(resumed, rendered)

    def _adapter(self, wanted: GenerationRequest) -> str | None:
        return wanted.model if wanted.model in self._adapters else None

    def _shortened(self, wanted: GenerationRequest) -> GenerationRequest:
        """The request without its oldest messages, so that an answer fits; renders a few times only."""
        context = min(self._context, wanted.context or self._context)
        most = context - min(wanted.overrides.get("max_tokens") or 1, context // 2)
        rendered = 0
        while True:
            assert wanted.messages is not None, "only a conversation is shortened"
            texts = [text_of(one.get("content")) for one in wanted.messages]
            length = len(texts) + sum(map(self._tokenizer.least_tokens, texts))  # each message has a control token
            if length <= most:
                length, rendered = len(self.chat.rendered(wanted).ids), rendered + 1
            share = max(1 - most / length, 0.5 if rendered > 1 else 0)
            messages = without_oldest(wanted.messages, share) if length > most else []
            if not messages:
                return wanted
            wanted = replace(wanted, messages=messages)

    def _check_lengths(self, wanted: GenerationRequest) -> None:
        """Raises RequestError, before tokenising, for a text too long for the context."""
        if wanted.truncate_prompt_tokens is None:
            contents = [text_of(message.get("content")) for message in wanted.messages or ()]
            gap = () if wanted.gap is None else (wanted.gap.suffix, *(text for _, text in wanted.gap.files))
            for text in (wanted.prompt, *gap, *contents):
                if isinstance(text, str):
                    self._inputs.check_length(text)

    def _ids(self, prompt: str | Sequence[int], add_special: bool) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return self._tokenizer.encode(prompt, add_special=add_special)

    def _overrides(self, wanted: GenerationRequest, prompt: int) -> dict[str, Any]:
        given = {name: value for name, value in wanted.overrides.items() if value is not None and name != "grammar"}
        if wanted.gap is not None and not given.get("ignore_eos"):
            given["stop_ids"] = (*given.get("stop_ids", ()), *self._infill.ends)
        if wanted.deadline_s is not None:
            given["max_seconds"] = min(wanted.deadline_s, given.get("max_seconds", wanted.deadline_s))
        if prompt > self._context:
            raise ContextError(prompt, self._context)
        given.setdefault("max_tokens", max(0, self._most - prompt))
        if wanted.context is not None:
            if prompt > wanted.context:
                limit = f"the request allows {wanted.context} for prompt and answer (num_ctx)"
                raise RequestError(f"the prompt has {prompt} tokens, and {limit}; raise it, or shorten the prompt")
            given["max_tokens"] = min(given["max_tokens"], wanted.context - prompt)
        return given


def _terms(wanted: GenerationRequest) -> PromptTerms:
    session, shared = wanted.session, wanted.session_shared
    return PromptTerms(wanted.caller.key, session=session, shared=shared, previous=wanted.compared)


def _has_next_turn(wanted: GenerationRequest) -> bool:
    ends_turn = wanted.messages is not None and wanted.generation_prompt and not wanted.continue_last
    return ends_turn and not (wanted.session_ends or wanted.cache_marked_only)


def _at_end(params: SamplingParams) -> bool:
    return params.beams > 1 or params.choices > params.n


def _check_logprobs(params: SamplingParams, prompt: int, together: int) -> None:
    """Raises RequestError if a reply of `together` requests could have too many log-probabilities for memory."""
    count = 0
    if params.logprobs is not None:
        count += max(params.choices, params.beams) * params.max_tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        count += prompt * (1 + params.prompt_logprobs)
    if count * together > MOST_LOGPROBS:
        allowed = f"{MOST_LOGPROBS:,} are allowed; lower max_tokens, n, or their number for each token"
        raise RequestError(f"logprobs: the reply may have {count * together:,} log-probabilities, and {allowed}")


T = TypeVar("T")


class Preparation:
    """The threads that render, tokenise and compile. queue: requests that may wait. keys: API keys that share them."""

    def __init__(self, threads: int, queue: int, keys: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "tokenwright requests")
        self._compilers = ThreadPoolExecutor(WORKERS, "tokenwright grammars")
        self.reading = Admission(max(1, threads - 1), queue, keys)
        self._compiling = Admission(WORKERS, queue, keys)

    async def in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def read(self, key: str, function: Callable[[], T], deadline_s: float | None) -> T:
        """Run a function as `in_thread` does, in a queue with other reads. Raises Busy and Late."""
        async with Deadline(deadline_s).limit():
            slot = await self.reading.enter(key, 1, 0)
        work = asyncio.ensure_future(self.in_thread(function))
        work.add_done_callback(lambda _: slot.leave())
        work.add_done_callback(retrieved)
        return await asyncio.shield(work)  # the thread, and so its slot, stays in use after the client has gone

    async def prepared(self, preparer: Preprocessor, wanted: GenerationRequest) -> Prepared:
        """Prepare a request. If its client goes, no further grammar is compiled. Raises RequestError."""
        if preparer.quick(wanted):
            return preparer.prepare(wanted)
        if not preparer.constrained(wanted):
            return await self.in_thread(lambda: preparer.prepare(wanted))
        async with Deadline(wanted.deadline_s).limit():
            slot = await self._compiling.enter(wanted.caller.key, 1, wanted.priority, unlimited=True)
        budget = Budget()
        work = asyncio.get_running_loop().run_in_executor(self._compilers, preparer.prepare, wanted, budget)
        work.add_done_callback(lambda _: slot.leave())
        work.add_done_callback(retrieved)
        try:
            return await asyncio.shield(work)
        finally:
            budget.cancelled = True

    def stop(self) -> None:
        for queue in (self.reading, self._compiling):
            queue.close(NotReady(ENDING))

    def close(self) -> None:
        for threads in (self._threads, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)
