"""The API of llama.cpp's server: completion, infill, embeddings, tokens, templates and properties."""

from typing import TYPE_CHECKING, Any, TypedDict

from fastapi.responses import JSONResponse, Response

import tokenwright
from tokenwright.errors import RequestError
from tokenwright.serve.http.api import Api, Route
from tokenwright.serve.http.exchange import Exchange, Streamed, schema_grammar, whole
from tokenwright.serve.http.openapi import EVENTS
from tokenwright.serve.http.request_parts import thinking_fields
from tokenwright.serve.llama_cpp import bodies, replies
from tokenwright.serve.llama_cpp.bodies import DetokenizeBody, TokenizeBody
from tokenwright.serve.openai.bodies import MOST_INPUTS, ChatBody, prompts_of, read_prompts
from tokenwright.serve.openai.embeddings import embedded
from tokenwright.serve.openai.generation_request import chat_wanted, grammar, messages_of, tools_of
from tokenwright.serve.openai.replies import Problems, error_body
from tokenwright.serve.service.multi_prompt import gather
from tokenwright.serve.service.preprocess import Preprocessor, check
from tokenwright.serve.service.types import Gap, GenerationRequest

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM
    from tokenwright.text import Tokenizer


class Tokenized(TypedDict):
    """The reply of /tokenize to a prompt or messages."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenCardReply(TypedDict):
    id: int
    text: str
    special: bool


class TokenCards(TypedDict):
    """The reply of /tokenize to a text."""

    tokens: list[TokenCardReply]


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]


class TokenPieces(TypedDict):
    """The reply of /tokenize to content."""

    tokens: list[int] | list[TokenPiece]


class Detokenized(TypedDict):
    """The reply of /detokenize to tokens. Both are the text."""

    prompt: str
    content: str


class DetokenizedText(TypedDict):
    """The reply of /detokenize to ids."""

    text: str


async def tokenize(exchange: Exchange, body: TokenizeBody) -> Response:
    """The token ids of a text."""
    exchange.check_model(body.model)
    if sum(one is not None for one in (body.prompt, body.messages, body.text, body.content)) != 1:
        raise RequestError("prompt: give one of prompt, messages, content and text")
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name) is not None and body.messages is None:
            raise RequestError(f"{name} belongs to a conversation; give messages")
    if body.add_special_tokens and body.messages is not None:
        raise RequestError("add_special_tokens: the template of messages writes its own; leave it out")
    preparer = (await exchange.unless_gone(exchange.service.opened())).preparer
    found = await exchange.unless_gone(exchange.read(lambda: _read(exchange, preparer, body)))
    return await whole(lambda: found, len(found["tokens"]))


def _read(exchange: Exchange, preparer: Preprocessor, body: TokenizeBody) -> Tokenized | TokenCards | TokenPieces:
    llm = exchange.service.host.llm
    if body.content is not None:
        return _pieces(llm, body.content, body)
    wanted = GenerationRequest(
        prompt=body.prompt if body.text is None else body.text,
        messages=None if body.messages is None else messages_of(body.messages),
        tools=tools_of(exchange.about, body.tools or ()),
        **thinking_fields(None, None, None, body.chat_template_kwargs),
        continue_last=body.continue_final_message,
        generation_prompt=body.add_generation_prompt,
        caller=exchange.about.caller,
    )
    check(wanted)
    ids = preparer.prompt(wanted, add_special=body.add_special_tokens is not False).ids
    if body.text is not None:
        from tokenwright.llm.run_trace import token_cards

        cards = token_cards(llm.tokenizer, ids)
        return {"tokens": [TokenCardReply(id=one.id, text=one.text, special=one.special) for one in cards]}
    strings = [llm.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return Tokenized(count=len(ids), max_model_len=llm.context, tokens=list(ids), token_strs=strings)


def _pieces(llm: "LLM", text: str, body: TokenizeBody) -> TokenPieces:
    llm.llm_engine.inputs.check_length(text)
    ids = llm.tokenizer.encode(text, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return {"tokens": list(ids)}
    return {"tokens": [TokenPiece(id=token, piece=_piece(llm.tokenizer, token)) for token in ids]}


def _piece(tokenizer: "Tokenizer", token: int) -> str | list[int]:
    """A token's text, or its bytes if these are not whole characters."""
    data = tokenizer.token_bytes(token, skip_special=False) or b""
    whole_text = data.decode(errors="ignore").encode() == data
    return tokenizer.token_text(token) if whole_text else list(data)


