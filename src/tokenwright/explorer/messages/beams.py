"""A beam search as a tree. The page's types are generated from this module (typescript.py)."""

from dataclasses import dataclass
from typing import Annotated

from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import DERIVED, READ, Wire


@dataclass(frozen=True, slots=True)
class BeamNode:
    """One token of the tree. Parents come before their children."""

    parent: int  # index of its parent; -1: the prompt
    token: TokenCard
    logprob: float
    score: float  # the sum of log-probabilities from the prompt to here
    reason: str | None  # why a text ended here
    rank: int | None  # of the text that ends here, from 0: the best
    greedy: bool  # whether greedy decoding goes this way


@dataclass(frozen=True, slots=True)
class BeamText:
    """A text that the search found; `score`: the sum, divided by tokens ** length_penalty."""

    node: int
    text: str
    tokens: int
    sum: float
    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class BeamCard:
    """POST /beams: a search with `beams` beams, and what greedy decoding writes."""

    prompt: str
    beams: int
    nodes: tuple[BeamNode, ...]
    best: tuple[BeamText, ...]  # the best first
    greedy_text: str
    greedy_tokens: int
    greedy_sum: Annotated[float, Wire("d", READ, "nat", "greedy", "sum of the log-probabilities of its tokens")]
    best_sum: Annotated[float, Wire("d", READ, "nat", "best beam", "sum of the log-probabilities of its tokens")]
    gain: Annotated[
        float, Wire("d", DERIVED, "nat", "gain", "of the best beam over greedy decoding, at the length of each")
    ]
    parted: int | None  # tokens that both have in common; null: they are the same


MESSAGES = (BeamNode, BeamText, BeamCard)
