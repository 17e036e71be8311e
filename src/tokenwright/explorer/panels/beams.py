"""Beam search for the page: a search that the engine runs, as a tree, beside what greedy decoding writes."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Annotated

from tokenwright.decode.beam import BeamSearch, Node
from tokenwright.engine import Failed, Token
from tokenwright.engine.port import Delivery
from tokenwright.errors import EngineError
from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import DERIVED, READ

LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class BeamNode:
    parent: int  # of the parent, which comes before; -1: the prompt
    token: TokenCard
    logprob: float
    score: float  # sum of log-probabilities from the prompt on
    reason: str | None  # why a text ended here
    rank: int | None  # of a text that ends here, from 0: the best
    greedy: bool  # whether greedy decoding goes this way


@dataclass(frozen=True, slots=True)
class BeamText:
    node: int
    text: str
    tokens: int
    sum: float
    score: float  # the sum, divided by tokens ** length_penalty
    reason: str


@dataclass(frozen=True, slots=True)
class BeamCard:
    prompt: str
    beams: int
    nodes: tuple[BeamNode, ...]
    best: tuple[BeamText, ...]
    greedy_text: str
    greedy_tokens: int
    greedy_sum: Annotated[float, READ("nat", "greedy", "sum of the log-probabilities of its tokens")]
    best_sum: Annotated[float, READ("nat", "best beam", "sum of the log-probabilities of its tokens")]
    gain: Annotated[float, DERIVED("nat", "gain", "of the best beam over greedy decoding, at the length of each")]
    parted: int | None  # common tokens; null: all


MESSAGES = (BeamNode, BeamText, BeamCard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    prompt: Annotated[str, Length(1, 8000)]
    beams: Annotated[int, Between(2, 8)] = 4
    max_tokens: Annotated[int, Between(1, 64)] = 16


class _News:
    def __init__(self) -> None:
        self.kept: list[Delivery] = []

    def deliver(self, deliveries: list[Delivery]) -> None:
        self.kept += deliveries


def beams(explorer: Explorer, body: Search, salt: str) -> Generator[BeamCard | None, None, None]:
    """Run the search and greedy decoding side by side. Raises EngineError."""
    llm, news = explorer.llm, _News()
    params = llm.sampling(beams=body.beams, n=body.beams, max_tokens=body.max_tokens)
    greedy = llm.sampling(temperature=0.0, max_tokens=body.max_tokens)
    requests = [llm.prepare(body.prompt, one, salt=salt) for one in (params, greedy)]
    handles = llm.submit(requests, news)
    try:
        while sum(delivery.ended for delivery in news.kept) < len(handles):
            time.sleep(LOOK_S)
            yield None
    finally:
        for handle in handles:
            handle.cancel()
    events = [(delivery.handle, event) for delivery in news.kept for event in delivery.events]
    failed = next((event.error for _, event in events if isinstance(event, Failed)), None)
    if failed is not None:
        raise EngineError(f"the search failed: {failed}")
    plain = [(one.token, one.logprob) for handle, one in events if handle is handles[1] and isinstance(one, Token)]
    yield _card(explorer, body, requests[0].search, plain)


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
    found: set[int] = set()
    node = root
    for token in tokens:
        following = next((child for child in node.children if child.token == token), None)
        if following is None:
            break
        found.add(id(following))
        node = following
    return found
