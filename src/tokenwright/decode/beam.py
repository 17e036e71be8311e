"""Beam search: each beam of a request is an engine sequence; the engine forks and ends them by the picks of a search.

It works as in transformers:

    candidates  the max(2, 1 + end ids) * width best of all beams; one that ends its text (by an end token, a stop id or
                string, a grammar, the length) within the width becomes a hypothesis; the best others continue
    score       the sum of a text's `adjusted` log-probabilities over (tokens, end token included) ** length_penalty
    the end     early_stopping=True: once there are as many hypotheses as beams; False: once also no beam, if it ended
                now, would score above the worst; "never": once no beam could at any length
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

import numpy as np

from tokenwright.arrays import Array, Floats
from tokenwright.decode.logits_processors import Doubles, adjusted, log_softmax
from tokenwright.decode.sampler import exhausted, top_ids
from tokenwright.engine import (
    Chunk,
    Failed,
    Finish,
    FinishReason,
    Pick,
    Result,
    SamplingParams,
    StopChecker,
    TopLogprob,
)


@dataclass(slots=True, eq=False)
class Node:
    """One token of the tree. `score`: sum of log-probabilities after the prompt."""

    parent: "Node | None"
    token: int
    logprob: float
    score: float
    depth: int
    sampler_logprob: float = 0.0
    top: tuple[TopLogprob, ...] = ()
    reason: FinishReason | None = None
    children: "list[Node]" = field(default_factory=list)

    def path(self) -> "list[Node]":
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.depth:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    node: Node
    score: float
    reason: FinishReason


@dataclass(slots=True)
class Beam:
    node: Node
    stop_checker: StopChecker


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    choice: int
    token: int
    logprob: float
    adjusted: float
    score: float


class BeamSearch(StopChecker):
    """The beam search and stop checker of one request; at the deadline it ends with the hypotheses found so far.

    It ends no sequence by a token and decodes no text: `pick` does, and the texts are known only when it ends.
    """

    def __init__(self, params: SamplingParams, stop_checker: StopChecker) -> None:
        self.params = params
        self.root = Node(None, -1, 0.0, 0.0, 0)
        self.stop_checker = stop_checker
        self.beams = {0: Beam(self.root, stop_checker.fork())}  # by the choice number of their sequence
        self.ended: list[Hypothesis] = []  # the best `params.beams`, the best first
        self.over = False

    def pick(self, rows: ListLike[tuple[Chunk, Floats]]) -> list[Result]:
        """The picks of a step, from each beam's chunk and row of logits [V]; a Finish or Failed each when it ends."""
        chunks = {chunk.sequence.choices[0]: (chunk, logits) for chunk, logits in rows}
        table = {choice: self._row(choice, *pair) for choice, pair in chunks.items()}
        tops = {choice: _top(*pair, self.params.logprobs or 0) for choice, pair in table.items()}
        chunk = chunks[next(iter(self.beams))][0]
        limit = chunk.sequence.limit - len(chunk.request.prompt)
        candidates = self._candidates(table, len(chunk.request.constraints.end_ids))
        survivors, self.beams = self._advance(candidates, limit, chunk, tops), {}
        picks: list[Result] = []
        for slot, (candidate, beam) in enumerate(survivors):
            node, parent = beam.node, chunks[candidate.choice][0].sequence.id
            picks.append(Pick(parent, (node.token,), (node.logprob,), (node.sampler_logprob,), (node.top,), slot))
            self.beams[slot] = beam
        return self._finish([one.sequence.id for one, _ in rows]) if self._ends(limit) else picks

    def _finish(self, beams: list[int]) -> list[Result]:
        self.over = True
        best = self.best(1)
        if not best:
            return [Failed(sequence, exhausted()) for sequence in beams]
        return [Finish(sequence, best[0].reason) for sequence in beams]

    def best(self, n: int) -> list[Hypothesis]:
        """The n best hypotheses, the best first; fewer if fewer texts have ended."""
        return self.ended[:n]

    def nodes(self) -> Iterator[Node]:
        stack = list(reversed(self.root.children))
        while stack:
            node = stack.pop()
            yield node
            stack += reversed(node.children)

    def give_up(self, reason: FinishReason) -> None:
        """End the search now: unfinished beams become hypotheses and compete with the finished ones."""
        for beam in self.beams.values() if not self.over else ():
            if beam.node.depth:
                self._add_hypothesis(beam.node, reason)
        self.over = True

    def finished(self) -> FinishReason | None:
        reason = None if self.over else self.stop_checker.finished()
        if reason is not None:
            self.give_up(reason)
        return reason

    def _row(self, choice: int, chunk: Chunk, logits: Floats) -> tuple[Doubles, Array]:
        logprobs = log_softmax(logits)
        request, mask = chunk.request, self.beams[choice].stop_checker.mask()
        row = adjusted(logprobs, chunk.sequence.tokens, len(request.prompt), self.params, request.constraints, mask)
        return logprobs, row

    def _candidates(self, table: dict[int, tuple[Doubles, Array]], ends: int) -> list[BeamCandidate]:
        """The best candidates, the best first; on ties the earlier beam and the lower id."""
        choices = list(self.beams)
        rows = np.stack([table[choice][1] for choice in choices])  # [beams, V]
        flat = (rows + np.array([[self.beams[choice].node.score] for choice in choices])).reshape(-1)
        most = min(max(2, 1 + ends) * self.params.beams, len(flat))
        order = np.flatnonzero(flat >= np.partition(flat, -most)[-most])
        order = order[np.argsort(-flat[order], kind="stable")][:most]  # the lower index first on ties
        candidates = []
        for place in order[flat[order] > -math.inf].tolist():
            choice, token = choices[place // rows.shape[1]], place % rows.shape[1]
            logprobs, row = table[choice]
            candidates.append(
                BeamCandidate(choice, token, float(logprobs[token]), float(row[token]), float(flat[place]))
            )
        return candidates

    def _advance(
        self, candidates: list[BeamCandidate], limit: int, chunk: Chunk, tops: dict[int, tuple[TopLogprob, ...]]
    ) -> list[tuple[BeamCandidate, Beam]]:
        """Keep the finished candidates as hypotheses; return the next beams. `tops`: top logprobs after each beam."""
        survivors: list[tuple[BeamCandidate, Beam]] = []
        width = self.params.beams
        for rank, candidate in enumerate(candidates):
            if rank >= width and len(survivors) >= width:
                break
            parent = self.beams[candidate.choice]
            stop_checker = parent.stop_checker.fork()
            known = candidate.token, candidate.logprob, candidate.score
            node = Node(parent.node, *known, parent.node.depth + 1, candidate.adjusted, tops[candidate.choice])
            reason = stop_checker.advance(candidate.token)
            if reason is None and node.depth >= limit:
                full = node.depth >= chunk.request.params.max_tokens
                reason = FinishReason.LENGTH if full else FinishReason.CONTEXT
            if reason is None and len(survivors) < width:
                parent.node.children.append(node)
                survivors.append((candidate, Beam(node, stop_checker)))
            elif reason is not None and rank < width:
                parent.node.children.append(node)
                self._add_hypothesis(node, reason)
        return survivors

    def _add_hypothesis(self, node: Node, reason: FinishReason) -> None:
        node.reason = reason
        self.ended.append(Hypothesis(node, self._normalised(node.score, node.depth), reason))
        self.ended.sort(key=lambda found: -found.score)  # on ties the earlier hypothesis comes first
        del self.ended[self.params.beams :]

    def _ends(self, limit: int) -> bool:
        if not self.beams:
            return True
        if len(self.ended) < self.params.beams:
            return False
        if self.params.early_stopping is True:
            return True
        beam = next(iter(self.beams.values())).node
        longer = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._normalised(beam.score, limit if longer else beam.depth) <= self.ended[-1].score

    def _normalised(self, score: float, length: int) -> float:
        return score / math.pow(length, self.params.length_penalty)


def _top(logprobs: Doubles, row: Array, n: int) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token, float(logprobs[token]), float(row[token])) for token in top_ids(logprobs, n))
