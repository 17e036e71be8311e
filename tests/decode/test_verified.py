"""The sampler on rows of drafts: each is what a step of one row would choose, whatever comes to bind the text."""

import math

import numpy as np
import pytest

from tests.engine.hand import sequence_of
from tokenwright.decode import RowSampler
from tokenwright.decode.sampler import log_totals
from tokenwright.engine import (
    Chunk,
    Failed,
    FinishReason,
    LogitsNeeded,
    NoStopChecker,
    Output,
    Pick,
    Request,
    SamplingParams,
    Step,
)

PROMPT = (1, 2, 3)
SIZE = 7
ROWS = (np.random.default_rng(3).normal(size=(5, SIZE)) * 2).astype(np.float32)


class Late(NoStopChecker):
    """Allows all ids, but for those of one at a place of the text; there it may end."""

    constrained = True

    def __init__(self, at, allowed=None, end=None):
        self.at, self.allowed, self.end, self.heard = at, allowed, end, 0

    def advance(self, token):
        self.heard += 1
        return FinishReason.GRAMMAR if self.heard == self.end else None

    def fork(self):
        other = Late(self.at, self.allowed, self.end)
        other.heard = self.heard
        return other

    def mask(self):
        if self.heard != self.at:
            return None
        if self.allowed is None:
            raise ValueError("the client's")
        return np.array([1 << self.allowed], np.uint32)


def picks(text, drafts, rows, checker, *, told=False, **params):
    request = Request(PROMPT, SamplingParams(**params))
    sequence = sequence_of(*text, asked=request, limit=99, stop_checker=checker)
    needed = LogitsNeeded.ALL if drafts else LogitsNeeded.LAST
    chunk = Chunk(sequence, len(text) - 1, len(text) + len(drafts), needed, tuple(drafts))
    more = (tuple(rows.argmax(1).tolist()), tuple(log_totals(rows))) if told else ()
    [found] = RowSampler().pick(Output((range(len(rows)),), rows, *more), Step((chunk,)))
    return found


def one_by_one(checker, count, **params):
    """The tokens with their log-probabilities that steps of one row come to."""
    text, found, spent = list(PROMPT), [], 0.0
    for row in range(count):
        request = Request(PROMPT, SamplingParams(**params))
        sequence = sequence_of(*text, asked=request, limit=99, stop_checker=checker)
        sequence.counts.sampler_logprob = spent
        chunk = Chunk(sequence, len(text) - 1, len(text), LogitsNeeded.LAST)
        [pick] = RowSampler().pick(Output((range(1),), ROWS[row : row + 1]), Step((chunk,)))
        if isinstance(pick, Failed):
            return found
        found.append((pick.tokens[0], pick.logprobs[0], pick.sampler_logprobs[0], pick.tops[0]))
        text.append(pick.tokens[0])
        spent += pick.sampler_logprobs[0]
        if checker.advance(pick.tokens[0]) is not None:
            return found
    return found


def listed(pick):
    return list(zip(pick.tokens, pick.logprobs, pick.sampler_logprobs, pick.tops, strict=True))


SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "logprobs": 1},
    {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5, "seed": 5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1, "seed": 6},
    {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 1.0},
    {"temperature": 0.0, "dry_multiplier": 9.0, "dry_allowed_length": 1},
    {"temperature": 0.0, "min_tokens": 3},
]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
@pytest.mark.parametrize("late", [Late(99), Late(0, 4), Late(1, 4), Late(2, 5), Late(3), Late(99, end=2)], ids=vars)
def test_drafts_that_hold_come_to_what_single_rows_come_to(late, params, told):
    right = one_by_one(late.fork(), 5, **params)
    drafts = [token for token, *_ in right][:4] + [0] * max(0, 4 - len(right))
    checker = late.fork()
    pick = picks(PROMPT, drafts, ROWS, checker, told=told, **params)
    assert listed(pick) == right
    assert checker.heard == 0, "the engine's own advances in commit"


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
@pytest.mark.parametrize("held", range(4))
def test_the_first_other_token_is_the_last(params, held):
    right = one_by_one(NoStopChecker(), 5, **params)
    drafts = [token if place < held else (token + 1) % SIZE for place, (token, *_) in enumerate(right[:4])]
    assert listed(picks(PROMPT, drafts, ROWS, NoStopChecker(), **params)) == right[: held + 1]


def test_a_row_that_is_not_finite_fails_where_it_is_the_first_and_ends_the_drafts_elsewhere():
    drafts = ROWS.argmax(1).tolist()[:4]
    for bad in range(5):
        rows = ROWS.copy()
        rows[bad, 0] = math.nan
        found = picks(PROMPT, drafts, rows, NoStopChecker(), temperature=0.0)
        assert isinstance(found, Failed if bad == 0 else Pick)
        if bad:
            assert len(found.tokens) == bad
