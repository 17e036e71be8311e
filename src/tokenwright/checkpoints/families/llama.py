"""Llama: the family that others are made of. `row` makes those that differ from it in some parts and names."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.family import Family, TensorSource, named
from tokenwright.checkpoints.families.llama_like import HeadNorms, LlamaLike, Norms, Positions, by_config, rope

_LLAMA_PARTS = LlamaLike(by_config(mlp=True))
LLAMA = Family(
    architectures={"LlamaForCausalLM": "llama"},
    parse=_LLAMA_PARTS.parse,
    prefix="model.",
    names=named(
        {
            "embed": "embed_tokens",
            "norm": "norm",
            "head": "lm_head",
            "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
            "layers.{i}.attention.q": "layers.{i}.self_attn.q_proj",
            "layers.{i}.attention.k": "layers.{i}.self_attn.k_proj",
            "layers.{i}.attention.v": "layers.{i}.self_attn.v_proj",
            "layers.{i}.attention.o": "layers.{i}.self_attn.o_proj",
            "layers.{i}.attention.q_norm": "layers.{i}.self_attn.q_norm",
            "layers.{i}.attention.k_norm": "layers.{i}.self_attn.k_norm",
            "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp.gate": "layers.{i}.mlp.gate_proj",
            "layers.{i}.mlp.up": "layers.{i}.mlp.up_proj",
            "layers.{i}.mlp.down": "layers.{i}.mlp.down_proj",
        }
    ),
    inert=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)


def row(
    architectures: Mapping[str, str], like: LlamaLike, names: Mapping[str, Any] | None = None, **more: Any
) -> Family:
    return replace(LLAMA, architectures=architectures, parse=like.parse, names=LLAMA.names | named(names or {}), **more)


def in_layers(**pairs: str) -> dict[str, str]:
    """Names of tensors of a layer. __: for a dot in ours."""
    return {f"layers.{{i}}.{ours.replace('__', '.')}": f"layers.{{i}}.{theirs}" for ours, theirs in pairs.items()}


POST_NORMS = in_layers(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
HUNYUAN_NORMS = in_layers(attention__q_norm="self_attn.query_layernorm", attention__k_norm="self_attn.key_layernorm")
SINKS = {"layers.{i}.attention.sinks": TensorSource("layers.{i}.self_attn.sinks")}
SINK_RENAME = (re.compile(r"(layers\.\d+\.self_attn\.sinks)"), r"\1.weight")

EACH_HEAD, ALL_HEADS, LAST = HeadNorms("head"), HeadNorms("whole"), HeadNorms("head", last=True)

ERNIE_PARTS = LlamaLike(
    parts.everywhere(False), Norms(1e-5), positions=Positions(rope(500000.0)), head_size=128, tied=True
)
