"""A small random Mistral model with a byte-level tokenizer, for `pairs.py` and the server's benchmarks.

This module uses neither Tokenwright nor torch's random numbers: the files depend on numpy's frozen RandomState only,
so two editions read the same bytes. Queries and keys are scaled up, so attention is peaked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 320
SPECIALS = ["<unk>", "<s>", "</s>"]
CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 128, "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_model(home: Path, config: dict[str, Any]) -> None:
    """Write a model with the keys of CONFIG, of any sizes, to a new folder."""
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({key: _weight(key, shape) for key, shape in _shapes(config).items()}, home / "model.safetensors")
    _write_tokenizer(home)


def _weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Unit noise, seeded by the tensor's name, with the gain for its place in the block."""
    noise = np.random.RandomState(crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        noise = 1.0 + 0.1 * noise
    elif any(part in name for part in ("embed_tokens", "lm_head")):
        noise = 0.16 * noise
    else:
        gain = 1.8 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
        if any(part in name for part in ("o_proj", "down_proj")):
            gain = 0.3
        noise = gain * noise / shape[1] ** 0.5
    return np.ascontiguousarray(noise, dtype=np.float32)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, mlp, heads, kv_heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    size = d // heads
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv_heads * size, d),
        "self_attn.v_proj": (kv_heads * size, d), "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (mlp, d), "mlp.up_proj": (mlp, d), "mlp.down_proj": (d, mlp),
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,), "lm_head.weight": (VOCAB, d)
    }  # fmt: skip
    for at in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{at}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: ids 0 to 2 are special, then one id for each byte."""
    words = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
