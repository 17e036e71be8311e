"""A model's own layer that predicts one token further (multi-token prediction, MTP), as its draft model.

Row p reads token p and the hidden state of token p - 1, and predicts token p + 1. The states of the text are the
model's; after the text they are the layer's own:

    text      [ ...... r s t ]        t is pending
    model     [ ...... r s ]          its state of s is known
    layer     [ ...... . . t ]        row t reads the state of s, and guesses a
                           [ a ]      row a reads the layer's own state of t, and guesses b

So rows may be computed later while their states are kept, and an accepted guess is computed again with the model's
state. A row whose state is unknown (the first of a text, and the first after attached pages) reads zeros.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenwright.arrays import Floats
from tokenwright.decode.drafts.draft_model import DraftModel
from tokenwright.engine import Chunk, LogitsNeeded, Output, PagePool, Runner, Sequence, Step


class StatesRunner(Runner[Floats], Protocol):
    def forward_with_states(self, step: Step) -> tuple[Output[Floats], Floats]:
        """The output of a step, and the hidden states [T, width] of all its rows."""


class AfterRunner(Runner[Floats], Protocol):
    def forward_after(self, step: Step, before: Floats) -> tuple[Output[Floats], Floats]:
        """The output of a step, and the states of its rows with logits. before: [T, width], the states before."""


@dataclass(slots=True)
class _States:
    """Hidden states [n, width] of a text's tokens from position `first` on."""

    first: int
    rows: Floats
    preemptions: int  # of the sequence at that time


class NextLayer(DraftModel):
    """Runs the layer on one engine's sequences. It is the engine's Runner, and wraps the model's own."""

    def __init__(self, model: StatesRunner, layer: AfterRunner, pool: PagePool, context: int, width: int) -> None:
        super().__init__(model, layer, pool, context)
        self._model, self._layer, self._width = model, layer, width
        self._states: dict[int, _States] = {}  # by sequence

    def forward(self, step: Step) -> Output[Floats]:
        if self.failed:
            return self._model.forward(step)
        output, states = self._model.forward_with_states(step)
        first = 0
        for chunk in step.chunks:
            last = first + chunk.stop - chunk.start
            if chunk.sequence.cache:
                self._keep(chunk.sequence, chunk.start, states[first:last])
            first = last
        self._catch_up(step)
        return output

    def release(self, sequence: Sequence, drafts: int) -> None:
        super().release(sequence, drafts)
        filled = self._filled.get(sequence.id)
        if filled is not None and filled.known == len(sequence.tokens):  # the guesses are of this step
            filled.guessed = ()  # their rows have read the layer's own states

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._states.pop(sequence.id, None)

    def _run(self, chunks: list[Chunk]) -> Output[Floats]:
        before = np.concatenate([self._before(chunk) for chunk in chunks])
        output, states = self._layer.forward_after(Step(tuple(chunks)), before)
        for chunk, rows in zip(chunks, output.rows, strict=True):
            if chunk.logits_needed is LogitsNeeded.LAST:
                self._keep(chunk.sequence, chunk.stop - 1, states[rows.start : rows.stop])
            again = chunk.sequence.computed - 1  # the first row that may be computed once more reads this state
            self._forget(chunk.sequence, min(chunk.stop - 1, len(chunk.sequence.tokens) - 1, again))
        return output

    def _keep(self, sequence: Sequence, start: int, rows: Floats) -> None:
        kept = self._states.get(sequence.id)
        same = kept is not None and kept.preemptions == sequence.counts.preemptions
        if kept is None or not same or not kept.first < start <= kept.first + len(kept.rows):
            self._states[sequence.id] = _States(start, rows.copy(), sequence.counts.preemptions)
            return
        kept.rows = np.concatenate((kept.rows[: start - kept.first], rows))

    def _forget(self, sequence: Sequence, position: int) -> None:
        """Drop the states before a position: the rows that read them are computed for good."""
        kept = self._states.get(sequence.id)
        if kept is not None and position > kept.first:
            kept.rows, kept.first = kept.rows[position - kept.first :].copy(), position

    def _before(self, chunk: Chunk) -> Floats:
        """The states [n, width] before the rows of a chunk; zeros where they are not known."""
        start, stop = chunk.start - 1, chunk.stop - 1
        found = np.zeros((stop - start, self._width), np.float32)
        kept = self._states.get(chunk.sequence.id)
        if kept is not None:
            first = max(start, kept.first)
            known = kept.rows[first - kept.first : stop - kept.first]
            found[first - start : first - start + len(known)] = known
        return found
