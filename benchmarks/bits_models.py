"""Small random models for `bits.py`, one for each kind of arithmetic that `stories` does not have.

This module uses neither Tokenwright nor torch's random numbers: the files depend on numpy's frozen RandomState alone,
so two editions read the same bytes. Queries and keys are scaled up, so attention is peaked and rounding shows.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 320
SPECIALS = ["<unk>", "<s>", "</s>"]
_LLAMA: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "torch_dtype": "float32", "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512,
        "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen3": _LLAMA | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
        "tie_word_embeddings": True, "rope_scaling": _YARN, "max_position_embeddings": 128,
    },
    "mistral": _LLAMA | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "smollm3": _LLAMA | {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "mlp_bias": False,
        "no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2, "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def write(folder: Path) -> dict[str, str]:
    """Write every model to its own folder under `folder`. Returns the SHA-256 of its weights by name."""
    return {name: write_model(folder / name, config) for name, config in CONFIGS.items()}


def write_model(home: Path, config: dict[str, Any]) -> str:
    """Write a model of one of these architectures to a new folder. Returns the SHA-256 of its weights."""
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = _gpt2_shapes(config) if config["model_type"] == "gpt2" else _llama_shapes(config)
    save_file({key: _weight(key, shape) for key, shape in shapes.items()}, home / "model.safetensors")
    _write_tokenizer(home)
    return sha256((home / "model.safetensors").read_bytes()).hexdigest()


def _weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Unit noise, seeded by the tensor's name, with the gain for its place in the block."""
    noise = np.random.RandomState(crc32(name.encode())).standard_normal(shape)
    if name.endswith("bias"):
        noise = 0.2 * noise
    elif len(shape) == 1:
        noise = (1.8 if "q_norm" in name or "k_norm" in name else 1.0) + 0.1 * noise
    elif any(part in name for part in ("embed_tokens", "wte", "wpe", "lm_head")):
        noise = 0.16 * noise
    else:
        conv = ".attn." in f".{name}" or ".mlp.c_" in name  # GPT-2 stores its matrices as [in, out]
        gain = 1.8 if any(part in name for part in ("q_proj", "k_proj", "c_attn")) else 1.0
        if any(part in name for part in ("o_proj", "down_proj", "c_proj")):
            gain = 0.3
        noise = gain * noise / shape[0 if conv else 1] ** 0.5
    return np.ascontiguousarray(noise, dtype=np.float32)


def _gpt2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCAB, d), "wpe.weight": (config["n_positions"], d)}
    matrices = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
    for at in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{at}.{norm}.weight": (d,), f"h.{at}.{norm}.bias": (d,)}
        for matrix, shape in matrices.items():
            shapes |= {f"h.{at}.{matrix}.weight": shape, f"h.{at}.{matrix}.bias": shape[1:]}
    return shapes | {"ln_f.weight": (d,), "ln_f.bias": (d,)}


def _llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, mlp, heads, kv_heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    size = config.get("head_dim", d // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, d)
    matrices = {
        "self_attn.q_proj": (heads * size, d), "self_attn.k_proj": (kv_heads * size, d),
        "self_attn.v_proj": (kv_heads * size, d), "self_attn.o_proj": (d, heads * size),
        "mlp.gate_proj": (mlp, d), "mlp.up_proj": (mlp, d), "mlp.down_proj": (d, mlp),
    }  # fmt: skip
    norms = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    for at in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{at}.{name}.weight": shape for name, shape in (matrices | norms).items()}
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