async def detokenize(exchange: Exchange, body: DetokenizeBody) -> Response:
    """The text of token ids."""
    exchange.check_model(body.model)
    if (body.tokens is None) == (body.ids is None):
        raise RequestError("tokens: give one of tokens and ids")
    llm = (await exchange.service.opened()).llm
    ids = body.ids if body.tokens is None else body.tokens
    text = await exchange.unless_gone(exchange.read(lambda: llm.tokenizer.decode(ids or ())))
    reply = DetokenizedText(text=text) if body.tokens is None else Detokenized(prompt=text, content=text)
    return await whole(lambda: reply, len(text))


SHOWN = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "max_tokens")


async def complete(exchange: Exchange, body: bodies.LlamaCompletionBody) -> Response:
    """Continue one text, or several."""
    model = exchange.check_model(body.model)
    each, several = await exchange.unless_gone(_completions(exchange, body))
    if body.stream:
        return await _streamed(exchange, body, each[0])
    found = await exchange.unless_gone(gather(exchange.finished, each))

    def reply() -> Any:
        each = enumerate(found)
        host = exchange.service.host
        whole = [replies.LlamaText(body, one, host.llm, model, at).whole(last) for at, (one, [last]) in each]
        return whole if several else whole[0]

    return await whole(reply, sum(one.logprobs for one, _ in found))


async def infill(exchange: Exchange, body: bodies.InfillBody) -> Response:
    """Fill the gap between two texts."""
    model = exchange.check_model(body.model)
    overrides = await exchange.unless_gone(_overrides(exchange, body))
    files = tuple((one.filename, one.text) for one in body.input_extra or ())
    gap = Gap(body.input_suffix, files, body.prompt)
    wanted = exchange.wanted(prompt=body.input_prefix, gap=gap, overrides=overrides, streamed=body.stream)
    if body.stream:
        return await _streamed(exchange, body, wanted)
    generation, answer = await exchange.answered(wanted)
    text = replies.LlamaText(body, generation, exchange.service.host.llm, model)
    return await whole(lambda: text.whole(answer), generation.logprobs)


async def embed(exchange: Exchange, body: bodies.LlamaEmbeddingBody) -> Response:
    """The embedding of each text."""
    content = body.input if body.content is None else body.content
    if content is None or (body.input is not None and body.content is not None):
        raise RequestError("content: give one of content and input")
    given, _ = prompts_of(content, MOST_INPUTS)
    inputs = await exchange.unless_gone(read_prompts(exchange, given))
    exchange.check_model(body.model)
    found = await embedded(exchange, inputs)
    each = enumerate(found)
    return await whole(
        lambda: [replies.LlamaEmbedding(index=at, embedding=[one.tolist()]) for at, (_, one) in each],
        sum(len(vector) for _, vector in found),
    )


async def apply_template(exchange: Exchange, body: ChatBody) -> JSONResponse:
    """The prompt of a chat, as text."""
    wanted = await exchange.off_loop(lambda: chat_wanted(exchange, body))
    check(wanted)
    preparer = (await exchange.service.opened()).preparer
    text = (await exchange.unless_gone(exchange.read(lambda: preparer.prompt(wanted)))).text
    return JSONResponse(replies.AppliedTemplate(prompt=text))


async def props(exchange: Exchange) -> JSONResponse:
    """The properties of the server."""
    llm = (await exchange.service.opened()).llm
    params, tokenizer = llm.sampling(), llm.tokenizer
    ends = [tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)]
    bos, eos = ("" if token is None else tokenizer.token_text(token) for token in ends)
    return JSONResponse(
        replies.Props(
            default_generation_settings=replies.GenerationSettings(
                n_ctx=llm.context, params={name: getattr(params, name) for name in SHOWN}
            ),
            total_slots=llm.options.max_sequences,
            model_alias=exchange.service.names[0],
            model_path=exchange.service.host.name,
            chat_template=tokenizer.chat_template or "",
            bos_token=bos,
            eos_token=eos,
            modalities={"vision": False, "audio": False},
            build_info=f"tokenwright {tokenwright.__version__}",
            is_sleeping=False,
        )
    )


