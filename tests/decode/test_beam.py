"""The beam search alone, on rows of logits made by hand, against a search written here from the definition alone.

The player is what the engine is to a search: it keeps a text for every beam, forks and drops them as is picked, and
hands the rows in. Rows have few values, so that ties are everywhere.
"""

import math
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.hand import sequence_of
from tests.profiles import examples
from tokenwright.checks import MAX_TOKENS
from tokenwright.decode import BeamSearch, TextStopChecker
from tokenwright.decode.logits_processors import log_softmax
from tokenwright.engine import (
    Chunk,
    Failed,
    Finish,
    FinishReason,
    LogitsNeeded,
    Pick,
    Request,
    SamplingParams,
    TokenConstraints,
)

V = 7
PROMPT = (1, 2)
EVERYTHING = (1 << V) - 1


def number(*parts):
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "little")


def hashed(seed, levels):
    """A row for every text: each logit is one of `levels`, and many texts have the same row."""
    return lambda text: [levels[number(seed, token, number(seed, text) % 4) % len(levels)] for token in range(V)]


class Sink:
    """A text whose letters are tokens; it stops at two letters side by side."""

    def __init__(self, stop=None):
        self.stop, self.text, self.armed, self.stopped = stop, (), [], None

    def push(self, token, armed=True):
        self.text += (token,)
        if armed and self.stop is not None and self.text[-2:] == self.stop:
            self.stopped = str(self.stop)
        return ""

    def finish(self):
        return ""

    def fork(self):
        other = Sink(self.stop)
        other.text, other.stopped = self.text, self.stopped
        return other


@dataclass
class Grammar:
    """Which ids may follow a text, and whether it is complete, both by a hash of it."""

    seed: int
    text: tuple[int, ...] = ()
    answering = True

    @property
    def ids(self):
        closed = number("closed", self.seed, self.text) & number("and", self.seed, self.text)
        return EVERYTHING & ~closed if self.seed else EVERYTHING

    def mask(self, left=None):
        return np.array([self.ids], dtype="<u4")

    def advance(self, token):
        assert self.ids >> token & 1, "a token that the grammar forbids"
        self.text += (token,)
        return self.complete

    @property
    def complete(self):
        return bool(self.seed) and number("complete", self.seed, self.text) % 2 == 0

    def fork(self):
        return replace(self)


@dataclass
class Case:
    """What is searched, by what rows, and what ends its texts."""

    params: SamplingParams
    rows: object
    ends: tuple[int, ...] = ()  # end tokens
    stop: tuple[int, int] | None = None  # a stop string of two tokens
    grammar: int = 0
    context: int = 100

    @property
    def limit(self):
        return min(len(PROMPT) + self.params.max_tokens, self.context) - len(PROMPT)

    @property
    def constraints(self):
        return TokenConstraints(end_ids=frozenset(self.ends) | frozenset(self.params.stop_ids))

    def stop_checker(self, clock=lambda: 0.0):
        params = self.params
        return TextStopChecker(
            Sink(self.stop),
            self.ends,
            params.stop_ids,
            min_tokens=params.min_tokens,
            deadline=params.max_seconds,
            constraint=Grammar(self.grammar) if self.grammar else None,
            clock=clock,
        )

    def model(self, text):
        """The model's log-probabilities after a text."""
        return log_softmax(np.array(self.rows(text))).tolist()

    def row(self, text):
        """The log-probabilities of what may follow a text."""
        row = self.model(text)
        for token, bias in self.params.logit_bias:
            row[token] += bias
        early = self.constraints.end_ids if len(text) < self.params.min_tokens else ()
        ids = Grammar(self.grammar, text).ids
        return [-math.inf if token in early or not ids >> token & 1 else row[token] for token in range(V)]

    def reason(self, text):
        """Why a text ends with its last token, if it does."""
        late, token = len(text) > self.params.min_tokens, text[-1]
        if token in self.ends and late:
            return FinishReason.EOS
        if token in self.params.stop_ids and late:
            return FinishReason.STOP_ID
        if late and self.stop is not None and text[-2:] == self.stop:
            return FinishReason.STOP
        if Grammar(self.grammar, text).complete:
            return FinishReason.GRAMMAR
        if len(text) == self.params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if len(text) == self.limit else None


def naive(case):
    """(text, score, reason) of all that ended, the best first; and the texts of all beams at each step."""
    params = case.params
    width, ends = params.beams, len(case.constraints.end_ids)
    beams, found, steps = [((), 0.0)], [], []
    while True:
        ways = [
            (-(logprob + score), place, token)
            for place, (text, score) in enumerate(beams)
            for token, logprob in enumerate(case.row(text))
            if logprob > -math.inf
        ]
        going = []
        for rank, (cost, place, token) in enumerate(sorted(ways)[: max(2, 1 + ends) * width]):
            text = (*beams[place][0], token)
            reason = case.reason(text)
            if reason is not None and rank < width:
                found.append((text, -cost / len(text) ** params.length_penalty, reason))
            elif reason is None and len(going) < width:
                going.append((text, -cost))
        found = sorted(found, key=lambda one: -one[1])[:width]
        beams = going
        if not going or (len(found) == width and over(case, going[0], found[-1][1])):
            return found, steps
        steps.append([text for text, _ in beams])


