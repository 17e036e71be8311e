"""Messages of replicas: each comes back as it was, to the bit, and a frame runs no code."""

import math
import pickle
from dataclasses import fields, is_dataclass
from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tokenwright import errors
from tokenwright.cluster.replica_messages import (
    LENGTH,
    Begin,
    HiddenRows,
    KeptAsked,
    KeptFound,
    Ping,
    Pong,
    Progress,
    ReplicaOpened,
    ReplicaOptions,
    ReplicaShape,
    ReplicaUnopened,
    Report,
    RouterBusy,
    Tell,
    TextNews,
    TextOrder,
    Warmed,
    WarmOrder,
    framed,
    packed_event,
    unframed,
    unpacked_event,
)
from tokenwright.engine import (
    AttentionWindow,
    Dropped,
    Failed,
    Finished,
    FinishReason,
    Forked,
    Grammar,
    Group,
    HiddenStates,
    PromptLogprobs,
    SamplingParams,
    Thoughts,
    Token,
    TopLogprob,
)
from tokenwright.llm.prompts.kept import KeptText, KeptTokens

TEXTS = st.text()  # without halves of surrogate pairs
WHOLE = st.integers(0, 2**63)
FLAGS = st.booleans()
LOGPROBS = st.floats(allow_nan=False) | st.just(math.nan)
TOPS = st.lists(st.builds(TopLogprob, WHOLE, LOGPROBS, LOGPROBS), max_size=3).map(tuple)


def tuples(of):
    return st.lists(of, max_size=5).map(tuple)


@st.composite
def params(draw):
    ids = tuples(st.integers(0, 10**6))
    words = tuples(st.text(min_size=1))
    unit = st.floats(0.001, 1.0)
    special = draw(st.frozensets(st.integers(0, 10**6), max_size=3))
    kind = draw(st.sampled_from(["json_schema", "regex", "lark", "choice"]))
    least = draw(st.integers(0, 100))
    return SamplingParams(
        logit_bias=draw(st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=4)),
        allowed_ids=draw(st.none() | ids.map(lambda found: (*found, 2**20))),
        banned_ids=draw(ids),
        bad_words=draw(words),
        grammar=draw(st.none() | st.text(min_size=1).map(lambda text: Grammar(kind, text, special))),
        min_tokens=least,
        repetition_penalty=draw(st.floats(0.001, 100.0)),
        presence_penalty=draw(st.floats(-100, 100)),
        dry_multiplier=draw(st.floats(0, 100)),
        dry_breakers=draw(words),
        temperature=draw(st.floats(0.0, 1e6)),
        top_k=draw(st.integers(0, 1000)),
        top_p=draw(unit),
        min_p=draw(st.floats(0, 1)),
        typical_p=draw(unit),
        mirostat=draw(st.integers(0, 2)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        max_tokens=draw(st.integers(least, 10**6)),
        max_seconds=draw(st.none() | st.floats(0, 1e9)),
        stop=draw(words),
        stop_ids=draw(ids),
        include_stop=draw(FLAGS),
        logprobs=draw(st.none() | st.integers(0, 128)),
        prompt_logprobs=draw(st.none() | st.integers(0, 128)),
    )


