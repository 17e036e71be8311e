"""How many drafts a text gets: by what was counted, by what rows cost, and by nothing else."""

import pytest

from tests.engine.hand import sequence_of
from tokenwright.decode.drafts.speculate import MARGIN, MOST_DRAFTS, SuffixProposer
from tokenwright.decode.drafts.step_costs import StepCosts, costs_of
from tokenwright.engine import Chunk, LogitsNeeded, NoStopChecker, Request, SamplingParams, Step

FREE = StepCosts({1: 1.0, 64: 1.0})
LINEAR = StepCosts({1: 1.0, 64: 64.0})
CYCLE = (1, 2, 3, 4, 5) * 3


def step_of(*sequences, prefill=0):
    chunks = [Chunk(one, len(one.tokens) - 1, len(one.tokens), LogitsNeeded.LAST) for one in sequences]
    if prefill:
        chunks.append(Chunk(sequence_of(*range(prefill), identity=999), 0, prefill, LogitsNeeded.LAST))
    return Step(tuple(chunks))


def asked(proposer, *sequences, most=99, prefill=0):
    return [
        list(one) for one in proposer.propose(sequences, [most] * len(sequences), step_of(*sequences, prefill=prefill))
    ]


def text(*tokens, identity=0, **options):
    return sequence_of(*tokens, identity=identity, asked=Request(tokens[:1], SamplingParams(), **options))


def test_costs_lie_on_lines_between_those_measured():
    costs = StepCosts({1: 1.0, 2: 1.5, 4: 2.0})
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.5, 1.75, 2.0, 2.5]


def test_a_text_without_repeats_gets_none():
    assert asked(SuffixProposer(FREE), text(*range(50))) == [[]]


def test_what_followed_before_is_drafted_and_equal_calls_have_equal_answers():
    proposer, one = SuffixProposer(FREE), text(*CYCLE)
    [drafts] = asked(proposer, one)
    assert drafts == list((1, 2, 3, 4, 5) * 3)[:MOST_DRAFTS]
    assert asked(proposer, one) == [drafts]
    assert asked(proposer, one, most=2) == [[1, 2]]


def test_where_each_row_costs_a_step_there_are_no_drafts():
    assert asked(SuffixProposer(LINEAR), text(*CYCLE)) == [[]]
    long = StepCosts({1: 1.0, 64: 1.0}, context=1.0)
    assert asked(SuffixProposer(long), text(*CYCLE)) == [[]], "a row that reads a long text costs as much as the step"


def test_beside_a_long_prompt_rows_are_nearly_free():
    assert len(asked(SuffixProposer(LINEAR), text(*CYCLE), prefill=60)[0]) > 3


def test_a_full_batch_has_none():
    """The cost of a row is what each of the tokens costs anyway."""
    costs, proposer = StepCosts({1: 1.0, 16: 1.5, 64: 6.0}), SuffixProposer(StepCosts({1: 1.0, 16: 1.5, 64: 6.0}))
    assert costs.of(17) > costs.of(16)
    many = [text(*CYCLE, identity=identity) for identity in range(48)]
    assert asked(proposer, *many) == [[]] * 48
    assert asked(proposer, many[0]) != [[]]


def test_guesses_that_fail_end_the_drafts_and_guesses_that_hold_bring_them_back():
    """No row is spent in between: the guesses are compared with what was written."""
    proposer, one = SuffixProposer(StepCosts({1: 1.0, 16: 4.0})), text(*CYCLE)
    lengths = []
    for turn in range(60):
        lengths.append(len(asked(proposer, one)[0]))
        one.tokens += (100 + turn, 1, 2, 3) if turn < 30 else (1, 2, 3, 4, 5)
    assert lengths[1] > 0
    assert lengths[29] == 0
    assert lengths[59] > 0


def test_a_text_that_no_guess_fits_costs_a_few_rows():
    """However sure its first guesses seemed; and guesses that hold bring drafts back."""
    proposer, one, drafted = SuffixProposer(costs_of("avx512", "int8", lambda rows: 1.0, 0.0)), text(*CYCLE * 2), []
    for turn in range(40):
        drafted.append(len(asked(proposer, one)[0]))
        one.tokens += (100 + turn, *CYCLE)
    assert drafted[0] > 3 and sum(drafted) < 4 * drafted[0]
    assert not any(drafted[10:])
    for _ in range(20):
        asked(proposer, one)
        one.tokens += (1, 2, 3, 4, 5)
    assert len(asked(proposer, one)[0]) > 3


def test_the_text_that_is_likelier_to_go_on_so_gets_the_rows():
    proposer = SuffixProposer(StepCosts({1: 1.0, 64: 20.0}))
    likely, unlikely = text(*CYCLE, *CYCLE, identity=1), text(1, 2, 3, 9, 8, 7, 1, 2, 3, identity=2)
    for turn in range(20):
        asked(proposer, likely, unlikely)
        likely.tokens += [1, 2, 3, 4, 5]
        unlikely.tokens += [20 + turn, 40 + turn, 1, 2, 3]
    first, second = asked(proposer, likely, unlikely)
    assert len(first) > len(second)


