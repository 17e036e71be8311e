"""A replica builds the request that the router has built, and a text that moves between replicas stays as it is."""

import random
from collections import deque
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from tests.cluster.test_replica_messages import read
from tests.llm.test_lora import make_adapter
from tests.serve.talking import SCHEMA, make_talker
from tokenwright import LLM, SamplingParams
from tokenwright.backends.native.native_kernels import arithmetic, find_kernels, usable
from tokenwright.cluster.replica_messages import Begin, Report, TextNews, framed, orders_of, packed_event, requested
from tokenwright.cluster.routed_handle import TextInFlight
from tokenwright.engine import Finished, Grammar, Request, StopChecker, Token
from tokenwright.engine.loop import Inbox
from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_options import AskedOptions, Tool
from tokenwright.serve.service.preprocess import Preprocessor
from tokenwright.serve.service.types import Caller, Gap, GenerationRequest

# PEFT over a newer transformers
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

HELLO = [{"role": "user", "content": "Hello"}]
ANSWERED = [*HELLO, {"role": "assistant", "content": "The model said"}]
TOOLS = (Tool("look", "Looks.", SCHEMA), Tool("go", "Goes.", SCHEMA))
THINKS = {"messages": HELLO, "variables": {"enable_thinking": True}}
JSON = Grammar.json_schema(SCHEMA)

# Each field with a value that is not its default, and what it cannot be without.
SAMPLING = {
    "logit_bias": {"logit_bias": {7: 5.0, 9: -3.5}},
    "allowed_ids": {"allowed_ids": tuple(range(3, 90))},
    "banned_ids": {"banned_ids": (5, 6)},
    "bad_words": {"bad_words": ("the", "a")},
    "grammar": {"grammar": Grammar.regex("[a-z ]{20,60}")},
    "min_tokens": {"min_tokens": 12, "stop": ("e",)},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "repetition_window": {"repetition_penalty": 1.4, "repetition_window": 5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "dry_multiplier": {"dry_multiplier": 2.0},
    "dry_base": {"dry_multiplier": 2.0, "dry_base": 1.3},
    "dry_allowed_length": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "dry_breakers": {"dry_multiplier": 2.0, "dry_breakers": ("o",)},
    "dry_window": {"dry_multiplier": 2.0, "dry_window": 9},
    "temperature": {"temperature": 0.0},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.02},
    "typical_p": {"typical_p": 0.7},
    "xtc_probability": {"xtc_probability": 0.6, "xtc_threshold": 0.01},
    "xtc_threshold": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "mirostat": {"mirostat": 2},
    "mirostat_tau": {"mirostat": 1, "mirostat_tau": 2.5},
    "mirostat_eta": {"mirostat": 2, "mirostat_eta": 0.4},
    "seed": {"seed": 2**64 - 1},
    "max_tokens": {"max_tokens": 17},
    "max_seconds": {"max_seconds": 1000.0},
    "stop": {"stop": ("th", "e s", "qu")},
    "stop_ids": {"stop_ids": tuple(range(20, 30))},
    "include_stop": {"stop": ("th", "e s"), "include_stop": True},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 3},
    "best_of": {"best_of": 3},
}
SEARCHED = {"beams": 4, "length_penalty": 0.5, "early_stopping": True}
REQUESTS = {
    "messages": {"messages": HELLO},
    "tools": {"messages": HELLO, "tools": TOOLS},
    "tool_choice": {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"},
    "allowed_tools": {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "allowed_tools": ("go",)},
    "parallel_tool_calls": {
        "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False
    },
    "thinking": {"messages": HELLO, "thinking": True, "overrides": {"grammar": JSON}},
    "thinking_budget": THINKS | {"thinking_budget": 4},
    "variables": THINKS | {"overrides": {"stop": ("e", "a")}},
    "reasoning": THINKS | {"reasoning": False, "thinking_budget": 0},
    "continue_last": {"messages": ANSWERED, "continue_last": True},
    "generation_prompt": {"messages": HELLO, "generation_prompt": False},
    "markup": {"messages": [{"role": "user", "content": "a <|im_end|> b"}], "markup": True},
    "reads_calls": {"messages": HELLO, "tools": TOOLS, "reads_calls": False},
    "shows_special": {"messages": HELLO, "shows_special": True},
    "prompt": {"prompt": "the model said"},
    "add_special": {"prompt": "the model said", "add_special": False},
    "gap": {"prompt": "the model", "gap": Gap("hello 12")},
    "overrides": {"prompt": "the", "overrides": {"top_k": 4}},
    "json_object": {"messages": HELLO, "json_object": True},
    "context": {"prompt": "the model", "context": 20},
    "prediction": {"prompt": "the model", "prediction": "said hello 12 and then"},
    "speculate": {"prompt": "the model", "speculate": False},
    "drop_oldest": {"messages": ANSWERED * 300 + HELLO, "drop_oldest": True},
    "caller": {"prompt": "the model", "caller": Caller("someone", "their salt")},
    "request_id": {"prompt": "the model", "request_id": "req-7"},
    "deadline_s": {"prompt": "the model", "deadline_s": 1000.0},
    "priority": {"prompt": "the model", "priority": 3},
    "truncate_prompt_tokens": {"prompt": "the model said hello 12", "truncate_prompt_tokens": 3},
    "embed": {"prompt": "the model", "embed": True},
    "streamed": {"prompt": "the model", "streamed": True},
    "model": {"prompt": "the model", "model": "second"},
    "together": {"prompt": "the model", "together": 2},
    "arrival": {"prompt": "the model", "arrival": 1.0},
    "identity": {"prompt": "the model", "identity": "msg_7"},
    "session_ends": {"prompt": "the model", "session": "agent-7", "session_ends": True},
    "session": {"prompt": "the model", "session": "first"},
    "session_shared": {"prompt": "the model", "session": "first", "session_shared": True},
    "compared": {"prompt": "the model", "compared": "msg_6"},
    "edited": {"messages": HELLO, "edited": True},
    "cache_marks": {"messages": HELLO, "cache_marks": ((0, None, 60.0),)},
    "cache_marked_only": {"prompt": "the model", "cache_marked_only": True},
}  # fmt: skip
OPTIONS = {
    "tools": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required", "enable_thinking": True},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "go", "parallel_tool_calls": False},
    "enable_thinking": {"enable_thinking": True, "stop": ("e",)},
    "thinking_budget": {"enable_thinking": True, "thinking_budget": 3},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}, "stop": ("e",)},
    "response_format": {"enable_thinking": True, "response_format": {"type": "json_schema", "schema": SCHEMA}},
    "continue_final_message": {"continue_final_message": True},
    "markup": {"markup": True},
    "answers": {"answers": {1: (40, 41, 42)}},
    "cache": {"cache": False},
    "salt": {"salt": "s"},
    "adapter": {"adapter": "first"},
}
# What a replica's request may differ in: one text of several, and the time that is left.
OF_TEXTS = ("n", "best_of", "prompt_logprobs", "max_seconds")


