"""Decoders of BART's kind by themselves, and GPT-1: norms of the embeddings, or behind each addition."""

import re
from collections.abc import Mapping
from dataclasses import replace

from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.family import Family, TensorSource, named, pairs
from tokenwright.checkpoints.families.gpt2 import GPT2, LIKE_GPT2, OPT, gelus
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import ModelConfig, Scales
from tokenwright.models.graph import Graph, Normed
from tokenwright.models.op import Norm, Op

_DECODER_KEYS = pairs("""
    hidden_size=d_model num_hidden_layers=decoder_layers num_attention_heads=decoder_attention_heads
    intermediate_size=decoder_ffn_dim
""")
_ONLY = {"use_prompt": False, "use_learned_position_embeddings": True, "layernorm_embedding": True, "afn": "gelu"}
_UNUSED = (
    *("is_encoder_decoder", "share_encoder_decoder_embeddings", "prompt_length"),
    *("prompt_mid_dim", "dropout", "activation_dropout", "decoder_layerdrop", "init_std"),
)


def _normed(before: bool, embed: bool) -> parts.GraphReader:
    """embed: a norm of the embeddings with their positions. before: norms before attention and MLP; else the residual
    stream passes one behind each addition, the last before the head.
    """

    def read(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:  # noqa: ARG001
        def normed(name: str) -> Normed:
            return Normed(Norm(name, "layer", config.width, config.norm_eps))

        graph = decoder(config)
        blocks: list[Op] = [normed("embed_norm")] if embed else []
        for at, op in enumerate(graph.blocks):
            blocks += [op] if before else [op, normed(f"layers.{at // 2}.{('attention', 'mlp')[at % 2]}_norm")]
        if not before and isinstance(last := blocks.pop(), Normed):
            graph = replace(graph, head=replace(graph.head, norm=last.norm))
        return config, replace(graph, blocks=tuple(blocks))

    return read


def _alone(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    for key, value in _ONLY.items():
        keys.only(key, value, why=f"another {key}")
    keys.skip(*_UNUSED, *(name for name in keys.names if name.startswith("encoder_")))
    return {"vocab_size": keys.whole("decoder_vocab_size", facts["vocab_size"])}


def _decoder(
    names: Mapping[str, str],
    *,
    before: bool = False,  # norms before attention and MLP
    embed: bool = False,  # a norm of the embeddings and their positions
    scale: bool = False,
    skipped: int = 2,
) -> Family:
    like = parts.LlamaLike(
        lambda _: parts.Biases(True, True, True),
        parts.Norms(lambda _: 1e-5, {"norm": "layer", "pre_norm": before}),
        positions=parts.NoPositions(learned=True),
        mlps=gelus("gelu"),
        tied=True,
        scales=lambda keys, facts: Scales(facts["width"] ** 0.5 if keys.flag("scale_embedding", scale) else 1.0),
        more=(_alone,),
        keys=_DECODER_KEYS,
        graph=_normed(before, embed),
    )
    return replace(
        OPT,
        architectures=names,
        parse=like.parse,
        names=OPT.names
        | named("norm=layer_norm embed_norm=layernorm_embedding")
        | {"positions": TensorSource("embed_positions", skipped=skipped)},
        aliases={"output_projection.weight": "lm_head.weight"},
        inert=re.compile(rf"{OPT.inert.pattern}|layers\.\d+\.encoder_attn(?:_layer_norm)?\..+"),
    )


DECODERS = (
    _decoder({"BartForCausalLM": "bart", "MvpForCausalLM": "mvp", "TrOCRForCausalLM": "trocr"}, embed=True),
    _decoder({"PLBartForCausalLM": "plbart"}, embed=True, scale=True),
    _decoder({"MarianForCausalLM": "marian"}, skipped=0),
    _decoder({"MBartForCausalLM": "mbart"}, before=True, embed=True),
    _decoder({"BlenderbotForCausalLM": "blenderbot", "PegasusForCausalLM": "pegasus"}, before=True, skipped=0),
    replace(
        GPT2,
        architectures={"OpenAIGPTLMHeadModel": "openai-gpt"},
        parse=replace(
            LIKE_GPT2,
            norms=parts.Norms(1e-5, {"norm": "layer", "pre_norm": False}, "layer_norm_epsilon"),
            more=(_alone,),
            graph=_normed(before=False, embed=False),
        ).parse,
        names=GPT2.names | named("embed=tokens_embed positions=positions_embed"),
    ),
)
