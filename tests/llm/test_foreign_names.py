"""Names and habits of llama-cpp-python, vLLM, transformers and ollama: each is answered with ours, by a named error."""

import inspect
from dataclasses import fields

import pytest

from tests.engines import assert_at_rest
from tokenwright import LLM, RequestError, SamplingParams
from tokenwright.checks import read_table
from tokenwright.llm.outputs import Completion

SECTIONS = ("completion", "embedding", "methods", "model", "text")
OF_COMPLETION, OF_EMBEDDING, OF_METHODS, OF_MODEL, OF_TEXT = map(read_table, SECTIONS)
SAMPLING = {field.name for field in fields(SamplingParams)}
OF_CHAT = set(inspect.signature(LLM.chat).parameters)


@pytest.fixture(scope="module")
def llm():
    with LLM("stories", pages=64) as model:
        yield model
        assert_at_rest(model)


@pytest.fixture(scope="module")
def done(llm):
    return llm.generate("Once", max_tokens=2, seed=1)[0]


def named(ours: str) -> bool:
    """Whether it is a name, and no sentence."""
    return " " not in ours


@pytest.mark.parametrize("name", sorted(OF_MODEL))
def test_options_of_a_model(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is no option of LLM") as told:
        LLM("stories", **{name: 1})
    ours = OF_MODEL[name]
    assert ours in str(told.value)
    assert not named(ours) or ours in inspect.signature(LLM.__init__).parameters


@pytest.mark.parametrize("name", sorted(OF_TEXT))
def test_options_of_a_text(llm: LLM, name: str) -> None:
    ours = OF_TEXT[name]
    for call in (lambda **given: llm.generate("Once", **given), SamplingParams):
        with pytest.raises(RequestError, match=f"^{name} is no sampling parameter") as told:
            call(**{name: 1})
        assert ours in str(told.value)
    known = SAMPLING | OF_CHAT | set(inspect.signature(LLM.generate).parameters)
    assert not named(ours) or ours in known


@pytest.mark.parametrize("name", sorted(OF_EMBEDDING))
def test_options_of_an_embedding(llm: LLM, name: str) -> None:
    for call in (llm.embed, llm.rerank):
        if name not in inspect.signature(call).parameters:
            with pytest.raises(RequestError, match=f"^{name} is no option of {call.__name__}") as told:
                call("Once", **{name: 1})
            assert OF_EMBEDDING[name] in str(told.value)


@pytest.mark.parametrize("name", sorted(OF_METHODS))
def test_methods(llm: LLM, name: str) -> None:
    if name == "__call__":
        with pytest.raises(RequestError, match="an LLM is no function: generate"):
            llm("Once", max_tokens=3)
        return
    with pytest.raises(AttributeError, match="an LLM has no attribute") as told:
        getattr(llm, name)
    ours = OF_METHODS[name]
    assert ours in str(told.value)
    if named(ours):
        assert inspect.getattr_static(LLM, ours.partition(".")[0]) is not None


@pytest.mark.parametrize("name", sorted(OF_COMPLETION))
def test_what_a_completion_has(done: Completion, name: str) -> None:
    with pytest.raises(AttributeError, match="a Completion has no attribute") as told:
        getattr(done, name)
    assert OF_COMPLETION[name] in str(told.value)
    first = OF_COMPLETION[name].replace("sum(", "").partition(".")[0].rstrip(")")
    assert getattr(done, first) is not None or first == "observed"


def test_habits(llm: LLM, done: Completion) -> None:
    with pytest.raises(RequestError, match=r"completion\.text"):
        done["choices"]
    with pytest.raises(RequestError, match="tempature is no sampling parameter; did you mean temperature"):
        SamplingParams(tempature=0.5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="prompt is no sampling parameter; did you mean prompts"):
        llm.generate(prompt="Once")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="window_ is no option of LLM; did you mean window"):
        LLM("stories", window_=3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        _ = llm.zzz  # type: ignore[attr-defined]


def test_the_tables_are_long() -> None:
    assert sum(map(len, (OF_MODEL, OF_TEXT, OF_EMBEDDING, OF_METHODS, OF_COMPLETION))) >= 300