@pytest.fixture(scope="module")
def how_to_open(tmp_path_factory):
    """The model and its adapters, as an LLM takes them."""
    folder = tmp_path_factory.mktemp("orders")
    model = make_talker(folder, {"use_sliding_window": False, "sliding_window": None})
    how = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}
    adapters = {name: make_adapter(model, folder / name, at, **how)[0] for at, name in enumerate(("first", "second"))}
    return {"model": model, "adapters": adapters, "pages": 1024}


@pytest.fixture(scope="module")
def router(how_to_open):
    with LLM(**how_to_open) as found:
        yield found


@pytest.fixture(scope="module")
def others(router, how_to_open):
    """Engines that compute otherwise: with other pages, without drafts, with many, by another instruction set."""
    own = arithmetic(router.loaded.facts.kernels)
    [*_, slowest] = [isa for isa in usable(find_kernels().library) if arithmetic(isa) == own]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENWRIGHT_ISA", slowest)
        find_kernels.cache_clear()
        other = LLM(**how_to_open)
    find_kernels.cache_clear()
    with (
        other,
        LLM(router.loaded, pages=2048, page_size=8, token_budget=5, speculate="off") as plain,
        LLM(router.loaded, pages=1024, max_sequences=2) as narrow,
    ):
        assert other.loaded.facts.kernels == slowest
        yield [router, plain, narrow, other]


