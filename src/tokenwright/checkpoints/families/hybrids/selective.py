"""Models of Mamba-1 layers: Mamba, Falcon-Mamba, and Jamba, which has attention without positions and experts."""

import re
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Literal

from tokenwright.checkpoints.families.family import MOST_MLP, TensorSource, in_layers, mlp_names, only_silu
from tokenwright.checkpoints.families.graph_builder import decoder, mixer_norms
from tokenwright.checkpoints.families.hybrids.mamba import BAMBA, MAMBA2, alone
from tokenwright.checkpoints.families.llama_like import LlamaLike, NoPositions, Sizes
from tokenwright.checkpoints.families.mixtures import MOST_EXPERTS, check_same, expert_width
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Mixture, ModelConfig
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix, Norm
from tokenwright.models.recurrent import MOST_TAPS, Inner, Places, Recurrence, Recurrent

_UNUSED = (
    *("d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple"),
    *("rescale_prenorm_residual", "residual_in_fp32", "rms_norm", "ssm_cfg", "time_step_floor", "time_step_max"),
    *("time_step_init_scheme", "time_step_min", "time_step_scale", "use_falcon_mambapy"),
    *("use_associative_scan", "use_mamba_kernels", "use_mambapy"),
)


@dataclass(frozen=True, slots=True)
class Selective:
    """The sizes of a Mamba-1 layer, and the norms of dt, B and C: learned, without weights, or none."""

    inner: int
    state: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool
    norms: Literal["learned", "plain"] | None = None
    eps: float = 1e-6


def _parse_alone(keys: JsonKeys, architecture: str, falcon: bool = False) -> tuple[ModelConfig, Graph]:
    width, tied = keys.whole("hidden_size"), keys.flag("tie_word_embeddings", True)
    keys.skip(*_UNUSED)
    config = alone(keys, architecture, 32, heads=1, kv_heads=1, head_size=width, tied_head=tied)
    sizes = Selective(
        keys.whole("intermediate_size", keys.whole("expand", 2) * width, most=MOST_MLP),  # Falcon-Mamba's differ
        keys.whole("state_size", 16, most=1 << 16),
        _rank(keys, "time_step_rank", width),
        keys.whole("conv_kernel", 4, least=2, most=MOST_TAPS),
        keys.flag("use_conv_bias", True),
        keys.flag("use_bias", False),
        "plain" if falcon else None,
        keys.number("mixer_rms_eps", 1e-6) if falcon else 0.0,
    )
    return config, decoder(config, {i: selective(config, i, sizes) for i in range(config.layers)})