def over(case, beam, worst):
    """Whether no beam can still be better than the worst that was found."""
    text, score = beam
    penalty, stopping = case.params.length_penalty, case.params.early_stopping
    if stopping is True:
        return True
    length = case.limit if stopping == "never" and penalty > 0 else len(text)
    return score / length**penalty <= worst


@dataclass
class Player:
    """Plays the engine for one search. `texts`: what each beam's sequence has written."""

    case: Case
    clock: object = lambda: 0.0
    reverse: bool = False  # the rows are handed in the other way round
    texts: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})
    choices: dict[int, int] = field(default_factory=lambda: {0: 0})
    steps: list[list[tuple[int, ...]]] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)  # all of them, in order
    ends: list = field(default_factory=list)
    ids: int = 0

    def __post_init__(self):
        self.search = BeamSearch(self.case.params, self.case.stop_checker(self.clock))
        self.request = Request(
            PROMPT,
            self.case.params,
            self.search,
            constraints=self.case.constraints,
            width=self.case.params.beams,
            search=self.search,
        )

    def chunk(self, identity):
        text = [*PROMPT, *self.texts[identity]]
        sequence = sequence_of(
            *text,
            identity=identity,
            asked=self.request,
            limit=len(PROMPT) + self.case.limit,
            choices=(self.choices[identity],),
            stop_checker=self.search,
        )
        return Chunk(sequence, len(text) - 1, len(text), LogitsNeeded.LAST)

    def step(self):
        order = sorted(self.texts, reverse=self.reverse)
        rows = [(self.chunk(one), np.array(self.case.rows(self.texts[one]))) for one in order]
        results = self.search.pick(rows)
        if not all(isinstance(result, Pick) for result in results):
            assert [result.sequence for result in results] == order, "at the end every beam is told"
            self.ends = results
            return
        before = dict(self.texts)
        assert {pick.sequence for pick in results} <= before.keys()
        assert len({pick.choice for pick in results}) == len(results), "no two beams have one choice"
        self.texts, self.choices = {}, {}
        for pick in results:
            identity = pick.sequence
            if identity in self.texts:
                self.ids += 1
                identity = self.ids
            [token] = pick.tokens
            self.texts[identity] = (*before[pick.sequence], token)
            self.choices[identity] = pick.choice
            assert self.search.advance(token) is None, "what ends was not picked"
            assert pick.logprobs == (self.case.model(before[pick.sequence])[token],)
            assert pick.sampler_logprobs == (self.case.row(before[pick.sequence])[token],)
        self.picks += results
        self.steps.append([text for _, text in sorted((self.choices[one], text) for one, text in self.texts.items())])

    def play(self, steps=1000):
        while not self.ends and steps:
            self.step()
            steps -= 1
        return self

    def found(self):
        return [(tuple(node.token for node in one.node.path()), one.score, one.reason) for one in self.best()]

    def best(self):
        return self.search.best(100)


LEVELS = st.lists(st.sampled_from([0.0, -1.0, -2.0, -0.5, 3.0]), min_size=1, max_size=4)


@st.composite
def cases(draw):
    most = draw(st.integers(1, 7))
    params = SamplingParams(
        beams=draw(st.integers(2, 8)),
        length_penalty=draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        stop_ids=draw(st.sampled_from([(), (5,), (4, 5)])),
        logit_bias=draw(st.sampled_from([{}, {6: 2.0}, {6: 2.0, 5: 1.0}])),
    )
    return Case(
        params,
        hashed(draw(st.integers(0, 10**6)), draw(LEVELS)),
        ends=draw(st.sampled_from([(), (6,), (6, 3)])),
        stop=draw(st.sampled_from([None, (0, 0), (1, 0)])),
        grammar=draw(st.sampled_from([0, 1, 2, 3, 4])),
        context=draw(st.sampled_from([100, 100, len(PROMPT) + 3])),
    )


def same(found, expected):
    assert [(text, reason) for text, _, reason in found] == [(text, reason) for text, _, reason in expected]
    assert [score for _, score, _ in found] == pytest.approx([score for _, score, _ in expected], abs=1e-12)


@examples(400)
@given(cases(), st.booleans())
def test_a_search_is_the_one_of_the_definition(case, reverse):
    player = Player(case, reverse=reverse).play()
    expected, steps = naive(case)
    assert player.steps == steps
    same(player.found(), expected)
    best = expected[0][2] if expected else None
    assert all(
        isinstance(end, Finish) and end.reason is best if expected else isinstance(end, Failed) for end in player.ends
    )
    check_tree(player)