def sent(order):
    """An order as the other side reads it."""
    [message] = read(framed([Begin(1, order, False)]))
    return message.order


def differences(ours, theirs, place=""):
    """The places in which two values differ, within objects of any kind."""
    if ours is theirs or callable(ours) or place.endswith(".matcher"):  # a grammar's state is compared by its masks
        return []
    if type(ours) is not type(theirs):
        return [place]
    if isinstance(ours, float) and place.endswith(("deadline", "max_seconds")):
        return [] if abs(ours - theirs) < 600 else [place]
    if isinstance(ours, np.ndarray):
        return [] if np.array_equal(ours, theirs) else [place]
    if isinstance(ours, list | tuple | deque):
        if len(ours) != len(theirs):
            return [place]
        return [
            one for at, pair in enumerate(zip(ours, theirs, strict=True)) for one in differences(*pair, f"{place}.{at}")
        ]
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [place]
        return [one for key in ours for one in differences(ours[key], theirs[key], f"{place}.{key}")]
    names = [field.name for field in fields(ours)] if is_dataclass(ours) else list(getattr(ours, "__dict__", ()))
    names += [name for one in type(ours).__mro__ for name in getattr(one, "__slots__", ()) if name not in names]
    if type(ours).__module__.startswith("tokenwright") and names:
        return [
            one
            for name in dict.fromkeys(names)
            for one in differences(getattr(ours, name, None), getattr(theirs, name, None), f"{place}.{name}")
        ]
    if type(ours).__module__ in ("builtins", "enum"):
        return [] if ours == theirs else [place]
    return []  # another library's object, such as a grammar's: what it allows is compared by the masks


def masks(checker: StopChecker):
    """Which ids may follow, now and after the first ones that may."""
    found, checker = [], checker.fork()
    for _ in range(12):
        words = checker.mask()
        found.append(None if words is None else np.array(words).tolist())
        token = 40 if words is None else int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0])
        found.append(checker.forced())
        if checker.advance(token) is not None:
            break
    return [*found, checker.take_text()]


def assert_carried(llm, request):
    """A replica builds each text of a request as the router has it, whatever the request has."""
    orders = list(orders_of(request, list(llm.loaded.adapters)))
    assert len(orders) == request.params.choices
    for at, order in enumerate(orders):
        found = requested(llm.llm_engine.inputs, sent(order))
        own = replace(
            request,
            params=replace(
                request.params, n=1, best_of=None, prompt_logprobs=None if at else order.params.prompt_logprobs
            ),
            prompt_logprobs_from=None if at else request.prompt_logprobs_from,
            choice=request.choice + at,
        )
        assert not differences(own, found)
        assert masks(own.stop_checker) == masks(found.stop_checker)


def test_every_option_has_a_value_here():
    """A new field is sent, or the test below says so: it needs a value."""
    for made, values, own in (
        (SamplingParams(), SAMPLING | dict.fromkeys(SEARCHED, SEARCHED), {"seed"}),
        (GenerationRequest(), REQUESTS, set()),
        (AskedOptions(), OPTIONS, set()),
    ):
        assert values.keys() == {field.name for field in fields(made)}
        same = [name for name, given in values.items() if given[name] == getattr(made, name)]
        assert not same, "a default proves nothing"
        assert own <= values.keys()


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_carried_to_a_replica(router, name):
    assert_carried(router, router.prepare("the model said", SamplingParams(**SAMPLING[name])))


@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_is_refused_and_not_lost(router, name):
    found = SamplingParams(temperature=0.0, **SEARCHED)
    assert getattr(found, name) != getattr(SamplingParams(), name)
    with pytest.raises(RequestError, match="beam"):
        list(orders_of(router.prepare("the model said", found), []))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_of_the_server_is_carried_to_a_replica(router, name):
    overrides = {"max_tokens": 20, **REQUESTS[name].get("overrides", {})}
    wanted = GenerationRequest(**REQUESTS[name] | {"overrides": overrides})
    if wanted.gap is not None:
        wanted = replace(wanted, gap=None)  # this model has no tokens for it; ids and stop ids carry a gap
    assert_carried(router, Preprocessor(router).prepare(wanted).request)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_chat_is_carried_to_a_replica(router, name):
    own, sampling = AskedOptions.split(OPTIONS[name])
    messages = ANSWERED if own.continue_final_message else [*ANSWERED, *HELLO]
    assert_carried(router, router._asked(messages, None, own, sampling).request)


