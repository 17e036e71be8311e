"""`inspect`: what a model is, without its weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.models.fixtures import CHAT, make_checkpoint
from tokenwright.checkpoints.folder import Checkpoint


def test_page(run: Run, model: Path) -> None:
    result = run("inspect", model)
    assert result.exit_code == 0, result.output
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines()[:7])
    assert lines["layers"] == "3"
    assert lines["heads"] == "4 of size 16, over 4 KV heads (1 to one)"
    assert lines["positions"] == "rotary, base 10,000"
    assert "KV cache       1.5 KiB a token, 768.0 KiB a context (float32)\n" in result.stdout
    assert result.stdout.endswith(f"chat template\n\n{CHAT}\n")


def test_weights_are_not_read(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(Checkpoint, "tensors", tensors)
    assert run("inspect", model).exit_code == 0


def test_json(run: Run, model: Path) -> None:
    found = json.loads(run("inspect", model, "--json").stdout)
    assert (found["layers"], found["heads"], found["kv_heads"], found["head_size"]) == (3, 4, 4, 16)
    assert found["kv_bytes_per_token"] == 3 * 2 * 4 * 16 * 4  # layers, K and V, heads, size, bytes of a float32
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert (found["bos_id"], found["eos_ids"], found["chat_template"]) == (1, [2], CHAT)


@pytest.mark.parametrize(
    ("kind", "changes", "told"),
    [
        ("gpt2", None, ["positions      learned\n", "LayerNorm", "head tied to the embedding"]),
        ("llama3", None, ["rotary, base 500,000, Llama3 scaling (factor 8, low_freq_factor 1,"]),
        ("mistral", None, ["a window of 48 tokens in 3 of 3 layers"]),
        (
            "granite",
            None,
            ["scales         embedding 3, attention 0.3, residual 2.2, logits 1.25\n", "step           one call"],
        ),
        ("olmo2", None, ["norm           RMSNorm after attention and MLP; of the whole q and k\n"]),
        (
            "phi3-long",
            None,
            ["Long scaling (original_context 128, short 8 factors, long 8 factors, attention_"],
        ),
        ("starcoder2", None, ["norm           LayerNorm before attention and MLP\n"]),
        ("smollm3", None, ["none in 1 of 4 layers", "4 of size 16, over 2 KV heads (2 to one)"]),
        (
            "gemma2",
            None,
            [
                "norm           RMSNorm before and after attention and MLP\n",
                "soft caps      attention scores 10, logits 5\n",
                "step           one call",
            ],
        ),
        (
            "gemma3-vision",
            None,
            [
                "rotary, base 1,000,000, Linear scaling (factor 8); base 10,000 in layers with a window\n",
                "skipped        multi_modal_projector (2 tensors), vision_tower (",
            ],
        ),
        ("cohere", None, ["block          attention and MLP side by side\n", "LayerNorm without bias before"]),
        (
            "neox",
            None,
            ["rotary, base 10,000, 4 dimensions of each head\n", "LayerNorm before", "step           one call"],
        ),
        ("llama2", {"bos_token_id": None}, ["BOS, EOS"]),
    ],
)
def test_families(run: Run, tmp_path: Path, kind: str, changes: dict[str, Any] | None, told: list[str]) -> None:
    result = run("inspect", make_checkpoint(tmp_path / kind, kind, changes=changes).path)
    assert result.exit_code == 0, result.output
    assert all(words in result.stdout for words in told), result.stdout


def test_no_chat_template(run: Run, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "gpt2", "gpt2").path
    settings = folder / "tokenizer_config.json"
    content = {key: value for key, value in json.loads(settings.read_text()).items() if key != "chat_template"}
    settings.write_text(json.dumps(content))
    assert run("inspect", folder).stdout.endswith("chat template  none\n")


def test_what_the_model_suggests_for_sampling_is_told(run: Run, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama2", "llama2").path
    suggested = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1, "suppress_tokens": [5, 9]}
    (folder / "generation_config.json").write_text(json.dumps(suggested | {"no_repeat_ngram_size": 3}))
    told = "temperature 0.6, repetition_penalty 1.1, banned_ids 2 of them; not available here: no_repeat_ngram_size\n"
    assert told in run("inspect", folder).stdout
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert found["suggested_sampling"] == {"temperature": 0.6, "repetition_penalty": 1.1, "banned_ids": [5, 9]}
    assert found["unsupported_sampling"] == ["no_repeat_ngram_size"]
    written = run("generate", "the", "--model", folder, "-n", 2)
    assert "asks for no_repeat_ngram_size, which Tokenwright does not have yet" in written.stderr
    assert run("generate", "the", "--model", folder, "-n", 2, "--quiet").stderr == ""
