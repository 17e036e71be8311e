"""Beam search for the page: a search that the engine runs, as a tree, beside what greedy decoding writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Request
from pydantic import Field

from tokenwright.engine import Failed
from tokenwright.engine import Request as EngineRequest
from tokenwright.engine.loop import AsyncListener
from tokenwright.engine.port import Delivery
from tokenwright.errors import EngineError
from tokenwright.explorer.messages.beams import BeamCard, BeamNode, BeamText
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, Strict
from tokenwright.serve.http.api import about, reads, unless_gone

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.decode.beam import BeamSearch, Node
    from tokenwright.llm.llm import LLM


class Search(Strict):
    """POST /beams."""

    prompt: Annotated[str, Field(min_length=1, max_length=8000)]
    beams: Annotated[int, Field(ge=2, le=8)] = 4
    max_tokens: Annotated[int, Field(ge=1, le=64)] = 16


async def search(explorer: Explorer, wanted: Search, salt: str) -> BeamCard:
    """Run the search and greedy decoding side by side. A task that is cancelled cancels both."""
    llm = explorer.llm
    beams = llm.sampling(beams=wanted.beams, n=wanted.beams, max_tokens=wanted.max_tokens)
    greedy = llm.sampling(temperature=0.0, max_tokens=wanted.max_tokens)
    requests = await asyncio.to_thread(
        lambda: [llm.prepare(wanted.prompt, params, salt=salt) for params in (beams, greedy)]
    )
    logprobs = await _finished(llm, requests)
    return await asyncio.to_thread(lambda: _card(explorer, wanted, requests[0].search, logprobs))


async def _finished(llm: LLM, requests: Sequence[EngineRequest]) -> list[tuple[int, float]]:
    """Wait until both have ended; the tokens of the second with their log-probabilities. Raises EngineError."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    left, written = set(range(len(requests))), list[tuple[int, float]]()

    def receive(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            place = handles.index(delivery.handle)
            failed = next((event.error for event in delivery.events if isinstance(event, Failed)), None)
            if failed is not None and not ended.done():
                ended.set_exception(EngineError(f"the search failed: {failed}"))
            if place == 1:
                written.extend(_tokens(delivery))
            if delivery.ended:
                left.discard(place)
        if not left and not ended.done():
            ended.set_result(None)

    handles = llm.submit(requests, AsyncListener(loop, receive))
    try:
        await ended
    finally:
        for handle in handles:
            handle.cancel()
    return written


def _tokens(delivery: Delivery) -> list[tuple[int, float]]:
    from tokenwright.engine import Token

    return [(event.token, event.logprob) for event in delivery.events if isinstance(event, Token)]


def _card(explorer: Explorer, wanted: Search, found: BeamSearch, greedy: Sequence[tuple[int, float]]) -> BeamCard:
    nodes = list(found.nodes())
    index = {id(node): place for place, node in enumerate(nodes)}
    best = found.best(wanted.beams)
    ranks = {id(one.node): rank for rank, one in enumerate(best)}
    way = _way(found.root, [token for token, _ in greedy])
    decode = explorer.llm.tokenizer.decode
    texts = [
        BeamText(
            node=index[id(one.node)],
            text=decode([node.token for node in one.node.path()]),
            tokens=one.node.depth,
            sum=one.node.score,
            score=one.score,
            reason=one.reason.value,
        )
        for one in best
    ]
    path = [node.token for node in best[0].node.path()]
    ids = [token for token, _ in greedy]
    common = next((n for n, pair in enumerate(zip(path, ids, strict=False)) if pair[0] != pair[1]), None)
    total = sum(logprob for _, logprob in greedy)
    return BeamCard(
        prompt=wanted.prompt,
        beams=wanted.beams,
        nodes=tuple(
            BeamNode(
                parent=-1 if node.parent is None else index.get(id(node.parent), -1),
                token=explorer.looks([node.token])[0],
                logprob=node.logprob,
                score=node.score,
                reason=None if node.reason is None else node.reason.value,
                rank=ranks.get(id(node)),
                greedy=id(node) in way,
            )
            for node in nodes
        ),
        best=tuple(texts),
        greedy_text=decode(ids),
        greedy_tokens=len(ids),
        greedy_sum=total,
        best_sum=texts[0].sum,
        gain=texts[0].sum - total,
        parted=common,
    )


def _way(root: Node, tokens: Sequence[int]) -> set[int]:
    """The nodes, by identity, through which a text goes, as far as the tree has them."""
    found: set[int] = set()
    node = root
    for token in tokens:
        following = next((child for child in node.children if child.token == token), None)
        if following is None:
            break
        found.add(id(following))
        node = following
    return found


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the route of the panel Beams."""

    @app.post("/beams", **HIDDEN)
    async def beams(request: Request, body: Annotated[Search, reads(Search)]) -> BeamCard:
        return await unless_gone(request, search(explorer, body, about(request).caller.salt))
