"""Operations of a config.json that Tokenwright does not compute, which `inspect` and `plan` name."""

import re
from collections.abc import Mapping
from typing import Any

from tokenwright.checkpoints.files.json_keys import JsonKeys, neutral, shown

# A key, and its operation unless its value is neutral; {} is the value.
_OPERATIONS: tuple[tuple[str, str], ...] = (
    ("index_topk", "attention to the {} tokens that an indexer chooses"),
    ("index_topk_blocks", "attention to blocks of tokens that an indexer chooses"),
    ("sparse_attention_config", "attention to blocks of tokens that an indexer chooses"),
    ("attention_chunk_size", "chunked attention, {} tokens at a time"),
    ("attn_temperature_tuning", "queries scaled by their position"),
    ("interleave_moe_layer_step", "experts whose input is scaled by their score"),
    ("lru_width", "gated linear recurrences (RG-LRU)"),
    ("multi_query", "one KV head in a fused projection"),
    ("is_encoder_decoder", "an encoder"),
    ("cross_attention_layers", "cross-attention"),
    ("swa_head_dim", "heads of another size in layers with a window"),
    ("attention_value_scale", "values of another size than keys, times a factor"),
    ("zero_expert_num", "experts that return their input"),
)
_LAYER_TYPES: Mapping[str, str] = {
    "chunked_attention": "sliding chunked attention",
    "recurrent": "gated linear recurrences (RG-LRU)",
}
# Beginnings of architectures' names, where keys do not tell, and what they need.
_ARCHITECTURES: tuple[tuple[str, str], ...] = (
    ("Baichuan|BaiChuan", "one tensor of q, k and v (W_pack)"),
    (
        "ChatGLM",
        "the tensor names of ChatGLM (folders whose names end in -hf have those of GlmForCausalLM)",
    ),
    ("MiniCPM3", "latent attention beside scaled embeddings, residuals and logits"),
    ("KimiK3", "gates of latent attention, attention over residual streams"),
    ("Gemma4(?:Unified)?Assistant", "keys and values of the model that it drafts for"),
    ("AXK1", "norms behind experts but not behind MLPs"),
    ("Beam", "residual additions scaled by their number, queries scaled by their position"),
    ("Blt", "cross-attention between bytes and patches"),
    ("CpmAnt", "learned biases of relative positions"),
    ("Doge", "attention to tokens that a learned mask chooses"),
    ("Dory", "queries, keys and residual streams of length 1 (nGPT)"),
    ("Kolibri1", "a learned bias of the choice of experts that is added to their logits"),
    ("GitFor", "an encoder whose results are the first tokens, post-norms with biases"),
    ("GPTNeoXJapanese", "a bias of attention in the last layer alone"),
    ("Laguna|Lfm3", "one gate for each head"),
    ("Qwen4Exp", "hyper-connections, embeddings of n-grams"),
    ("HrmText", "layers that run several times"),
    ("Zaya", "convolutions of queries and keys"),
    ("Moshi|TrOCR", "an encoder"),
    ("DiffLlama", "differential attention"),
    ("MiniMax(?:Text01)?For|BailingHybrid", "linear attention with a decay (Lightning)"),
    ("BitNet", "norms before the last linears of attention and MLP"),
    ("JetMoe", "experts of attention"),
    ("Reformer|BigBird", "sparse attention"),
    ("OPT|XGLM|BioGpt|OpenAIGPT|CTRL|GPTNeoFor", "learned or sinusoidal positions in a block that is not GPT-2's"),
    ("GPTJ|CodeGen|Phi(?:For|Moe|moe)", "a bias of the head"),
    ("RWKV|Rwkv", "the recurrence of RWKV"),
    ("xLSTM", "the recurrences of xLSTM"),
    ("Cohere2Moe", "experts beside attention that read the same input"),
    ("Fuyu|Persimmon", "LayerNorm with biases of each head of q and k"),
    ("ModernBertDecoder", "a norm of the embeddings, and an MLP before the head"),
    ("Zamba2", "blocks of attention and an MLP that several layers share"),
    ("Zamba(?!2)", "Mamba-1 layers of several heads"),
    ("Bloom|M[Pp][Tt]For", "biases of scores by the distance (ALiBi)"),
    ("Dbrx", "the keys and tensor names of DBRX"),
    ("Flint", "the keys and tensor names of Flint"),
    (
        r"(?!ModernBertDecoder)(?i:\w*bert|electra|roformer|xmod|xlm|xlnet|data2vec|ernie(?!4))",
        "an encoder's attention to later tokens",
    ),
)