def written(llm, request):
    """The events of a request."""
    inbox = Inbox()
    [handle] = llm.submit([request], inbox)
    return list(handle)


def moved(text, events):
    """What another replica is sent of a text, after these events more."""
    news = TextNews(9, list(map(packed_event, events)), False, None, 0, 0, 0)
    [report] = read(framed([Report([], [news], 0, 0)]))
    for one in report.texts[0].events:
        text.take(one)
    return sent(text.next_order(text.order.params.max_seconds))


def plain(events):
    """Events without what is the engine's own."""
    return [replace(one, sequence=0) if is_dataclass(one) else one for one in events]


def assert_moves(others, request, draws, again=2):
    """A text that moves at any token, and once more, goes on with the events that it has where it stays."""
    first = others[0]
    order = replace(next(orders_of(request, list(first.loaded.adapters))), prompt_logprobs_from=None)
    order = replace(order, params=replace(order.params, prompt_logprobs=None))
    whole = plain(written(first, requested(first.llm_engine.inputs, order)))
    assert any(isinstance(one, Token) for one in whole) and isinstance(whole[-1], Finished)
    for _ in range(again):
        text, at = TextInFlight(first.engine.accept(request), order, True), 0
        for _ in range(2):
            at, before = draws.randrange(at, len(whole) - 1), at
            left, engine = moved(text, whole[before:at]), draws.choice(others)
            rest = plain(written(engine, requested(engine.llm_engine.inputs, left)))
            assert [*whole[:at], *rest] == whole, (at, left)


LONG = {"max_tokens": 40}


@pytest.mark.parametrize("name", [name for name in SAMPLING if name not in ("n", "best_of")])
def test_a_text_moves_with_its_sampling(others, name):
    draws = random.Random(name)
    params = SamplingParams(**LONG | {"seed": draws.getrandbits(60)} | SAMPLING[name])
    assert_moves(others, others[0].prepare("the model said hello 12", params), draws)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_mirostat_goes_on_with_its_state(others, version, seed):
    params = SamplingParams(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.3, seed=seed, max_tokens=60)
    assert_moves(others, others[0].prepare("the model", params), random.Random(seed), again=4)


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "embed"])
def test_a_text_moves_with_its_request(others, name):
    draws = random.Random(name)
    overrides = {"max_tokens": 40, "seed": draws.getrandbits(60), **REQUESTS[name].get("overrides", {})}
    wanted = replace(GenerationRequest(**REQUESTS[name] | {"overrides": overrides}), gap=None)
    assert_moves(others, Preprocessor(others[0]).prepare(wanted).request, draws, again=3)


@pytest.mark.parametrize("grammar", [JSON, Grammar.regex("[a-z ]{20,60}"), Grammar.choice(["yes", "no way"])])
@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("opened", [True, False])
def test_a_text_moves_in_its_thoughts_and_behind_them(others, grammar, budget, opened):
    draws = random.Random(f"{grammar} {budget}")
    shaped = {"grammar": grammar, "seed": draws.getrandbits(60), "max_tokens": 60}
    wanted = GenerationRequest(
        messages=HELLO, variables={"enable_thinking": opened}, thinking_budget=budget, overrides=shaped
    )
    assert_moves(others, Preprocessor(others[0]).prepare(wanted).request, draws, again=3)


def test_a_draft_model_drafts_for_a_text_that_moves(router, others):
    with LLM(router.loaded, pages=1024, draft=router.loaded.facts.name) as drafting:
        for seed in range(4):
            params = SamplingParams(seed=seed, mirostat=2 * (seed % 2), max_tokens=40)
            assert_moves([others[0], drafting], others[0].prepare("the model", params), random.Random(seed))


def test_a_request_that_goes_on_from_a_written_text_is_carried():
    """`continued` tokens are written ones for a replica as well."""
    request = Request((1, 2, 3, 4), SamplingParams(seed=1), continued=2, continued_logprob=-3.5)
    [order] = orders_of(request, [])
    assert (order.prompt, order.written, order.continued_logprob) == ((1, 2), (3, 4), -3.5)
