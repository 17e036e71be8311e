"""The bits of the logits: fixed texts on the model that ships inside, for each instruction set of this processor.

The sources say which products are fused with a sum, and compilers fuse none by themselves. So a hash holds for every
compiler, and for every processor with the instruction set. `python -m tests.llm.test_bits` prints the hashes.
"""

import json
import platform
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.backends.native import KERNELS, each_isa
from tokenwright import LLM
from tokenwright.backends.native.native_kernels import find_kernels

GOLDEN = Path(__file__).parents[1] / "golden" / "bits.json"
FORMATS = {  # of weights and of the KV cache
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "float32", "weights": "bfloat16", "kv": "bfloat16"},
    "int8": {"dtype": "float32", "weights": "int8", "kv": "int8"},
    "int4": {"dtype": "float32", "weights": "int4", "kv": "int4"},
}
PROMPT = "Once upon a time, in a land far away, there lived a little fox who had never seen the sea. One day"
STEPS = 12  # the first computes the whole prompt, the others one row


def bits(form: str) -> str:
    """A hash of the logits [V], fp32, of every step of a greedy text, by the kernels that TOKENWRIGHT_ISA names."""
    find_kernels.cache_clear()  # they are found once in a process
    found = sha256()
    with LLM("stories", trace=True, **FORMATS[form]) as llm:
        run = llm.run(PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        for step in range(STEPS):
            run.step()
            found.update(np.asarray(run.logits(step), dtype="<f4").tobytes())
        run.close()
    return found.hexdigest()


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    yield
    find_kernels.cache_clear()


@each_isa
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the hashes are of x86-64's instruction sets")
@pytest.mark.parametrize("form", FORMATS)
def test_the_logits_have_the_published_bits(form: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_ISA", isa)
    assert bits(form) == json.loads(GOLDEN.read_text(encoding="utf-8"))[isa][form]


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    hashes = {}
    for isa in KERNELS:
        patch.setenv("TOKENWRIGHT_ISA", isa)
        hashes[isa] = {form: bits(form) for form in FORMATS}
    print(json.dumps(hashes, indent=2))