def _jamba_graph(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    keys.only("mamba_inner_layernorms", True, why="Mamba-1 without its norms in this architecture")
    keys.only("sliding_window", why="a sliding window in this architecture")
    only_silu(keys)
    sizes = Selective(
        keys.whole("mamba_expand", 2) * config.width,
        keys.whole("mamba_d_state", 16, most=1 << 16),
        _rank(keys, "mamba_dt_rank", config.width),
        keys.whole("mamba_d_conv", 4, least=2, most=MOST_TAPS),
        keys.flag("mamba_conv_bias", True),
        keys.flag("mamba_proj_bias", False),
        "learned",
        config.norm_eps,
    )
    attends = enumerate(_every(keys, "attn_layer", 8, 4, config.layers))
    return config, decoder(config, {i: selective(config, i, sizes) for i, attention in attends if not attention})


def _rank(keys: JsonKeys, key: str, width: int) -> int:
    return ceil(width / 16) if keys.raw(key) in (None, "auto") else keys.whole(key, most=1 << 20)


def _every(keys: JsonKeys, key: str, period: int, offset: int, layers: int) -> list[bool]:
    period = keys.whole(f"{key}_period", period)
    offset = keys.whole(f"{key}_offset", offset, least=0)
    if offset >= period:
        raise keys.error(f"{key}_offset must be below {key}_period; correct config.json")
    return [i % period == offset for i in range(layers)]


def _mixture(keys: JsonKeys, layers: int) -> Mixture | None:
    mixed = _every(keys, "expert_layer", 2, 1, layers)
    experts = keys.whole("num_experts", 16, most=MOST_EXPERTS)
    check_same(keys, "num_local_experts", "num_experts", experts)
    chosen = keys.whole("num_experts_per_tok", 2, most=max(experts, 2))
    if experts == 1 or not any(mixed):
        return None
    width = expert_width(keys, "intermediate_size", 14336)
    return Mixture(experts, chosen, width, tuple(mixed), renormalise=False)


def selective(config: ModelConfig, layer: int, sizes: Selective) -> Recurrent:
    """A row has the channels and a gate; then dt, B and C, by a matrix from the channels; then the steps, from dt."""
    at, inner, state, rank = f"layers.{layer}.mamba", sizes.inner, sizes.state, sizes.rank
    dt = 2 * inner
    key = dt + rank
    places = Places(value=0, gate=inner, key=key, query=key + state, decay=key + 2 * state)
    recurrence = Recurrence(
        at, "scan", inner, sizes.taps, places, sizes.conv_bias, heads=1, key_heads=1, key_size=state, value_size=inner
    )
    parts = (("dt_norm", rank), ("b_norm", state), ("c_norm", state)) if sizes.norms else ()
    learned = sizes.norms == "learned"
    norms = tuple(Norm(f"{at}.{name}", "rms", size, sizes.eps, weighted=learned) for name, size in parts)
    before, after = mixer_norms(config, layer)
    return Recurrent(
        layer,
        before,
        Matrix.single(f"{at}.in", 2 * inner, config.width, sizes.bias),
        recurrence,
        Matrix.single(f"{at}.out", config.width, inner, sizes.bias),
        after,
        inner=(
            Inner(Matrix.single(f"{at}.select", rank + 2 * state, inner), 0, norms),
            Inner(Matrix.single(f"{at}.steps", inner, rank), dt),
        ),
    )


def _names(at: str) -> dict[str, TensorSource]:
    return in_layers(
        """
        mamba.in=in_proj mamba.conv=conv1d mamba.select=x_proj mamba.steps=dt_proj mamba.out=out_proj mamba.a_log=A_log
        mamba.dt=dt_bias mamba.skip=D mamba.dt_norm=dt_layernorm mamba.b_norm=b_layernorm mamba.c_norm=c_layernorm
        """,
        f"layers.{{i}}.{at}",
    )


# The recurrence adds the biases of the steps.
_STEPS = (re.compile(r"(layers\.\d+\.(?:mamba|mixer)\.)dt_proj\.bias"), r"\1dt_bias.weight")
MAMBA = replace(
    MAMBA2,
    architectures={"MambaForCausalLM": "mamba"},
    parse=_parse_alone,
    names=MAMBA2.names | _names("mixer"),
    renames=(_STEPS, *MAMBA2.renames),
    inert=re.compile(r"layers\.\d+\.mixer\.(?:dt|b|c)_layernorm\.weight"),  # Falcon-Mamba's, all ones
)
FALCON_MAMBA = replace(
    MAMBA, architectures={"FalconMambaForCausalLM": "falcon_mamba"}, parse=partial(_parse_alone, falcon=True)
)
_JAMBA = LlamaLike(
    positions=NoPositions(),
    sizes=Sizes(32, 4096, 32, 8, mlp_width=14336, context=262144),
    mixture=_mixture,
    unused=("calc_logits_for_entire_prompt", "num_logits_to_keep", "layer_types", "layers_block_type", *_UNUSED[-3:]),
    graph=_jamba_graph,
)
JAMBA = replace(
    BAMBA,
    architectures={"JambaForCausalLM": "jamba"},
    parse=_JAMBA.parse,
    names=BAMBA.names
    | _names("mamba")
    | in_layers("mlp.router=feed_forward.router")
    | mlp_names("mlp.experts.{e}", "feed_forward.experts.{e}"),
    renames=(_STEPS, *BAMBA.renames),
)
