"""Random models against transformers, from folders that transformers writes: their config.json and tensors as saved.

A prompt in chunks, then cached steps, with reference kernels and native ones. Where transformers itself is further than
the tolerance from its logits in fp64, ours may differ by four times that.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.fixtures import write_tokenizer
from tests.models.random_models import MAKERS, PLAIN, Config, plain_model, random_hybrid
from tests.models.weights import make_model
from tests.oracle.harness import MARGIN, TOLERANCE, Recorder, greedy, prompt_of, subject_of, write
from tests.oracle.test_families import all_kernels
from tests.profiles import some
from tokenwright.backends.native.compile import compiles
from tokenwright.backends.torch.reference_kernels import ReferenceKernels

WRITTEN = 12


def _rounding(oracle: PreTrainedModel, tokens: Sequence[int], logits: torch.Tensor) -> float:
    """The distance of transformers' logits from those in fp64: above the tolerance after some random delta rules."""
    exact = copy.deepcopy(oracle).double()
    exact.config._experts_implementation = "eager"
    with torch.no_grad():
        return float((exact(torch.tensor([list(tokens)]), use_cache=False).logits[0] - logits).abs().max())


def check(
    config: Config,
    seed: int,
    folder: Path,
    published: Callable[[Path], None] | None = None,
    original: bool = True,
    native_only: bool = False,
) -> None:
    """published: makes the files those of the hub, which transformers reads too. original: with their names.

    native_only: without the reference kernels, where native ones compute the model.
    """
    oracle = make_model(config, seed)
    oracle.save_pretrained(folder, save_original_format=original)
    write_tokenizer(folder)
    if published is not None:
        published(folder)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    subject = subject_of(folder, oracle, config["model_type"])
    length = 1 + 37 * seed % 150
    every = all_kernels() if compiles(subject.graph) else {"reference": ReferenceKernels()}
    for kernels in [every["native"]] if native_only and "native" in every else every.values():
        sampler = Recorder()
        engine = subject.engine(
            sampler, page_size=(1, 16, 64)[seed % 3], token_budget=(7, 64)[seed % 2], kernels=kernels
        )
        [text] = write(engine, [greedy(prompt_of(length, seed), WRITTEN, prompt_logprobs=True)])
        theirs, rows = subject.logits(text.tokens[:-1], text.limit), sampler.rows[text.id]
        assert sorted(rows) == list(range(length + WRITTEN - 1))
        worst = max(float((row - theirs[place]).abs().max()) for place, row in rows.items())
        assert worst <= TOLERANCE or worst <= 4 * _rounding(oracle, text.tokens[:-1], theirs), (worst, config)
        highest, runner_up = theirs[length - 1 :].topk(2).values.unbind(-1)
        agrees = theirs[length - 1 :].argmax(-1) == theirs.new_tensor(text.written).long()
        assert agrees[highest - runner_up > MARGIN].all(), config


@pytest.mark.parametrize("seed", range(len(MAKERS)))
def test_a_random_hybrid_of_each_family_is_transformers(seed: int, tmp_path: Path) -> None:
    check(random_hybrid(seed), seed, tmp_path, native_only=seed not in some(range(len(MAKERS))))


@pytest.mark.parametrize("kind", PLAIN)
def test_a_small_model_of_other_architectures_is_transformers(kind: str, tmp_path: Path) -> None:
    """In CI the reference computes a part of them: all of its operations are in tests/oracle/test_families.py."""
    check(plain_model(kind), 1, tmp_path, native_only=kind not in some(list(PLAIN)))


@pytest.mark.parametrize(
    "config", [plain_model("exaone"), *map(random_hybrid, (4, 13, 24, 51))], ids=lambda config: config["model_type"]
)
def test_tensors_are_named_as_transformers_computes_with_them(config: Config, tmp_path: Path) -> None:
    check(config, 1, tmp_path, original=False)


def test_norms_and_biases_of_ax_k1_as_published(tmp_path: Path) -> None:
    """A norm behind the dense layer, which nothing reads, and no biases of the choice of experts."""

    def published(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: one for name, one in tensors.items() if not name.endswith("e_score_correction_bias")}
        assert len(kept) < len(tensors)
        norms = {"model.layers.0.post_mlp_layernorm.weight": torch.full((64,), 3.0)}
        save_file(kept | norms, folder / "model.safetensors", metadata={"format": "pt"})

    check(plain_model("axk1"), 1, tmp_path, published)


@pytest.mark.sweep
def test_200_random_hybrids_are_transformers(tmp_path: Path) -> None:
    wrong: dict[int, str] = {}
    for seed in range(len(MAKERS), 200 + len(MAKERS)):
        try:
            check(random_hybrid(seed), seed, tmp_path / str(seed))
        except AssertionError as error:
            wrong[seed] = str(error)
    assert wrong == {}
