"""Architectures with experts that differ from Llama in some parts or names: a row each."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families import mixtures
from tokenwright.checkpoints.families.family import (
    Family,
    TensorSource,
    in_layers,
    mlp_names,
    stacked_experts,
    without_ending,
)
from tokenwright.checkpoints.families.llama import (
    ALL_HEADS,
    EACH_HEAD,
    ERNIE_PARTS,
    HUNYUAN_NORMS,
    LAST,
    POST_NORMS,
    row,
)
from tokenwright.checkpoints.families.llama_like import (
    HeadNorms,
    LlamaLike,
    MLPs,
    Norms,
    Positions,
    Sizes,
    by_config,
    rope,
)
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, ROUTED_NEXT, ROUTED_RENAMES, Routed

_AFMOE_ROUTER = {
    "layers.{i}.mlp.router": TensorSource("layers.{i}.mlp.router.gate"),
    "layers.{i}.mlp.correction": TensorSource("layers.{i}.mlp.expert_bias", wide=True),
}
_EXPERT_BIAS = without_ending(r"mlp\.expert_bias")

_GLM_MOE = Routed("sigmoid", ("noaux_tc",), 1, 1.0, renormalise=True)

MIXTURES: tuple[Family, ...] = (
    row(
        {"MixtralForCausalLM": "mixtral"},
        LlamaLike(norms=Norms(1e-5), positions=Positions(rope(1000000.0), windows="given"), mixture=mixtures.mixtral),
        mixtures.MIXTRAL_NAMES,
    ),
    row(
        {"MiniMaxM2ForCausalLM": "minimax_m2"},
        LlamaLike(
            qk_norm=ALL_HEADS,
            positions=Positions(parts.counted_rope(5000000.0)),
            sizes=Sizes(head_size=128),
            mixture=mixtures.minimax,
        ),
        mixtures.MIXTRAL_NAMES | mixtures.MINIMAX_NAMES,
        renames=mixtures.BIAS_RENAMES,
    ),
    row(
        {"Qwen2MoeForCausalLM": "qwen2_moe"},
        LlamaLike(parts.qwen2_biases, positions=Positions(windows="even"), mixture=mixtures.QWEN2),
        mixtures.QWEN_NAMES,
    ),
    row(
        {"Qwen3MoeForCausalLM": "qwen3_moe"},
        LlamaLike(by_config(), qk_norm=EACH_HEAD, positions=Positions(windows="flagged"), mixture=mixtures.QWEN3),
        mixtures.QWEN_NAMES,
    ),
    row(
        {"OlmoeForCausalLM": "olmoe"},
        LlamaLike(by_config(), Norms(1e-5), ALL_HEADS, mixture=mixtures.olmoe, more=(parts.clip,)),
        mixtures.QWEN_NAMES,
    ),
    row(
        {"FlexOlmoForCausalLM": "flex_olmo"},
        LlamaLike(
            by_config(),
            parts.behind(1e-6),
            ALL_HEADS,
            Positions(rope(500000.0)),
            mixture=mixtures.olmoe,
            more=(parts.clip,),
        ),
        POST_NORMS | mixtures.QWEN_NAMES,
    ),
    row(
        {"MellumForCausalLM": "mellum"},
        LlamaLike(
            by_config(),
            qk_norm=EACH_HEAD,
            positions=Positions(parts.two_ropes(500000.0, 10000.0), windows="listed"),
            sizes=Sizes(head_size=128),
            mixture=mixtures.MELLUM,
        ),
        mixtures.QWEN_NAMES,
    ),
    row(
        {"GptOssForCausalLM": "gpt_oss"},
        LlamaLike(
            parts.gpt_oss_biases,
            Norms(1e-5),
            positions=Positions(rope(150000.0), windows="alternate"),
            sizes=Sizes(head_size=64),
            mlps=MLPs("clamped_swiglu"),
            mixture=mixtures.gpt_oss,
            facts={"sink_logits": True},
        ),
        mixtures.GPT_OSS_NAMES,
        renames=mixtures.GPT_OSS_RENAMES,
        stacks=mixtures.GPT_OSS_STACKS,
        plain=mixtures.GPT_OSS_PLAIN,
    ),
    row(
        {"AriaTextForCausalLM": "aria_text", "AriaForConditionalGeneration": "aria"},
        LlamaLike(by_config(), mixture=mixtures.aria),
        ROUTED_NAMES
        | in_layers("mlp.router=mlp.router")
        | stacked_experts("mlp.experts.fc1", "mlp.experts.fc2", transpose=True),  # each [in, out]
        renames=(
            (re.compile(r"(layers\.\d+\.mlp\.experts)\.gate_up_proj"), r"\1.fc1.weight"),
            (re.compile(r"(layers\.\d+\.mlp\.experts)\.down_proj"), r"\1.fc2.weight"),
        ),
        stacks=re.compile(r"layers\.\d+\.mlp\.experts\.fc[12]\.weight"),
    ),
    row(
        {"HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe"},
        LlamaLike(
            by_config(),
            Norms(1e-5),
            LAST,
            Positions(rope(alpha=True)),
            mixture=mixtures.hunyuan,
            more=(parts.hunyuan,),
        ),
        HUNYUAN_NORMS | mixtures.HUNYUAN_NAMES,
    ),
    row(
        {"Ernie4_5_MoeForCausalLM": "ernie4_5_moe"},
        replace(ERNIE_PARTS, sizes=Sizes(), mixture=mixtures.ernie),
        ROUTED_NAMES | mixtures.ERNIE_NAMES,
        neighbours=True,
        renames=mixtures.BIAS_RENAMES,
        stacks=mixtures.BIAS_STACKS,
    ),
    row(
        {"AfmoeForCausalLM": "afmoe"},
        LlamaLike(
            by_config(),
            parts.around(1e-5),
            EACH_HEAD,
            Positions(windows="every", without="full"),
            sizes=Sizes(head_size=128),
            mixture=mixtures.afmoe,
            scales=parts.afmoe_scales,
            facts={"out_gate": True},
        ),
        ROUTED_NAMES
        | in_layers("""
            attention.out_gate=self_attn.gate_proj attention_post_norm=post_attention_layernorm
            mlp_norm=pre_mlp_layernorm mlp_post_norm=post_mlp_layernorm
        """)
        | _AFMOE_ROUTER,
        renames=(_EXPERT_BIAS,),
    ),
    row(
        {"HYV3ForCausalLM": "hy_v3"},
        LlamaLike(
            by_config(),
            Norms(1e-5),
            EACH_HEAD,
            Positions(rope(11158840.0)),
            sizes=Sizes(head_size=128),
            mixture=Routed(
                *("sigmoid", ("noaux_tc",), 1, 2.826),
                renormalise=True,
                experts="num_experts",
                shared="num_shared_experts",
                shared_count=1,
                factor_key="router_scaling_factor",
            ),
            more=(parts.next_layers,),
        ),
        ROUTED_NAMES | mlp_names("mlp.shared", "mlp.shared_mlp") | _AFMOE_ROUTER,
        renames=(_EXPERT_BIAS,),
    ),
    *(
        row(architectures, like, ROUTED_NAMES, renames=ROUTED_RENAMES, following=ROUTED_NEXT)
        for architectures, like in (
            (
                {"Glm4MoeForCausalLM": "glm4_moe"},
                LlamaLike(
                    parts.out_apart(default=False),
                    Norms(1e-5),
                    HeadNorms("head", optional=True),
                    Positions(rope(partial=0.5)),
                    mixture=_GLM_MOE,
                    more=(parts.next_layers,),
                ),
            ),
            (  # as published, and as transformers writes it
                {"ExaoneMoEForCausalLM": "exaone_moe", "ExaoneMoeForCausalLM": "exaone_moe"},
                LlamaLike(
                    norms=Norms(1e-5),
                    qk_norm=EACH_HEAD,
                    positions=Positions(windows="pattern", without="full"),
                    mixture=replace(_GLM_MOE, factor=2.5, experts="num_experts", shared="num_shared_experts"),
                    more=(parts.next_layers,),
                ),
            ),
            (
                {"Dots1ForCausalLM": "dots1"},
                LlamaLike(
                    by_config(),
                    qk_norm=EACH_HEAD,
                    positions=Positions(windows="upper"),
                    mixture=replace(_GLM_MOE, dense=0, renormalise=False),
                    more=(parts.next_layers,),
                ),
            ),
            (
                {"SolarOpenForCausalLM": "solar_open"},
                LlamaLike(
                    parts.out_apart(default=False),
                    Norms(1e-5),
                    positions=Positions(rope(1000000.0, partial=1.0)),
                    sizes=Sizes(head_size=128, mlp_width=10240),  # only experts
                    mixture=replace(_GLM_MOE, dense=0),
                    more=(parts.next_layers,),
                ),
            ),
        )
    ),
)