ORDERS = st.builds(
    TextOrder,
    prompt=tuples(WHOLE),
    written=tuples(WHOLE),
    params=params(),
    salt=st.binary(),
    adapter=st.none() | TEXTS,
    cache=FLAGS,
    share=FLAGS,
    hidden=FLAGS,
    prompt_logprobs_from=st.none() | WHOLE,
    choice=WHOLE,
    speculate=FLAGS,
    prediction=tuples(WHOLE),
    continued_logprob=st.floats(allow_nan=False),
    thoughts=st.none() | st.builds(Thoughts, TEXTS, TEXTS, FLAGS, st.none() | WHOLE),
)
WINDOWS = st.builds(AttentionWindow, st.none() | WHOLE, WHOLE, WHOLE, st.none() | WHOLE)
SHAPES = st.builds(
    ReplicaShape,
    groups=tuples(st.builds(Group, WHOLE, WINDOWS, WHOLE)),
    page_size=WHOLE,
    seed=st.binary(),
    token_budget=WHOLE,
    max_sequences=WHOLE,
    weight_bytes=WHOLE,
    kv_memory=WHOLE,
    kv_format=TEXTS,
)
EVENTS = st.one_of(
    st.builds(Token, WHOLE, WHOLE, LOGPROBS, LOGPROBS, TOPS, TEXTS),
    st.builds(PromptLogprobs, WHOLE, WHOLE, tuples(LOGPROBS), tuples(TOPS)),
    st.builds(Finished, WHOLE, st.sampled_from(FinishReason), TEXTS, st.none() | TEXTS | WHOLE),
    st.builds(HiddenRows, WHOLE, WHOLE, TEXTS, tuples(WHOLE), st.binary()),
    TEXTS.map(lambda said: packed_event(Failed(3, errors.RequestError(said, "stop")))),
)
NEWS = st.builds(TextNews, WHOLE, st.lists(EVENTS, max_size=3), FLAGS, st.none() | st.floats(0, 1e9), WHOLE, WHOLE)
REPORTS = st.builds(
    Report, st.lists(st.tuples(WHOLE, st.binary(), FLAGS), max_size=3), st.lists(NEWS, max_size=3), WHOLE, WHOLE
)
OPTIONS = st.dictionaries(
    TEXTS, st.one_of(st.none(), FLAGS, WHOLE, TEXTS, tuples(TEXTS), st.dictionaries(TEXTS, TEXTS)), max_size=3
)
PINS = st.tuples(TEXTS, WHOLE, WHOLE)
MESSAGES = st.one_of(
    st.builds(ReplicaOptions, TEXTS, OPTIONS, OPTIONS, WHOLE, st.frozensets(WHOLE), st.binary()),
    st.builds(Begin, WHOLE, ORDERS, FLAGS),
    st.builds(Tell, WHOLE, st.sampled_from(["cancel", "pause", "resume"])),
    *map(st.builds, (Ping, Pong)),
    st.builds(WarmOrder, WHOLE, ORDERS, tuples(WHOLE), FLAGS),
    st.builds(Warmed, WHOLE, WHOLE, WHOLE),
    st.builds(RouterBusy, FLAGS),
    st.builds(KeptAsked, WHOLE, tuples(st.builds(KeptText, TEXTS, st.none() | st.binary(), st.binary(), WHOLE)), TEXTS),
    st.builds(
        KeptFound, WHOLE, st.builds(KeptTokens, tuples(st.tuples(WHOLE, WHOLE)), tuples(PINS)), st.none() | WHOLE
    ),
    st.builds(Progress, WHOLE, WHOLE),
    st.builds(ReplicaOpened, SHAPES),
    st.builds(ReplicaUnopened, TEXTS),
    REPORTS,
)