_BOTH_WAYS = "attention to later tokens"
NEEDS: Mapping[str, str] = {  # by the architecture of a GGUF file
    **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), "RWKV's recurrence"),
    **dict.fromkeys(("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed"), _BOTH_WAYS),
    **dict.fromkeys(("modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe"), _BOTH_WAYS),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), f"{_BOTH_WAYS}, for text by diffusion"),
    **dict.fromkeys(("t5", "t5encoder"), "an encoder with biases of relative positions"),
    **dict.fromkeys(("deci", "openelm"), "layers with other numbers of heads than others"),
    **dict.fromkeys(("phi2", "phimoe"), "a bias of the head"),
    **dict.fromkeys(("bloom", "mpt"), "biases of scores by the distance (ALiBi)"),
    **dict.fromkeys(("paddleocr", "hunyuan_vl"), "positions of a picture's parts"),
    "arctic": "experts beside an MLP of the same layer",
    "baichuan": "ALiBi in its 13B model, which the file does not tell from others",
    "bitnet": "norms before the last linears of attention and MLP",
    "chameleon": "a LayerNorm of each head of q and k",
    "clip": "an image encoder without a text model; give the file of the text model",
    "cogvlm": "weights of their own for the tokens of pictures",
    "dbrx": "the keys and tensor names of DBRX",
    "glm-dsa": "attention to the tokens that an indexer chooses",
    "grovemoe": "experts that share smaller ones",
    "llama4": "chunked attention, and experts whose input is scaled by their score",
    "mimo2": "values of another size than keys, beside windows",
    "minicpm3": "latent attention beside scaled embeddings, residuals and logits",
    "mistral4": "latent attention with queries scaled by their position",
    "plamo2": "norms of dt, B and C beside Mamba-2's heads",
    "plm": "latent attention before an MLP without gates",
    "smallthinker": "a router that reads the input of attention",
    "step35": "one gate for each head",
    "wavtokenizer-dec": "a decoder of sound",
}


def lacking_operations(keys: JsonKeys) -> tuple[str, ...]:
    """The operations that the keys stand for and Tokenwright lacks, each once, in the tables' order."""
    found = [words.format(_value(keys.raw(key))) for key, words in _OPERATIONS if _needed(keys, key)]
    types = keys.raw("layer_types")
    listed = types if isinstance(types, list) else []
    found += [words for kind, words in _LAYER_TYPES.items() if kind in listed]
    return tuple(dict.fromkeys(found))


def what_it_lacks(keys: JsonKeys, architecture: str) -> str:
    """The same as a clause about an unknown architecture, whose name may tell more."""
    by_name = [words for start, words in _ARCHITECTURES if re.match(start, architecture)]
    lacking = dict.fromkeys([*lacking_operations(keys), *by_name])
    if lacking:
        return f"it needs {', '.join(lacking)}, which Tokenwright lacks"
    return "Tokenwright has no family that maps its keys and tensors (docs/families.md tells how to add one)"


def _needed(keys: JsonKeys, key: str) -> bool:
    """MiMo-V2's files call their windows chunks as well."""
    windows = key == "attention_chunk_size" and keys.raw("sliding_window") == keys.raw(key)
    return not neutral(keys.raw(key)) and not windows


def _value(value: Any) -> str:
    return f"{value:,}" if type(value) is int else shown(value)
