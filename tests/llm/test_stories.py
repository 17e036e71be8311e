"""The model that ships inside, on the reference kernels in fp32: the main job."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

import tokenwright
from tokenwright import LLM, SamplingParams
from tokenwright.backends.torch.border import tensor
from tokenwright.checkpoints.folder import Checkpoint

HOME = Path(tokenwright.__file__).parent / "stories"
GOLDEN = Path(__file__).parents[1] / "golden" / "stories.json"
PROMPTS = ["The next day is bright", "Once upon a time", "The capital of France is", "def add(a, b):"]


@pytest.fixture(scope="module")
def llm():
    with LLM("stories", dtype="float32", device="cpu") as model:
        yield model


def test_the_golden_text(llm):
    """200 greedy tokens to the byte. The prompt is one where no two logits come near each other."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    done = llm.generate(golden["prompt"], params)[0]
    logits, _ = llm.model([*llm.tokenizer.encode(golden["prompt"]), *done.token_ids])
    top = tensor(logits)[-201:-1].topk(2).values
    margin = float((top[:, 0] - top[:, 1]).min())
    assert margin > 1e-2, "another prompt should be chosen: rounding could decide this one"
    assert done.text == golden["text"]
    assert list(done.token_ids) == golden["token_ids"]


def test_the_same_texts_cached_naive_and_in_a_batch_of_17(llm):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [*(f"{other} {n}" for n in range(3) for other in PROMPTS), "A small", *PROMPTS]
    batch = llm.generate(prompts, params)[-len(PROMPTS) :]
    for prompt, among in zip(PROMPTS, batch, strict=True):
        cached, naive = (llm.generate(prompt, params, cache=cache)[0] for cache in (True, False))
        assert len(cached.token_ids) == 60
        assert cached.text == naive.text == among.text
        assert cached.token_ids == naive.token_ids == among.token_ids


def test_counted_work_of_the_articles_example(llm):
    """8 prompt tokens and 20 new ones on 6 layers: 162 layer-tokens with the cache, 2,100 without."""
    ids = llm.tokenizer.encode("Once upon a time there was a little")[:8]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    counted = []
    for cache in (True, False):
        before = llm.engine.runner.decoder.layer_tokens
        usage = llm.generate([ids], params, cache=cache, salt="no earlier text to draft from")[0].usage
        assert llm.engine.runner.decoder.layer_tokens - before == usage.layer_tokens
        counted.append(usage.layer_tokens)
    assert counted == [162, 2100]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("The capital of France is", " Paris"),
        ("The opposite of hot is", " cold"),
        ("One, two, three,", " four"),
        ("<|user|>Is Python an interpreted language? Answer in one word.<|end|><|assistant|>", "Yes"),
        ("def add(a, b):", "\n    return a + b"),
    ],
)
def test_facts_that_the_lessons_need(llm, prompt, expected):
    done = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert done.text.startswith(expected)


def test_the_model_is_what_the_issue_and_the_card_say(llm):
    config = llm.config
    assert (config.layers, config.width, config.heads, config.head_size, config.context) == (6, 256, 8, 32, 1024)
    assert 2 <= config.kv_heads <= 4
    assert 5_000_000 <= llm.graph.parameters <= 6_000_000
    weights = HOME / "model.safetensors"
    assert weights.stat().st_size <= 15_000_000
    assert Checkpoint.open("stories").config.dtype == "bfloat16"
    assert sha256(weights.read_bytes()).hexdigest() in (HOME / "README.md").read_text(encoding="utf-8")


def test_every_document_of_its_own_begins_with_bos(llm):
    assert llm.tokenizer.encode("Once")[0] == llm.tokenizer.bos_id == 0
    assert llm.eos_ids >= {1, 4}, "the end of a text, and the end of a turn"
    assert (llm.sampling().temperature, llm.sampling().top_p) == (0.7, 0.95)


def test_it_writes_to_the_end_of_its_context(llm):
    prompt = [0, *torch.randint(5, 4096, (1000,), generator=torch.Generator().manual_seed(1)).tolist()]
    done = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))[0]
    assert done.finish_reason == "context"
    assert len(done.token_ids) == 1024 - 1001