@pytest.mark.parametrize("options", [{"salt": b"other"}, {"share": False}], ids=str)
def test_earlier_texts_of_the_same_salt_alone_are_read(options):
    proposer = SuffixProposer(FREE)
    asked(proposer, text(0, *range(30, 40), identity=1))
    proposer.end(text(0, *range(30, 40), identity=1))
    assert asked(proposer, text(5, 30, 31, 32, identity=2), most=3) == [[33, 34, 35]]
    assert asked(proposer, text(5, 30, 31, 32, identity=3, **options), most=3) == [[]]


@pytest.mark.parametrize("options", [{"share": False}, {"speculate": False}, {"cache": False}], ids=str)
def test_a_text_that_shares_nothing_leaves_nothing(options):
    proposer = SuffixProposer(FREE)
    proposer.end(text(0, *range(30, 40), identity=1, **options))
    assert asked(proposer, text(5, 30, 31, 32, identity=2)) == [[]]


def test_what_has_ended_takes_no_memory():
    proposer = SuffixProposer(FREE, earlier=0)
    asked(proposer, one := text(*CYCLE))
    assert proposer.nbytes > 0
    proposer.end(one)
    assert proposer.nbytes == 0


class Failing(NoStopChecker):
    def forced(self):
        raise ValueError("the client's")


def test_a_stop_checker_that_fails_drafts_nothing_and_ends_nothing():
    assert asked(SuffixProposer(FREE), sequence_of(1, 2, 3, stop_checker=Failing())) == [[]]


class Forcing(NoStopChecker):
    def __init__(self, tokens):
        self.tokens = tokens

    def forced(self):
        return self.tokens


def test_what_a_grammar_leaves_is_drafted_before_what_was_repeated():
    """Unless both begin alike, and more of that is expected to hold."""
    proposer = SuffixProposer(FREE)
    for identity, known in enumerate((CYCLE, range(20))):
        assert asked(proposer, sequence_of(*known, stop_checker=Forcing([9, 8]), identity=identity)) == [[9, 8]]
    alike = sequence_of(*CYCLE, stop_checker=Forcing([1, 9]), identity=3)
    assert asked(proposer, alike)[0][:4] == [1, 2, 3, 4]


def test_a_prediction_is_drafted_from_its_beginning_and_found_again_behind_a_change():
    proposer = SuffixProposer(FREE)
    one = text(3, prediction=tuple(range(50, 70)))
    assert asked(proposer, one, most=4) == [[50, 51, 52, 53]]
    one.tokens += [50, 51, 99, 53, 54, 55]
    assert asked(proposer, one, most=4) == [[56, 57, 58, 59]]


def test_rows_cost_what_was_measured_for_the_kernels_and_the_weights():
    plain = [
        costs_of(kernels, "int8", lambda rows: 7.0, 0.0).of(8) for kernels in ("amx", "avx512", "avx2", "reference")
    ]
    assert plain[0] == plain[1] < plain[2] < plain[3]
    assert (
        costs_of("avx2", "int4", lambda rows: 7.0, 0.0).of(8)
        > plain[2]
        == costs_of("avx2", "fp8", lambda rows: 7.0, 0.0).of(8)
    )


def test_rows_of_a_model_in_the_caches_cost_their_arithmetic():
    costs = [costs_of(kernels, "bfloat16", lambda rows: 7.0, 0.0, small=True).of(8) for kernels in ("avx512", "avx2")]
    assert costs == [1.75, costs_of("avx2", "bfloat16", lambda rows: 7.0, 0.0).of(8)]


def test_rows_of_experts_read_more_weights():
    dense, experts = (costs_of("amx", "int8", read, 0.0).of(8) for read in (lambda rows: 7.0, lambda rows: 2.0 + rows))
    assert experts == dense * 10 / 3


@pytest.mark.parametrize("row", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("states", [0.0, 1e-9, 0.1, 0.5])
def test_what_a_state_computes_once_more_is_counted(row, states):
    """The number of drafts is that of the best rate, over every way in which drafts hold and fail."""
    costs = StepCosts({1: 1.0, 2: 1.0 + row}, states=states)
    for chance in (0.2, 0.4, 0.6, 0.8, 0.9, 0.99):
        proposer, one = SuffixProposer(costs), text(*CYCLE)
        asked(proposer, one)
        followed = proposer._followed[one.id]
        followed.made = [1.0 for _ in followed.made]
        followed.held = [chance for _ in followed.held]
        rates = {count: rate(costs, chance, count) * (1 if count else MARGIN) for count in range(MOST_DRAFTS + 1)}
        [drafts] = asked(proposer, one)
        assert rates[len(drafts)] == pytest.approx(max(rates.values()))


def rate(costs, chance, count):
    """Tokens by cost of a text that gets so many drafts whenever it may, as the engine computes it."""
    tokens = cost = 0.0
    for held in range(count + 1):
        likely = chance**held * (1.0 if held == count else 1 - chance)
        tokens += likely * (held + 1)
        cost += likely * (costs.of(1 + count) + (costs.states if count else 0.0))
        if held < count and costs.states:
            tokens += likely
            cost += likely * costs.of(held + 2)
    return tokens / cost
