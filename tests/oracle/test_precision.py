"""bf16 and fp16, weights, activations and cache alike, against the oracle in fp32 with the same rounded weights.

The stated tolerance, in standard deviations of the oracle's logits (measured on 2026-11-21, worst of all kinds,
in brackets):

            largest difference    root mean square
    bf16    0.25  (0.165)         0.03   (0.023)
    fp16    0.05  (0.032)         0.005  (0.0028)

and we are no further from fp32 than transformers is when it computes in the same dtype (measured: 0.7 to 1.0 of
its root mean square, because our rotation and softmax stay in fp32).
"""

import copy
from itertools import product

import pytest
import torch

from tests.models.fixtures import KINDS
from tests.oracle.harness import Recorder, greedy, make_subject, prompt_of, write
from tests.profiles import some
from tokenwright.formats import DType

PROMPT, NEW = 60, 40
LARGEST: dict[DType, float] = {"bfloat16": 0.25, "float16": 0.05}
RMS: dict[DType, float] = {"bfloat16": 0.03, "float16": 0.005}
AGREE: dict[DType, float] = {"bfloat16": 0.9, "float16": 0.95}


# Not of mixtures of experts: where two scores are close, rounding chooses other experts, which is no small difference.
# Nor of delta rules: the norm behind one makes a difference of numbers near zero as large as any.
ROUGH = ("experts", "linear_num_key_heads")
SMOOTH = [kind for kind, settings in KINDS.items() if not any(part in key for key in settings for part in ROUGH)]


@pytest.mark.parametrize(("kind", "dtype"), some(list(product(SMOOTH, LARGEST)), 5))
def test_rounding_stays_within_the_stated_tolerance(kind: str, dtype: DType) -> None:
    subject = make_subject(kind, dtype)
    text = prompt_of(PROMPT + NEW, seed=7)  # forced, so that an early difference does not change what follows
    sampler = Recorder({0: text})
    [written] = write(subject.engine(sampler), [greedy(text[:PROMPT], NEW, prompt_logprobs=True)])
    theirs = subject.logits(text[:-1], written.limit)
    with subject.pinned(written.limit) as oracle, torch.no_grad():
        rounded = copy.deepcopy(oracle).to(getattr(torch, dtype))
        their_rounded = rounded(torch.tensor([text[:-1]]), use_cache=False).logits[0].float()
    ours = torch.stack([sampler.rows[0][place] for place in range(len(text) - 1)])

    difference = (ours - theirs) / theirs.std()
    their_difference = (their_rounded - theirs) / theirs.std()
    rms, their_rms = (float(one.pow(2).mean().sqrt()) for one in (difference, their_difference))
    assert float(difference.abs().max()) <= LARGEST[dtype]
    assert rms <= RMS[dtype]
    assert rms <= 1.1 * their_rms
    assert float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()) >= AGREE[dtype]
