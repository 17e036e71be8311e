"""GPT-2's published demonstration, on its real weights where there are any.

    TOKENWRIGHT_GPT2=/path/to/gpt2 pytest tests/oracle/test_gpt2_demo.py

The folder is openai-community/gpt2 as it is on the hub: config.json, model.safetensors, and tokenizer.json or
vocab.json and merges.txt.
"""

import os

import pytest

from tokenwright import LLM, SamplingParams

WEIGHTS = os.environ.get("TOKENWRIGHT_GPT2") or None
PROMPT = "The next day is bright"
CONTINUATION = " and sunny, and the sun is shining. The sun is shining, and the moon is shining."


@pytest.mark.skipif(WEIGHTS is None, reason="not run: TOKENWRIGHT_GPT2 names no folder with GPT-2's real weights")
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "naive"])
def test_gpt2_published_demo(cache: bool) -> None:
    assert WEIGHTS is not None
    with LLM(WEIGHTS, device="cpu", dtype="float32", kv_memory=2**26) as llm:
        [completion] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20), cache=cache)
    assert completion.text == CONTINUATION
    assert completion.usage.completion_tokens == 20
