"""/tokenize and /detokenize: texts to ids and back, for clients and for the explorer's page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from tokenwright.errors import RequestError
from tokenwright.serve.http.api import about, body_of, unless_gone
from tokenwright.serve.http.reasoning_options import Thinking
from tokenwright.serve.http.replying import check_model
from tokenwright.serve.llama_cpp.bodies import DetokenizeBody, TokenizeBody
from tokenwright.serve.openai.generation_request import messages_of, tools_of
from tokenwright.serve.service.preprocess import Preprocessor, check
from tokenwright.serve.service.service import Service
from tokenwright.serve.service.types import GenerationRequest


class Texts:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, request: Request) -> JSONResponse:
        """The token ids of a text."""
        body = await body_of(request, TokenizeBody)
        check_model(request, self.service, body.model)
        if sum(one is not None for one in (body.prompt, body.messages, body.text, body.content)) != 1:
            raise RequestError("prompt: give one of prompt, messages, content and text")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(body, name) is not None and body.messages is None:
                raise RequestError(f"{name} belongs to a conversation; give messages")
        if body.add_special_tokens and body.messages is not None:
            raise RequestError("add_special_tokens: a conversation has those that its template writes; leave it out")
        return JSONResponse(await unless_gone(request, self._tokenized(request, body)))

    async def _tokenized(self, request: Request, body: TokenizeBody) -> dict[str, Any]:
        preparer = await self.service.preparer()
        return await self.service.read(about(request).caller.key, lambda: self._read(request, preparer, body))

    def _read(self, request: Request, preparer: Preprocessor, body: TokenizeBody) -> dict[str, Any]:
        if body.content is not None:
            return self._pieces(body.content, body)
        prompt = body.prompt if body.text is None else body.text
        wanted = GenerationRequest(
            prompt=prompt,
            messages=None if body.messages is None else messages_of(body.messages),
            tools=tools_of(request, body.tools or ()),
            variables=Thinking.of(None, None, None, body.chat_template_kwargs).variables,
            continue_last=body.continue_final_message,
            generation_prompt=body.add_generation_prompt,
        )
        check(wanted)
        ids = preparer.prompt(wanted, add_special=body.add_special_tokens is not False)[0]
        if body.text is not None:
            from tokenwright.llm.run_trace import token_cards  # it loads NumPy, as the model does

            return {"tokens": [asdict(card) for card in token_cards(self.service.host.llm.tokenizer, ids)]}
        llm = self.service.host.llm
        found: dict[str, Any] = {"count": len(ids), "max_model_len": llm.context, "tokens": list(ids)}
        strings = [llm.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return found | {"token_strs": strings}

    def _pieces(self, text: str, body: TokenizeBody) -> dict[str, Any]:
        """The ids of a text, in the manner of llama.cpp."""
        llm = self.service.host.llm
        llm.check_length(text)
        ids = llm.tokenizer.encode(text, add_special=body.add_special, parse_special=body.parse_special)
        pieces = [{"id": token, "piece": llm.tokenizer.token_text(token)} for token in ids]
        return {"tokens": pieces if body.with_pieces else list(ids)}

    async def detokenize(self, request: Request) -> JSONResponse:
        """The text of token ids."""
        body = await body_of(request, DetokenizeBody)
        check_model(request, self.service, body.model)
        if (body.tokens is None) == (body.ids is None):
            raise RequestError("tokens: give one of tokens and ids")
        llm = await self.service.opened()
        ids = body.ids if body.tokens is None else body.tokens
        decoded = self.service.read(about(request).caller.key, lambda: llm.tokenizer.decode(ids or ()))
        text = await unless_gone(request, decoded)
        return JSONResponse({"text": text} if body.tokens is None else {"prompt": text, "content": text})
