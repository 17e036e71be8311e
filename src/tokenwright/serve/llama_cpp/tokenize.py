"""/tokenize and /detokenize: texts to ids and back, for clients and for the explorer's page."""

from typing import TypedDict

from fastapi import Request
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.serve.http.exchange import Exchange
from tokenwright.serve.http.request_parts import Thinking
from tokenwright.serve.llama_cpp.bodies import DetokenizeBody, TokenizeBody
from tokenwright.serve.openai.generation_request import messages_of, tools_of
from tokenwright.serve.service.preprocess import Preprocessor, check
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import GenerationRequest


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
    piece: str


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


class Texts:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, request: Request) -> JSONResponse:
        """The token ids of a text."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(TokenizeBody)
        exchange.check_model(body.model)
        if sum(one is not None for one in (body.prompt, body.messages, body.text, body.content)) != 1:
            raise RequestError("prompt: give one of prompt, messages, content and text")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name) is not None and body.messages is None:
                raise RequestError(f"{name} belongs to a conversation; give messages")
        if body.add_special_tokens and body.messages is not None:
            raise RequestError("add_special_tokens: a conversation has those that its template writes; leave it out")
        return JSONResponse(await exchange.unless_gone(self._tokenized(exchange, body)))

    async def _tokenized(self, exchange: Exchange, body: TokenizeBody) -> Tokenized | TokenCards | TokenPieces:
        preparer = await self.service.preparer()
        return await exchange.read(lambda: self._read(exchange, preparer, body))

    def _read(
        self, exchange: Exchange, preparer: Preprocessor, body: TokenizeBody
    ) -> Tokenized | TokenCards | TokenPieces:
        if body.content is not None:
            return self._pieces(body.content, body)
        wanted = GenerationRequest(
            prompt=body.prompt if body.text is None else body.text,
            messages=None if body.messages is None else messages_of(body.messages),
            tools=tools_of(exchange.about, body.tools or ()),
            variables=Thinking.of(None, None, None, body.chat_template_kwargs).variables,
            continue_last=body.continue_final_message,
            generation_prompt=body.add_generation_prompt,
            caller=exchange.about.caller,
        )
        check(wanted)
        ids = preparer.prompt(wanted, add_special=body.add_special_tokens is not False)[0]
        llm = self.service.host.llm
        if body.text is not None:
            from tokenwright.llm.run_trace import token_cards  # it loads NumPy, as the model does

            cards = token_cards(llm.tokenizer, ids)
            return {"tokens": [TokenCardReply(id=one.id, text=one.text, special=one.special) for one in cards]}
        strings = [llm.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=llm.context, tokens=list(ids), token_strs=strings)

    def _pieces(self, text: str, body: TokenizeBody) -> TokenPieces:
        llm = self.service.host.llm
        llm.check_length(text)
        ids = llm.tokenizer.encode(text, add_special=body.add_special, parse_special=body.parse_special)
        pieces = [TokenPiece(id=token, piece=llm.tokenizer.token_text(token)) for token in ids]
        return {"tokens": pieces if body.with_pieces else list(ids)}

    async def detokenize(self, request: Request) -> JSONResponse:
        """The text of token ids."""
        exchange = Exchange(request, self.service)
        body = await exchange.body(DetokenizeBody)
        exchange.check_model(body.model)
        if (body.tokens is None) == (body.ids is None):
            raise RequestError("tokens: give one of tokens and ids")
        llm = await self.service.opened()
        ids = body.ids if body.tokens is None else body.tokens
        text = await exchange.unless_gone(exchange.read(lambda: llm.tokenizer.decode(ids or ())))
        return JSONResponse(
            DetokenizedText(text=text) if body.tokens is None else Detokenized(prompt=text, content=text)
        )
