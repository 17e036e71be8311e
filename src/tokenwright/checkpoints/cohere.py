"""Cohere's Command-R and Aya: attention and MLP side by side over one LayerNorm without bias, and scaled logits."""

from dataclasses import replace

from tokenwright.checkpoints.blocks import decoder
from tokenwright.checkpoints.family import MOST_LAYERS, MOST_VOCAB, activation, dtype, heads_of, size_of_head
from tokenwright.checkpoints.llama import LLAMA
from tokenwright.checkpoints.positions import read_rope
from tokenwright.checkpoints.strict import Keys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig, Scales
from tokenwright.models.graph import Graph


def _parse(keys: Keys, architecture: str) -> tuple[ModelConfig, Graph]:
    layers = keys.whole("num_hidden_layers", most=MOST_LAYERS)
    width = keys.whole("hidden_size", most=1 << 20)
    heads, kv_heads = heads_of(keys)
    head_size = keys.whole("head_dim", size_of_head(keys, width, heads), most=1 << 16)
    rope, reach = read_rope(keys, 500000.0, head_size, keys.whole("max_position_embeddings", 8192, most=MAX_TOKENS))
    keys.only("use_qk_norm", False, why="a LayerNorm of each head of q and k with weights of its own")
    biases = keys.flag("attention_bias", False)
    config = ModelConfig(
        family="cohere",
        architecture=architecture,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_width=keys.whole("intermediate_size", most=1 << 24),
        vocab_size=keys.whole("vocab_size", most=MOST_VOCAB),
        context=keys.whole("model_max_length", reach, most=MAX_TOKENS),  # Command-R: 131,072 beside 8,192
        positions=rope,
        windows=(None,) * layers,
        rotary=(True,) * layers,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        norm_bias=False,
        activation=activation(keys, "hidden_act", "silu"),
        gated=True,
        qkv_bias=biases,
        out_bias=biases,
        parallel="one norm",
        scales=Scales(logits=keys.number("logit_scale", 0.0625)),
        tied_head=keys.flag("tie_word_embeddings", True),
        dtype=dtype(keys),
    )
    return config, decoder(config)


COHERE = replace(LLAMA, architectures={"CohereForCausalLM": "cohere"}, parse=_parse, neighbours=True)
