"""Llama, and `row`, which makes the families that differ from it in some parts and names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.family import Family, TensorSource, in_layers, named, without_ending
from tokenwright.checkpoints.families.llama_like import HeadNorms, LlamaLike, Norms, Positions, Sizes, by_config, rope

LLAMA = Family(
    architectures={"LlamaForCausalLM": "llama"},
    parse=LlamaLike(by_config(mlp=True)).parse,
    prefix="model.",
    names=named("embed=embed_tokens norm=norm head=lm_head")
    | in_layers("""
        attention_norm=input_layernorm attention.q=self_attn.q_proj attention.k=self_attn.k_proj
        attention.v=self_attn.v_proj attention.o=self_attn.o_proj attention.q_norm=self_attn.q_norm
        attention.k_norm=self_attn.k_norm mlp_norm=post_attention_layernorm mlp.gate=mlp.gate_proj mlp.up=mlp.up_proj
        mlp.down=mlp.down_proj
    """),
)


def row(
    architectures: Mapping[str, str], like: LlamaLike, names: Mapping[str, TensorSource] | None = None, **more: Any
) -> Family:
    return replace(LLAMA, architectures=architectures, parse=like.parse, names={**LLAMA.names, **(names or {})}, **more)


LATER_NORMS = "attention_post_norm=post_attention_layernorm mlp_post_norm=post_feedforward_layernorm"
POST_NORMS = in_layers(LATER_NORMS)
FOUR_NORMS = in_layers(f"mlp_norm=pre_feedforward_layernorm {LATER_NORMS}")
HUNYUAN_NORMS = in_layers("attention.q_norm=self_attn.query_layernorm attention.k_norm=self_attn.key_layernorm")
SINKS = in_layers("attention.sinks=self_attn.sinks")
SINK_RENAME = without_ending(r"self_attn\.sinks")

EACH_HEAD, ALL_HEADS, LAST = HeadNorms("head"), HeadNorms("whole"), HeadNorms("head", last=True)

ERNIE_PARTS = LlamaLike(
    parts.everywhere(False), Norms(1e-5), positions=Positions(rope(500000.0)), sizes=Sizes(head_size=128), tied=True
)
