"""Routes of llama.cpp's server has beside OpenAI's API: the prompt of a conversation, and what the server is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import tokenwright
from tokenwright.serve.http.api import about, answers, body_of, off_loop, takes, unless_gone
from tokenwright.serve.openai.bodies import ChatBody
from tokenwright.serve.openai.generation_request import chat_wanted
from tokenwright.serve.openai.reply_schema import AppliedTemplate, LoraAdapters, Props, Slots
from tokenwright.serve.service.preprocess import check
from tokenwright.serve.service.service import Service

SHOWN = ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "max_tokens")


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post(
        "/apply-template",
        openapi_extra=takes(ChatBody),
        responses=answers(AppliedTemplate),
        tags=["OpenAI"],
        response_model=None,
    )
    async def apply_template(request: Request) -> JSONResponse:
        """The prompt of a chat, as text."""
        body = await body_of(request, ChatBody)
        wanted = await off_loop(request, lambda: chat_wanted(service, request, body))
        check(wanted)
        preparer = await service.preparer()
        rendered = service.read(about(request).caller.key, lambda: preparer.prompt(wanted))
        return JSONResponse({"prompt": (await unless_gone(request, rendered))[1]})

    @app.get("/props", responses=answers(Props), tags=["OpenAI"], response_model=None)
    async def props() -> JSONResponse:
        """What the server is."""
        llm = await service.opened()
        params, tokenizer = llm.sampling(), llm.tokenizer
        ends = [tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)]
        bos, eos = ("" if token is None else tokenizer.token_text(token) for token in ends)
        found: dict[str, Any] = {
            "default_generation_settings": {
                "n_ctx": llm.context,
                "params": {name: getattr(params, name) for name in SHOWN},
            },
            "total_slots": llm.options.max_sequences,
            "model_alias": service.names[0],
            "model_path": service.host.name,
            "chat_template": tokenizer.chat_template or "",
            "bos_token": bos,
            "eos_token": eos,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"tokenwright {tokenwright.__version__}",
            "is_sleeping": False,
        }
        return JSONResponse(found)

    @app.get("/slots", responses=answers(Slots), tags=["OpenAI"], response_model=None)
    async def slots() -> JSONResponse:
        """The places in the engine, and how far their requests are."""
        llm = await service.opened()
        counts = service.counts()[: llm.options.max_sequences]
        busy = [(True, one.prompt, one.completion) for one in counts]
        idle = [(False, 0, 0)] * (llm.options.max_sequences - len(busy))
        return JSONResponse(
            [
                {
                    "id": at,
                    "n_ctx": llm.context,
                    "is_processing": processing,
                    "n_prompt_tokens": prompt,
                    "n_decoded": written,
                }
                for at, (processing, prompt, written) in enumerate(busy + idle)
            ]
        )

    @app.get("/lora-adapters", responses=answers(LoraAdapters), tags=["OpenAI"], response_model=None)
    async def lora_adapters() -> JSONResponse:
        """The adapters that are served, each as a model of its name."""
        llm = await service.opened()
        return JSONResponse([{"id": at, "path": name, "scale": 0.0} for at, name in enumerate(llm.prepared.adapters)])