def check_tree(player):
    """The tree holds every beam and every text that ended while it was among the best, and nothing else."""
    seen = {}
    for node in player.search.nodes():
        assert node.parent is player.search.root or node.parent in seen, "parents come before children"
        seen[node] = (*seen.get(node.parent, ()), node.token)
        assert node.depth == len(seen[node])
        assert [one.token for one in node.parent.children].count(node.token) == 1
        assert node.score == pytest.approx(sum(one.sampler_logprob for one in node.path()), abs=1e-9)
    assert {text for step in player.steps for text in step} <= set(seen.values())
    assert {one.node for one in player.best()} <= seen.keys()
    assert all(node.reason is not None for node in seen if not node.children and seen[node] not in leaves(player))


def leaves(player):
    """Texts of beams that were picked, and those of the last step, which nobody was told."""
    return {text for step in player.steps for text in step} | {
        tuple(one.token for one in beam.node.path()) for beam in player.search.beams.values()
    }


def test_where_every_end_is_forbidden_and_nothing_else_is_left_the_search_fails():
    params = SamplingParams(beams=2, max_tokens=4, min_tokens=2, stop_ids=range(V))
    player = Player(Case(params, lambda text: [0.0] * V)).play()
    assert [type(end) for end in player.ends] == [Failed]
    assert "nothing is left to choose" in str(player.ends[0].error)
    assert player.found() == []


def test_where_beams_have_nowhere_to_go_what_has_ended_is_told():
    """After two tokens the grammar is closed; one text has ended before, and there are three beams."""
    case = Case(SamplingParams(beams=3, max_tokens=9), lambda text: [0.0] * 6 + [-9.0 if text else 5.0], ends=(6,))
    player = Player(case)
    player.search.beams[0].stop_checker.constraint = Short()
    player.play()
    assert [(text, reason) for text, _, reason in player.found()] == [((6,), FinishReason.EOS)]
    assert [end.reason for end in player.ends] == [FinishReason.EOS] * 3


@dataclass
class Short(Grammar):
    """All may follow, and nothing after two tokens."""

    seed: int = 0

    @property
    def ids(self):
        return 0 if len(self.text) == 2 else EVERYTHING


@pytest.mark.parametrize("steps", range(6))
def test_at_the_deadline_what_the_beams_have_written_competes_with_what_has_ended(steps):
    now = [0.0]
    params = SamplingParams(beams=4, max_tokens=9, max_seconds=1.0, length_penalty=0.5)
    case = Case(params, lambda text: [0.0, 0.1, 0.2, 0.3, 0.0, 0.0, len(text) - 0.5], ends=(6,))
    player = Player(case, clock=lambda: now[0]).play(steps)
    assert player.search.finished() is None
    ended = [([n.token for n in one.node.path()], one.score, one.reason) for one in player.best()]
    going = [one.node for one in player.search.beams.values() if one.node.depth and not player.ends]
    texts = [([n.token for n in one.path()], one.score / one.depth**0.5, FinishReason.TIME) for one in going]
    now[0] = 1.0
    assert player.search.finished() is (None if player.ends else FinishReason.TIME)
    same(
        [(list(text), *rest) for text, *rest in player.found()],
        sorted([*ended, *texts], key=lambda one: -one[1])[:4],
    )
    assert player.search.finished() is None, "it is told once"
    assert all(one.node.reason is one.reason for one in player.best())


def test_a_row_tells_its_likeliest_ids_to_all_that_go_on_from_it():
    params = SamplingParams(beams=3, n=3, max_tokens=3, logprobs=2, logit_bias={2: 1.5})
    case = Case(params, hashed(7, [0.0, -1.0, 2.0]))
    player = Player(case).play()
    for one in player.best():
        path = one.node.path()
        for place, node in enumerate(path):
            text = tuple(before.token for before in path[:place])
            model, row = case.model(text), case.row(text)
            ids = sorted(range(V), key=lambda token: (-model[token], token))[:2]
            assert [(top.token, top.logprob, top.sampler_logprob) for top in node.top] == [
                (token, model[token], row[token]) for token in ids
            ]
            assert (node.logprob, node.sampler_logprob) == (model[node.token], row[node.token])
    assert {top for pick in player.picks for top in pick.tops} <= {node.top for node in player.search.nodes()}
    assert player.search.best(2) == player.best()[:2]


def test_forks_of_a_search_are_the_search_itself_and_mask_nothing():
    player = Player(Case(SamplingParams(beams=2), lambda text: [0.0] * V))
    assert player.search.fork() is player.search
    assert player.search.mask() is None


@pytest.mark.parametrize("stopping", [False, "never"])
@pytest.mark.parametrize("penalty", [30.0, -30.0])
def test_any_length_may_be_raised_to_any_penalty(penalty, stopping):
    params = SamplingParams(beams=2, max_tokens=MAX_TOKENS, length_penalty=penalty, early_stopping=stopping)
    case = Case(params, lambda text: [0.0, -3.0, -3.0, -3.0, -3.0, -3.0, -1.0], ends=(6,), context=2 * MAX_TOKENS)
    player = Player(case).play(4)
    player.search.give_up(FinishReason.TIME)
    assert len(player.best()) == 2
    assert all(math.isfinite(one.score) for one in player.best())