def exact(value):
    """A value with the types of all of it, and floats as their bits."""
    if is_dataclass(value):
        return type(value), [(field.name, exact(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, list | tuple):
        return type(value), [exact(one) for one in value]
    if isinstance(value, dict):
        return dict, {key: exact(one) for key, one in value.items()}
    return type(value), pack("d", value) if isinstance(value, float) else value


def read(data):
    """The messages of frames."""
    found = []
    while data:
        end = LENGTH + int.from_bytes(data[:LENGTH], "little")
        found.append(unframed(data[LENGTH:end]))
        data = data[end:]
    return found


@given(st.lists(MESSAGES, max_size=3))
def test_messages_come_back_as_they_were(messages):
    assert exact(read(framed(messages))) == exact(messages)


@given(EVENTS)
def test_events_come_back_as_they_were(event):
    messages = [Report([], [TextNews(1, [event], False, None, 0, 0, 0)], 0, 0)]
    assert exact(read(framed(messages))) == exact(messages)


@given(params())
def test_params_come_back_as_they_were(params):
    assert exact(read(framed([begun(params)]))) == exact([begun(params)])


@pytest.mark.parametrize(
    "number", [-math.inf, math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2, -1e16, 1.7976931348623157e308]
)
def test_log_probabilities_come_back_to_the_bit(number):
    events = [Token(1, 2, number, number, (TopLogprob(3, number, number),)), PromptLogprobs(1, 1, (number,))]
    messages = [Report([], [TextNews(1, events, False, None, 0, 0, 0)], 0, 0)]
    assert exact(read(framed(messages))) == exact(messages)


SAMPLED = SamplingParams(
    logit_bias={7: -0.5}, allowed_ids=(3, 4), banned_ids=(5,), bad_words=("a",),
    grammar=Grammar.lark("start: <[3]>", [3]), min_tokens=2,
    repetition_penalty=1.1, repetition_window=3, presence_penalty=0.1, frequency_penalty=0.2,
    dry_multiplier=0.3, dry_base=1.25, dry_allowed_length=3, dry_breakers=("b",), dry_window=4, temperature=0.7,
    top_n_sigma=0.4, top_k=5, top_p=0.9, min_p=0.05, typical_p=0.95, xtc_probability=0.6, xtc_threshold=0.2, mirostat=2,
    mirostat_tau=4.5, mirostat_eta=0.15, seed=2**64 - 1, max_tokens=9, max_seconds=1.5, stop=("c", "d"), stop_ids=(6,),
    include_stop=True, logprobs=0, prompt_logprobs=1, n=2, best_of=3,
)  # fmt: skip
SEARCHED = SamplingParams(ignore_eos=True, beams=4, n=3, length_penalty=-1.0, early_stopping="never")


def begun(params):
    return Begin(1, TextOrder((1,), (), params, b"", None, True, True, False, None, 0), False)


def test_every_field_of_sampling_params_is_sent():
    default, names = SamplingParams(), {field.name for field in fields(SamplingParams)}
    changed = {name for one in (SAMPLED, SEARCHED) for name in names if getattr(one, name) != getattr(default, name)}
    assert changed == names
    messages = [begun(SAMPLED), begun(SEARCHED)]
    assert exact(read(framed(messages))) == exact(messages)


def test_whole_numbers_may_stand_for_others():
    messages = [begun(SamplingParams(temperature=1, top_p=1, max_seconds=5))]
    assert read(framed(messages)) == messages


@pytest.mark.parametrize("rows", [np.zeros((0, 3), np.float32), np.array([[-np.inf, np.nan], [1e-45, -0.0]], ">f4")])
def test_hidden_states_come_back_as_they_were(rows):
    got = unpacked_event(packed_event(HiddenStates(3, 7, rows[:, ::-1])))
    assert isinstance(got, HiddenStates) and (got.sequence, got.start) == (3, 7)
    assert got.rows.dtype == rows.dtype and got.rows.shape == rows.shape
    assert got.rows.tobytes() == rows[:, ::-1].tobytes()


@pytest.mark.parametrize(
    "error",
    [
        errors.TokenwrightError("a", "top_k", "seed"),
        errors.RequestError("b", "stop"),
        errors.ContextError(9, 4),
        errors.CheckpointError("c"),
        errors.CacheFileError("d"),
        errors.CapacityError("e", "pages"),
        errors.EngineError("f"),
        errors.ReplicaError("g"),
    ],
)
def test_our_errors_come_back_as_they_were(error):
    [report] = read(framed([failed(error)]))
    got = unpacked_event(report.texts[0].events[0]).error
    assert type(got) is type(error) and str(got) == str(error) and vars(got) == vars(error)


def failed(error):
    return Report([], [TextNews(1, [packed_event(Failed(3, error))], True, None, 0, 0, 0)], 0, 0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (KeyError("x"), "KeyError: 'x'"),
        (OSError("half \ud800"), "OSError: half ?"),
    ],
)
def test_any_other_error_is_one_of_the_engine(error, said):
    [report] = read(framed([failed(error)]))
    got = unpacked_event(report.texts[0].events[0]).error
    assert type(got) is errors.EngineError and str(got) == said


def test_every_error_has_a_name_on_the_wire():
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.TokenwrightError)]
    assert len(kinds) > 5
    for made in kinds:
        error = made(9, 4) if made is errors.ContextError else made("x")
        assert read(framed([failed(error)]))[0].texts[0].events[0].kind == made.__name__


@pytest.mark.parametrize("event", [Dropped(3), Forked(4, 3, None)])
def test_events_of_several_sequences_are_not_sent(event):
    with pytest.raises(AssertionError, match="one text"):
        packed_event(event)


def test_a_token_is_small():
    token = Token(123456, 123456, -1.2345678901234567, -1.2345678901234567, (), " there")
    [empty, full] = [Report([], [TextNews(3, events, False, None, 0, 0, 0)], 4, 0) for events in ([], [token])]
    assert len(framed([full])) - len(framed([empty])) < 150


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pickle.dumps(Ping()), ValueError),
        (b'["Popen",{}]', ValueError),
        (b'[285,{"number":1}]', ValueError),
        (b'["Tell",{"number":"x","what":"pause"}]', ValidationError),
        (b'["Tell",{"number":1,"what":"die"}]', ValidationError),
        (b'["Tell",{}]', ValidationError),
        (b'["Tell",{"number":1,"what":"pause"}', ValidationError),
    ],
)
def test_what_is_no_message_is_refused(data, error):
    with pytest.raises(error):
        unframed(data)
