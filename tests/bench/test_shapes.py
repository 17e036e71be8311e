"""Checkpoints with random weights: complete, the same every time, and of a scale that trained models have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tokenwright import LLM, SamplingParams
from tokenwright.bench import shapes
from tokenwright.errors import CheckpointError, RequestError

SMALL: dict[str, dict[str, Any]] = {
    "qwen": {**shapes.SHAPES["qwen05"], "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6,
             "num_hidden_layers": 3, "vocab_size": 4500},
    "llama": {**shapes.SHAPES["llama1b"], "hidden_size": 96, "head_dim": 16, "intermediate_size": 160,
              "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 4096},
    "gpt": {**shapes.SHAPES["gpt2"], "n_embd": 96, "n_head": 4, "n_layer": 3, "vocab_size": 4500},
}  # fmt: skip
IDS = [(7 * at * at + 13 * at) % 4000 + 5 for at in range(40)]


@pytest.fixture(params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shapes, "SHAPES", SMALL)
    return shapes.ready(request.param, tmp_path)


def test_transformers_and_ours_read_the_same_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([IDS])).logits[0]  # [tokens, vocabulary]
    with LLM(str(folder), dtype="float32") as llm:
        ours = llm.model(IDS)[0]
    torch.testing.assert_close(torch.from_numpy(ours[-1]), logits[-1], atol=1e-3, rtol=1e-4)
    assert 3 < logits.std() < 5


def test_every_id_has_a_text_and_no_text_has_the_made_up_ones(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    vocab_size = SMALL[folder.name]["vocab_size"]
    assert len(tokenizer) == vocab_size
    assert tokenizer.decode([vocab_size - 1])
    assert max(tokenizer.encode("Once upon a time")) < 4096
    with LLM(str(folder)) as llm:
        [done] = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert len(done.token_ids) == 8


def test_the_weights_are_those_of_the_seed(folder: Path, tmp_path: Path) -> None:
    again, other = (shapes.make(folder.name, tmp_path / f"seed {seed}", seed) for seed in (0, 1))
    first = (folder / "model.safetensors").read_bytes()
    assert first == (again / "model.safetensors").read_bytes()
    assert first != (other / "model.safetensors").read_bytes()


def test_what_is_there_is_not_made_again(folder: Path) -> None:
    before = (folder / "config.json").stat().st_mtime_ns
    assert shapes.ready(folder.name, folder.parent) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before


def test_progress_counts_the_bytes_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", SMALL)
    told: list[tuple[int, int]] = []
    folder = shapes.ready("llama", tmp_path, lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] < (folder / "model.safetensors").stat().st_size  # and the header


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="shape 'huge' is not known; use tiny, gpt2, qwen05, llama1b"):
        shapes.ready("huge", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file.*set TOKENWRIGHT_CACHE to another folder"):
        shapes.ready("tiny", tmp_path / "file")
