"""The facts by which architectures of the llama family differ from Llama: one table row each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tokenwright.checkpoints.families.mixtures import Kind
from tokenwright.checkpoints.families.positions import Slides
from tokenwright.checkpoints.families.routed import Routed


@dataclass(frozen=True, slots=True)
class LlamaLike:
    """The differences between the architectures of the llama family."""

    # attention_bias covers q, k, v and o with "config", and not o with "config qkv"
    biases: Literal["none", "qkv", "config", "config qkv", "use_bias", "use_qkv_bias"] = "none"
    mlp_bias: bool = False  # whether the config may enable biases in the MLP
    qk_norm: Literal["head", "whole", "flag"] | None = None  # flag: of each head, if the config has use_qk_norm
    qk_norm_last: bool = False  # they stand behind the rotation
    alpha: bool = False  # whether a dynamic rotation may have an alpha
    pre_norm: bool = True  # norms before attention and MLP
    post_norm: bool = False  # norms after attention and MLP
    scaled: Literal["granite", "minicpm", "hyperclovax", "afmoe"] | None = None  # whose multipliers the config has
    slides: Slides = "none"
    # layers without rotary positions (NoPE): those of no_rope_layers, or those with full attention among windows
    nope: Literal["listed", "full"] | None = None
    # the default base of layers with a window, which have the rotation without its scaling; 0: that of the others
    local: float | None = None
    tied: bool = False  # default of tie_word_embeddings
    theta: float = 10000.0
    head_size: int | None = None  # default of head_dim; None: width / heads
    partial: float | None = None  # default of partial_rotary_factor; None: all of a head turns
    eps: float = 1e-6  # default of rms_norm_eps
    mixture: Kind | Routed | None = None  # of experts
    oss: bool = False  # gpt-oss: biases everywhere, learned logits of the heads, a clamped activation
    plain: bool = False  # StarCoder 2: LayerNorm
    bare: bool = False  # OLMo: LayerNorm without weights
    weightless: bool = False  # NanoChat: RMSNorm without weights, also behind the embedding, and capped logits
    act: str = "silu"  # default of hidden_act
    mlp_width: int | None = None  # default of intermediate_size
    gated: bool = True  # whether the MLP has gates
    biased: bool = False  # default of attention_bias and mlp_bias
    follows: bool = False  # whether files have a layer that predicts further tokens (MTP)
    sinks: bool = False  # a learned logit of each head; with positions everywhere, a base for each layer (Granite SWA)


_MISTRAL = LlamaLike(slides="all")
_GLM_MOE = Routed("sigmoid", ("noaux_tc",), 1, 1.0, renormalise=True)
_EXAONE_MOE = LlamaLike(
    qk_norm="head",
    eps=1e-5,
    slides="pattern",
    nope="full",
    mixture=replace(_GLM_MOE, factor=2.5, experts="num_experts", shared="num_shared_experts"),
)
_APERTUS = LlamaLike(biases="config", mlp_bias=True, qk_norm="head", eps=1e-5, act="xielu", gated=False)
_ARIA = LlamaLike(biases="config", mixture="aria")
_EMU3 = LlamaLike(biases="config", mlp_bias=True, theta=1000000.0, eps=1e-5)
_PHI3 = LlamaLike(slides="given", eps=1e-5, partial=1.0)
_QWEN2 = LlamaLike(biases="qkv", slides="upper")
_QWEN3 = LlamaLike(biases="config", qk_norm="head", slides="upper", head_size=128)
LLAMA_LIKE: Mapping[str, LlamaLike] = {
    "LlamaForCausalLM": LlamaLike(biases="config", mlp_bias=True),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": replace(_QWEN2, follows=True),
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "MixtralForCausalLM": LlamaLike(slides="given", theta=1000000.0, mixture="mixtral", eps=1e-5),
    "Qwen2MoeForCausalLM": LlamaLike(biases="qkv", slides="even", mixture="qwen2"),
    "Qwen3MoeForCausalLM": LlamaLike(biases="config", qk_norm="head", slides="flagged", mixture="qwen3"),
    "MellumForCausalLM": LlamaLike(
        biases="config",
        qk_norm="head",
        head_size=128,
        slides="listed",
        theta=500000.0,
        local=10000.0,
        mixture="mellum",
    ),
    "AriaTextForCausalLM": _ARIA,
    "AriaForConditionalGeneration": _ARIA,
    "Emu3ForCausalLM": _EMU3,
    "Emu3ForConditionalGeneration": _EMU3,
    "GotOcr2ForConditionalGeneration": replace(_QWEN2, tied=True),
    "MossTranscribeDiarizeForConditionalGeneration": replace(_QWEN3, tied=True),
    "NanoChatForCausalLM": LlamaLike(
        biases="config", qk_norm="head", qk_norm_last=True, act="relu2", gated=False, weightless=True
    ),
    "GptOssForCausalLM": LlamaLike(
        biases="config", slides="alternate", theta=150000.0, head_size=64, eps=1e-5, mixture="gpt-oss", oss=True
    ),
    "SmolLM3ForCausalLM": LlamaLike(
        biases="config", mlp_bias=True, slides="nope", nope="listed", tied=True, theta=2000000.0
    ),
    "GraniteForCausalLM": LlamaLike(biases="config", mlp_bias=True, scaled="granite"),
    "Phi3ForCausalLM": _PHI3,
    "Phi4MultimodalForCausalLM": _PHI3,
    "OlmoForCausalLM": LlamaLike(biases="config", bare=True),
    "Olmo2ForCausalLM": LlamaLike(biases="config", qk_norm="whole", pre_norm=False, post_norm=True, eps=1e-5),
    "Olmo3ForCausalLM": LlamaLike(
        biases="config",
        qk_norm="whole",
        pre_norm=False,
        post_norm=True,
        eps=1e-5,
        theta=500000.0,
        slides="pattern",
        local=0,
    ),
    "Exaone4ForCausalLM": LlamaLike(
        qk_norm="head", pre_norm=False, post_norm=True, eps=1e-5, slides="pattern", nope="full"
    ),
    "Ernie4_5ForCausalLM": LlamaLike(biases="use_bias", tied=True, theta=500000.0, head_size=128, eps=1e-5),
    "GlmForCausalLM": LlamaLike(biases="config qkv", eps=1.5625e-07, head_size=128, partial=0.5),
    "Glm4ForCausalLM": LlamaLike(biases="config qkv", post_norm=True, eps=1.5625e-07, head_size=128, partial=0.5),
    "SeedOssForCausalLM": LlamaLike(biases="config qkv", mlp_bias=True, head_size=128),
    "MinistralForCausalLM": LlamaLike(slides="typed"),
    "Ministral3ForCausalLM": LlamaLike(slides="given", eps=1e-5),
    "Glm4MoeForCausalLM": LlamaLike(biases="config qkv", qk_norm="flag", eps=1e-5, partial=0.5, mixture=_GLM_MOE),
    "ExaoneMoEForCausalLM": _EXAONE_MOE,  # as published
    "ExaoneMoeForCausalLM": _EXAONE_MOE,  # as transformers writes it
    "MiniMaxM2ForCausalLM": LlamaLike(qk_norm="whole", theta=5000000.0, head_size=128, partial=1.0, mixture="minimax"),
    "Ernie4_5_MoeForCausalLM": LlamaLike(biases="use_bias", tied=True, theta=500000.0, eps=1e-5, mixture="ernie"),
    "OlmoeForCausalLM": LlamaLike(biases="config", qk_norm="whole", eps=1e-5, mixture="olmoe"),
    "ArceeForCausalLM": LlamaLike(biases="config", mlp_bias=True, eps=1e-5, act="relu2", gated=False),
    "HunYuanDenseV1ForCausalLM": LlamaLike(biases="config", qk_norm="head", qk_norm_last=True, eps=1e-5, alpha=True),
    "HYV3ForCausalLM": LlamaLike(
        biases="config",
        qk_norm="head",
        head_size=128,
        theta=11158840.0,
        eps=1e-5,
        mixture=Routed(
            *("sigmoid", ("noaux_tc",), 1, 2.826),
            renormalise=True,
            experts="num_experts",
            shared="num_shared_experts",
            shared_count=1,
            factor_key="router_scaling_factor",
        ),
    ),
    "ApertusForCausalLM": _APERTUS,
    "HunYuanMoEV1ForCausalLM": LlamaLike(
        biases="config", qk_norm="head", qk_norm_last=True, eps=1e-5, alpha=True, mixture="hunyuan"
    ),
    "Apertus1p5TextForCausalLM": _APERTUS,
    "FlexOlmoForCausalLM": LlamaLike(
        biases="config", qk_norm="whole", pre_norm=False, post_norm=True, theta=500000.0, mixture="olmoe"
    ),
    "GraniteSWAForCausalLM": LlamaLike(
        biases="config", mlp_bias=True, scaled="granite", slides="typed", tied=True, eps=1e-5, sinks=True
    ),
    "GraniteMoeSWAForCausalLM": LlamaLike(
        biases="config", scaled="granite", slides="typed", mixture="granite", sinks=True
    ),
    "Jais2ForCausalLM": LlamaLike(biases="config", mlp_bias=True, plain=True, act="relu2", gated=False, biased=True),
    "AfmoeForCausalLM": LlamaLike(
        biases="config",
        qk_norm="head",
        post_norm=True,
        eps=1e-5,
        slides="every",
        nope="full",
        head_size=128,
        scaled="afmoe",
        mixture="afmoe",
    ),
    "CwmForCausalLM": LlamaLike(eps=1e-5, slides="typed", theta=1000000.0, head_size=128),
    "Dots1ForCausalLM": LlamaLike(
        biases="config", qk_norm="head", slides="upper", mixture=replace(_GLM_MOE, dense=0, renormalise=False)
    ),
    "HeliumForCausalLM": LlamaLike(eps=1e-8, theta=100000.0, head_size=128),
    "HyperCLOVAXForCausalLM": LlamaLike(biases="config", mlp_bias=True, scaled="hyperclovax"),
    "GraniteMoeForCausalLM": LlamaLike(biases="config", scaled="granite", mixture="granite"),
    "GraniteMoeSharedForCausalLM": LlamaLike(biases="config", scaled="granite", mixture="granite"),
    "NemotronForCausalLM": LlamaLike(biases="config", mlp_bias=True, plain=True, act="relu2", gated=False, partial=0.5),
    "StableLmForCausalLM": LlamaLike(biases="use_qkv_bias", plain=True, partial=0.25),
    "SolarOpenForCausalLM": LlamaLike(
        biases="config qkv",
        eps=1e-5,
        theta=1000000.0,
        head_size=128,
        partial=1.0,
        mixture=replace(_GLM_MOE, dense=0),
        mlp_width=10240,  # its layers have experts alone
    ),
    "MiniCPMForCausalLM": LlamaLike(biases="config", tied=True, scaled="minicpm"),
    "Starcoder2ForCausalLM": LlamaLike(
        biases="use_bias", slides="given", tied=True, plain=True, act="gelu_pytorch_tanh", gated=False
    ),
}