async def slots(exchange: Exchange) -> JSONResponse:
    """The slots of the engine, and the progress of their requests."""
    llm = (await exchange.service.opened()).llm
    places = llm.options.max_sequences
    busy = [(True, one.prompt, one.completion) for one in exchange.service.counts()[:places]]
    return JSONResponse(
        [
            replies.Slot(id=at, n_ctx=llm.context, is_processing=runs, n_prompt_tokens=prompt, n_decoded=written)
            for at, (runs, prompt, written) in enumerate([*busy, *[(False, 0, 0)] * (places - len(busy))])
        ]
    )


async def lora_adapters(exchange: Exchange) -> JSONResponse:
    """The served adapters, which requests name as their model."""
    llm = (await exchange.service.opened()).llm
    return JSONResponse(
        [replies.LoraAdapter(id=at, path=name, scale=0.0) for at, name in enumerate(llm.prepared.adapters)]
    )


async def _completions(exchange: Exchange, body: bodies.LlamaCompletionBody) -> tuple[list[GenerationRequest], bool]:
    """A request for each prompt, and whether the reply is a list. Raises what `read_prompts` raises."""
    if body.grammar and body.json_schema:
        raise RequestError("grammar and json_schema each set the answer's format; leave one of them out")
    given, several = prompts_of(body.prompt)
    if several and body.stream:
        raise RequestError("several prompts cannot be streamed; leave stream out")
    overrides = await _overrides(exchange, body)
    if body.grammar:
        overrides["grammar"] = grammar(body.grammar)
    elif body.json_schema:
        overrides["grammar"] = schema_grammar(body.json_schema, "json_schema")
    prompts = await read_prompts(exchange, given)
    fields = {"overrides": overrides, "together": len(prompts), "streamed": body.stream}
    return [exchange.wanted(prompt=one, **fields) for one in prompts], several


async def _overrides(exchange: Exchange, body: bodies.LlamaBody) -> dict[str, Any]:
    if not body.names_texts:
        return bodies.overrides_of(body, None)
    tokenizer = (await exchange.service.opened(exchange.key)).llm.tokenizer
    return await exchange.read(lambda: bodies.overrides_of(body, tokenizer))


async def _streamed(exchange: Exchange, body: bodies.LlamaBody, wanted: GenerationRequest) -> Streamed:
    generation = await exchange.started(wanted)
    text = replies.LlamaText(body, generation, exchange.service.host.llm, exchange.about.model)
    return Streamed(text.events(exchange), generation.cancel)


ROUTES = (
    Route(
        *("/completion", complete, (replies.Infilled, list[replies.Infilled]), bodies.LlamaCompletionBody, EVENTS),
        prompt="prompt",
    ),
    Route("/infill", infill, (replies.Infilled,), bodies.InfillBody, EVENTS, prompt="input_prefix"),
    Route("/embedding", embed, (list[replies.LlamaEmbedding],), bodies.LlamaEmbeddingBody, prompt="content"),
    Route("/tokenize", tokenize, (Tokenized, TokenCards, TokenPieces), bodies.TokenizeBody),
    Route("/detokenize", detokenize, (Detokenized, DetokenizedText), bodies.DetokenizeBody),
    Route("/apply-template", apply_template, (replies.AppliedTemplate,), ChatBody),
    Route("/props", props, (replies.Props,)),
    Route("/slots", slots, (list[replies.Slot],)),
    Route("/lora-adapters", lora_adapters, (list[replies.LoraAdapter],)),
)
PATHS = tuple(one.path for one in ROUTES)
API = Api(PATHS, error_body, ROUTES, errors=Problems, name="llama_cpp", tag="llama.cpp")
