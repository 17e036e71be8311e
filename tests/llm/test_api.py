"""The Python API as one types it: keywords, conversations, arrays, and what an LLM says of itself."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.engines import assert_at_rest, held, reached
from tests.models.fixtures import make_checkpoint
from tokenwright import LLM, EngineError, RequestError, SamplingParams
from tokenwright.llm.model import LoadedModel
from tokenwright.units import binary

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TALK = [{"role": "user", "content": "the and"}]
PROMPTS = ["the", "of and", [5, 6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, _ = make_checkpoint(tmp_path_factory.mktemp("api") / "model", "llama3")
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return LoadedModel(str(folder))


@pytest.fixture
def llm(loaded):
    with LLM(loaded, pages=64, page_size=4) as model:
        yield model
        assert_at_rest(model)


def test_fields_of_sampling_params_are_keywords(llm):
    [right] = llm.generate("the", GREEDY)
    same = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    assert llm.generate("the", **same)[0].token_ids == right.token_ids
    assert "".join(piece.text for piece in llm.stream("the", **same)) == right.text

    async def streamed() -> list[int]:
        return [piece.token_id async for piece in llm.astream("the", **same)]

    assert tuple(asyncio.run(streamed())) == right.token_ids
    assert llm.chat(TALK, **same).token_ids == llm.chat(TALK, GREEDY).token_ids


def test_keywords_are_put_before_params_and_defaults(llm):
    short = [done.usage.completion_tokens for done in llm.generate(PROMPTS, GREEDY, max_tokens=2)]
    assert short == [2, 2, 2]
    several = [GREEDY, None, SamplingParams(max_tokens=5, ignore_eos=True)]
    found = llm.generate(PROMPTS, several, max_tokens=3, ignore_eos=True, seed=None)
    assert [done.usage.completion_tokens for done in found] == [3, 3, 3]
    assert GREEDY.max_tokens == 6


@pytest.mark.parametrize("params", [None, GREEDY])
def test_a_keyword_that_is_no_field_is_refused_with_the_nearest(llm, params):
    with pytest.raises(RequestError, match=r"max_token is no sampling parameter; did you mean max_tokens\?"):
        llm.generate("the", params, max_token=5)
    with pytest.raises(RequestError, match=r"zzz is no sampling parameter$"):
        llm.stream("the", params, zzz=1)
    with pytest.raises(RequestError, match="did you mean the method stream, or chat_stream"):
        llm.chat(TALK, params, stream=True)
    with pytest.raises(RequestError, match="max_tokens must be a whole number"):
        llm.chat(TALK, params, max_tokens=-1)


def test_beams_draw_nothing_whatever_is_said_of_drawing(llm):
    for given in ({"temperature": 1}, {"temperature": 0.7}, {"seed": 3}, {"seed": 0}, {"top_k": 5}):
        with pytest.raises(RequestError, match=f"beam search draws nothing; leave {next(iter(given))} out"):
            llm.generate("the", beams=2, **given)
    with pytest.raises(RequestError, match="beam search draws nothing; leave seed out"):
        SamplingParams(beams=2, seed=3)
    assert llm.generate("the", beams=2, temperature=0, max_tokens=3)[0].score is not None


def test_a_conversation_is_streamed(llm):
    right = llm.chat(TALK, GREEDY)
    stream = llm.chat_stream(TALK, GREEDY)
    assert "".join(piece.text for piece in stream) == right.text
    assert stream.completion.token_ids == right.token_ids

    async def both() -> tuple[str, tuple[int, ...]]:
        pieces = [piece.text async for piece in llm.achat_stream(TALK, GREEDY)]
        return "".join(pieces), (await llm.achat(TALK, GREEDY)).token_ids

    assert asyncio.run(both()) == (right.text, right.token_ids)


def test_many_prompts_in_an_event_loop(llm):
    right = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]

    async def found() -> list[tuple[int, ...]]:
        return [done.token_ids for done in await llm.agenerate(PROMPTS, GREEDY)]

    assert asyncio.run(found()) == right

    async def cancelled() -> None:
        with held(llm):
            task = asyncio.create_task(llm.agenerate(PROMPTS, GREEDY))
            await reached(lambda: llm.llm_engine.streams._receivers)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())


def test_a_failed_prompt_leaves_the_others_their_completions(llm):
    forward = llm.engine.runner.forward

    def spoilt(step):
        output = forward(step)
        for chunk, rows in zip(step.chunks, output.rows, strict=True):
            if chunk.sequence.tokens[:3] == [5, 6, 7]:
                output.logits[rows.start : rows.stop] = float("nan")
        return type(output)(output.rows, output.logits)

    llm.engine.runner.forward = spoilt
    with pytest.raises(EngineError, match="a prompt failed") as caught:
        asyncio.run(llm.agenerate(PROMPTS, GREEDY))
    assert [done is not None for done in caught.value.completions] == [True, True, False]


@pytest.mark.parametrize(
    "ids",
    [np.array([5, 6, 7]), np.array([5, 6, 7], dtype=np.int32), torch.tensor([5, 6, 7]), [np.int64(5), 6, np.uint8(7)]],
)
def test_ids_may_be_an_array(llm, ids):
    right = llm.generate([5, 6, 7], GREEDY)[0].token_ids
    assert llm.generate(ids, GREEDY)[0].token_ids == right
    assert llm.generate([ids, "the"], GREEDY)[0].token_ids == right
    assert np.array_equal(llm.score(ids), llm.score([5, 6, 7]))
    assert np.array_equal(llm.embed(ids), llm.embed([[5, 6, 7]]))


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (np.array([[5, 6]]), r"an array as a prompt has ids, one after another; this one is int64 \[1, 2\]"),
        (torch.tensor([0.5]), r"this one is torch.float32 \[1\]"),
        (np.array([True]), r"this one is bool \[1\]"),
        (np.array([5, 320]), "from 0 to 319, not 320"),
    ],
)
def test_arrays_that_are_no_prompt_are_refused(llm, ids, told):
    with pytest.raises(RequestError, match=told):
        llm.generate(ids)


def test_scores_are_arrays(llm):
    one, other = llm.score("the", [" of", " and the"])
    assert one.dtype == np.float64
    assert other.sum() == pytest.approx(float(sum(other)))
    assert len(llm.score("the and of")) == len(llm.tokenizer.encode("the and of")) - 1


def test_an_llm_says_what_it_is(folder):
    llm = LLM(folder, pages=63, page_size=16, kv="int8", window=64, weights="int8:32")
    said = repr(llm)
    assert said.startswith(f"<LLM {folder}: LlamaForCausalLM, int8:32 weights of ")
    assert f"KV cache int8, window 64 of {binary(llm.kv_memory)}; " in said
    assert said.endswith(f"{llm.kernels} kernels on cpu>")
    llm.close()
    assert repr(llm) == "<LLM, closed>"


def test_a_bar_shows_how_many_prompts_have_ended(llm, capfd):
    right = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    assert capfd.readouterr().err == ""
    assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY, progress=True)] == right
    out, err = capfd.readouterr()
    assert out == ""
    assert "3/3 prompts" in err
    assert "tok/s" in err


def test_the_import_loads_nothing_that_it_does_not_need():
    """What makes `import tokenwright` and `from tokenwright import LLM` quick; seconds would measure the machine."""
    script = (
        "import sys, tokenwright; first = set(sys.modules); from tokenwright import LLM; "
        "print('torch' in first, 'numpy' in first, len([name for name in first if name.startswith('tokenwright')])); "
        "print([name for name in ('rich', 'jinja2', 'llguidance', 'huggingface_hub', 'fastapi', 'typer', "
        "'torch._dynamo', 'torch._inductor', 'sympy', 'httpx', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, needless = done.stdout.splitlines()
    assert first == "False False 1"
    assert needless == "[]"
