"""Every public name of an LLM works over an engine of this process and over replicas, or says what to do instead."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from tokenwright import LLM, SamplingParams
from tokenwright.cluster.cluster_llm import cluster_of
from tokenwright.cluster.processes import open_cluster
from tokenwright.engine.loop import Inbox
from tokenwright.errors import RequestError, TokenwrightError

pytestmark = pytest.mark.slow

PROMPT, SHORT = "Once upon a time", {"max_tokens": 3, "temperature": 0.0}
TALK = [{"role": "user", "content": "Hello"}]


async def listed(pieces):
    return [one.text async for one in pieces]


def awaited(make):
    return lambda llm, _: asyncio.run(make(llm))


def submitted(llm, _):
    inbox = Inbox()
    [handle] = llm.submit([llm.prepare(PROMPT, SamplingParams(**SHORT))], inbox)
    transcript = llm.transcript(handle)
    while not transcript.ended:
        for delivery in inbox.get():
            transcript.add(delivery)
    return transcript.completion().text


def let_write(llm, _):
    [handle] = llm.submit([llm.prepare(PROMPT, SamplingParams(max_tokens=500, temperature=0.0))], Inbox())
    try:
        handle.let_write(3)
    finally:
        handle.cancel()


def load_cache(llm, folder):
    if cluster_of(llm) is None:
        llm.generate(PROMPT * 9, **SHORT)
        assert llm.save_cache(folder / "c", PROMPT * 9)
    return llm.load_cache(folder / "c")


def fork(llm, _):
    with llm.run(PROMPT, **SHORT) as run:
        run.step()
        llm.fork(run, 0).close()


def read(name):
    return lambda llm, _: getattr(llm, name)


# What a user does with each name.
CALLS = {
    "achat": awaited(lambda llm: llm.achat(TALK, **SHORT)),
    "achat_stream": awaited(lambda llm: listed(llm.achat_stream(TALK, **SHORT))),
    "aembed": awaited(lambda llm: llm.aembed([PROMPT])),
    "agenerate": awaited(lambda llm: llm.agenerate([PROMPT], **SHORT)),
    "astream": awaited(lambda llm: listed(llm.astream(PROMPT, **SHORT))),
    "chat": lambda llm, _: llm.chat(TALK, **SHORT).text,
    "chat_stream": lambda llm, _: [one.text for one in llm.chat_stream(TALK, **SHORT)],
    "check": lambda llm, _: llm.check(),
    "embed": lambda llm, _: llm.embed([PROMPT]).tolist(),
    "fork": fork,
    "generate": lambda llm, _: [one.token_ids for one in llm.generate([PROMPT, "The"], **SHORT)],
    "generate(observe)": lambda llm, _: llm.generate(PROMPT, observe=True, **SHORT)[0].observed.hidden.shape,
    "handle.let_write": let_write,
    "inspect": lambda llm, _: llm.inspect(lambda engine: engine.pool.page_size),
    "kv_bytes": lambda llm, _: llm.kv_bytes(7),
    "load_cache": load_cache,
    "model": lambda llm, _: llm.model([1, 2])[0].shape,
    "over": lambda llm, _: LLM.over(llm.llm_engine).generate(PROMPT, **SHORT)[0].text,
    "prepare": lambda llm, _: llm.prepare(PROMPT, SamplingParams(**SHORT)).prompt,
    "render": lambda llm, _: llm.render(TALK).ids,
    "rerank": lambda llm, _: llm.rerank(PROMPT, ["a dog", "a cat"]).tolist(),
    "run": lambda llm, _: llm.run(PROMPT).close(),
    "sampling": lambda llm, _: llm.sampling(top_k=3),
    "save_cache": lambda llm, folder: llm.save_cache(folder / "c", PROMPT * 9),
    "score": lambda llm, _: llm.score(PROMPT).tolist(),
    "stream": lambda llm, _: [one.text for one in llm.stream(PROMPT, **SHORT)],
    "submit": submitted,
    "transcript": submitted,
    **{
        name: read(name)
        for name in (
            *("config", "context", "conversations", "costs", "device", "dtype", "engine", "eos_ids", "generation"),
            *("graph", "kernels", "kv_format", "kv_memory", "loaded", "options", "prepared", "relevance", "specs"),
            *("template", "tokenizer", "weight_bytes", "weights"),
        )
    },
}
OF_THIS_PROCESS = {
    "engine",
    "fork",
    "generate(observe)",
    "inspect",
    "load_cache",
    "loaded",
    "model",
    "run",
    "save_cache",
}
EQUAL = {"chat", "chat_stream", "generate", "kv_bytes", "prepare", "render", "sampling", "stream", "submit"}
CLOSED = {"close", "over", "handle.let_write"}


@pytest.fixture(scope="module")
def llm():
    with LLM("stories", kv_memory="64MB", trace=True) as found:
        yield found


@pytest.fixture(scope="module")
def replicas():
    with open_cluster("stories", 1, {"kv_memory": 64 << 20}) as found:
        assert cluster_of(found) is not None
        yield found


def test_every_public_name_is_called_here():
    public = {name for name in dir(LLM) if not name.startswith("_")}
    assert public == {name for name in CALLS if name.isidentifier()} | {"close"}


@pytest.mark.parametrize("name", CALLS)
def test_a_name_works_in_this_process(llm, tmp_path, name):
    CALLS[name](llm, tmp_path)


@pytest.mark.parametrize("name", CALLS)
def test_a_name_works_over_replicas_or_says_what_to_do(llm, replicas, tmp_path, name):
    if name in OF_THIS_PROCESS:
        with pytest.raises(RequestError, match=r"needs an engine in this process.*LLM\("):
            CALLS[name](replicas, tmp_path)
    elif name == "handle.let_write":
        with pytest.raises(RequestError, match="serve without --replicas"):
            CALLS[name](replicas, tmp_path)
    else:
        found = CALLS[name](replicas, tmp_path)
        if name in EQUAL:
            assert found == CALLS[name](llm, tmp_path)
        if name in ("embed", "score", "rerank"):
            assert np.array_equal(found, CALLS[name](llm, tmp_path))


@pytest.mark.parametrize("opened", [lambda: LLM("stories", kv_memory="64MB"), lambda: open_cluster("stories", 1, {})])
def test_a_closed_one_says_so(tmp_path, opened):
    """Facts of the model stay; what needs the engine raises an error of ours."""
    llm = opened()
    llm.close()
    llm.close()
    for name, call in CALLS.items():
        if name not in CLOSED:
            with suppress(TokenwrightError):
                call(llm, tmp_path)
    for name in ("generate", "stream", "chat", "embed", "check", "submit"):
        with pytest.raises(TokenwrightError, match="closed"):
            CALLS[name](llm, tmp_path)
