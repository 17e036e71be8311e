"""One row for each architecture with experts that differs from Llama in some parts or names."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families import family, llama, mixtures
from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.positions import flint_windows
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, ROUTED_NEXT, ROUTED_RENAMES, Routed

_AFMOE_ROUTER = {
    "layers.{i}.mlp.router": family.TensorSource("layers.{i}.mlp.router.gate"),
    "layers.{i}.mlp.correction": family.TensorSource("layers.{i}.mlp.expert_bias", wide=True),
}
_EXPERT_BIAS = family.without_ending(r"mlp\.expert_bias")

_GLM_MOE = Routed("sigmoid", ("noaux_tc",), 1, 1.0, renormalise=True)

MIXTURES: tuple[family.Family, ...] = (
    llama.row(
        {"MixtralForCausalLM": "mixtral"},
        parts.LlamaLike(
            norms=parts.Norms(1e-5),
            positions=parts.Positions(parts.rope(1000000.0), windows="given"),
            mixture=mixtures.mixtral,
        ),
        mixtures.MIXTRAL_NAMES,
    ),
    llama.row(
        {"MiniMaxM2ForCausalLM": "minimax_m2"},
        parts.LlamaLike(
            qk_norm=llama.ALL_HEADS,
            positions=parts.Positions(parts.counted_rope(5000000.0)),
            sizes=parts.Sizes(head_size=128),
            mixture=mixtures.minimax,
        ),
        mixtures.MIXTRAL_NAMES | mixtures.MINIMAX_NAMES,
        renames=mixtures.BIAS_RENAMES,
    ),
    llama.row(
        {"Qwen2MoeForCausalLM": "qwen2_moe"},
        parts.LlamaLike(parts.qwen2_biases, positions=parts.Positions(windows="even"), mixture=mixtures.QWEN2),
        mixtures.QWEN_NAMES,
    ),
    llama.row(
        {"Qwen3MoeForCausalLM": "qwen3_moe"},
        parts.LlamaLike(
            parts.by_config(),
            qk_norm=llama.EACH_HEAD,
            positions=parts.Positions(windows="flagged"),
            mixture=mixtures.QWEN3,
        ),
        mixtures.QWEN_NAMES,
    ),
    llama.row(
        {"OlmoeForCausalLM": "olmoe"},
        parts.LlamaLike(
            parts.by_config(), parts.Norms(1e-5), llama.ALL_HEADS, mixture=mixtures.olmoe, more=(parts.clip,)
        ),
        mixtures.QWEN_NAMES,
    ),
    llama.row(
        {"FlexOlmoForCausalLM": "flex_olmo"},
        parts.LlamaLike(
            parts.by_config(),
            parts.behind(1e-6),
            llama.ALL_HEADS,
            parts.Positions(parts.rope(500000.0)),
            mixture=mixtures.olmoe,
            more=(parts.clip,),
        ),
        llama.POST_NORMS | mixtures.QWEN_NAMES,
    ),
    llama.row(
        {"MellumForCausalLM": "mellum"},
        parts.LlamaLike(
            parts.by_config(),
            qk_norm=llama.EACH_HEAD,
            positions=parts.Positions(parts.two_ropes(500000.0, 10000.0), windows="listed"),
            sizes=parts.Sizes(head_size=128),
            mixture=mixtures.MELLUM,
        ),
        mixtures.QWEN_NAMES,
    ),
    llama.row(
        {"FlintForCausalLM": "flint"},
        parts.LlamaLike(
            parts.by_config(),
            qk_norm=llama.EACH_HEAD,
            positions=parts.Positions(windows=flint_windows, without="full"),
            sizes=parts.Sizes(head_size=128),
            mixture=mixtures.FLINT,
            facts={"sink_logits": True},
        ),
        mixtures.QWEN_NAMES | llama.SINKS,
        renames=((re.compile(r"(layers\.\d+\.self_attn)\.(?:softmax_offset|sinks)"), r"\1.sinks.weight"),),
    ),
    llama.row(
        {"GptOssForCausalLM": "gpt_oss"},
        parts.LlamaLike(
            parts.gpt_oss_biases,
            parts.Norms(1e-5),
            positions=parts.Positions(parts.rope(150000.0), windows="alternate"),
            sizes=parts.Sizes(head_size=64),
            mlps=parts.MLPs("clamped_swiglu"),
            mixture=mixtures.gpt_oss,
            facts={"sink_logits": True},
        ),
        mixtures.GPT_OSS_NAMES,
        renames=mixtures.GPT_OSS_RENAMES,
        stacks=mixtures.GPT_OSS_STACKS,
        plain=mixtures.GPT_OSS_PLAIN,
    ),
    llama.row(
        {"AriaTextForCausalLM": "aria_text", "AriaForConditionalGeneration": "aria"},
        parts.LlamaLike(parts.by_config(), mixture=mixtures.aria),
        ROUTED_NAMES
        | family.in_layers("mlp.router=mlp.router")
        | family.stacked_experts("mlp.experts.fc1", "mlp.experts.fc2", transpose=True),  # each [in, out]
        renames=(
            (re.compile(r"(layers\.\d+\.mlp\.experts)\.gate_up_proj"), r"\1.fc1.weight"),
            (re.compile(r"(layers\.\d+\.mlp\.experts)\.down_proj"), r"\1.fc2.weight"),
        ),
        stacks=re.compile(r"layers\.\d+\.mlp\.experts\.fc[12]\.weight"),
    ),
    llama.row(
        {"HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe"},
        parts.LlamaLike(
            parts.by_config(),
            parts.Norms(1e-5),
            llama.LAST,
            parts.Positions(parts.rope(alpha=True)),
            mixture=mixtures.hunyuan,
            more=(parts.hunyuan,),
        ),
        llama.HUNYUAN_NORMS | mixtures.HUNYUAN_NAMES,
    ),
    llama.row(
        {"Ernie4_5_MoeForCausalLM": "ernie4_5_moe"},
        replace(llama.ERNIE_PARTS, sizes=parts.Sizes(), mixture=mixtures.ernie),
        ROUTED_NAMES | mixtures.ERNIE_NAMES,
        neighbours=True,
        renames=mixtures.BIAS_RENAMES,
        stacks=mixtures.BIAS_STACKS,
    ),
    llama.row(
        {"AfmoeForCausalLM": "afmoe"},
        parts.LlamaLike(
            parts.by_config(),
            parts.around(1e-5),
            llama.EACH_HEAD,
            parts.Positions(windows="every", without="full"),
            sizes=parts.Sizes(head_size=128),
            mixture=mixtures.afmoe,
            scales=parts.afmoe_scales,
            facts={"out_gate": True},
        ),
        ROUTED_NAMES
        | family.in_layers("""
            attention.out_gate=self_attn.gate_proj attention_post_norm=post_attention_layernorm
            mlp_norm=pre_mlp_layernorm mlp_post_norm=post_mlp_layernorm
        """)
        | _AFMOE_ROUTER,
        renames=(_EXPERT_BIAS,),
    ),
    llama.row(
        {"HYV3ForCausalLM": "hy_v3"},
        parts.LlamaLike(
            parts.by_config(),
            parts.Norms(1e-5),
            llama.EACH_HEAD,
            parts.Positions(parts.rope(11158840.0)),
            sizes=parts.Sizes(head_size=128),
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
        ROUTED_NAMES | family.mlp_names("mlp.shared", "mlp.shared_mlp") | _AFMOE_ROUTER,
        renames=(_EXPERT_BIAS,),
    ),
    *(
        llama.row(architectures, like, ROUTED_NAMES, renames=ROUTED_RENAMES, following=ROUTED_NEXT)
        for architectures, like in (
            (
                {"Glm4MoeForCausalLM": "glm4_moe"},
                parts.LlamaLike(
                    parts.out_apart(default=False),
                    parts.Norms(1e-5),
                    parts.HeadNorms("head", optional=True),
                    parts.Positions(parts.rope(partial=0.5)),
                    mixture=_GLM_MOE,
                    more=(parts.next_layers,),
                ),
            ),
            (  # as published, and as transformers writes it
                {"ExaoneMoEForCausalLM": "exaone_moe", "ExaoneMoeForCausalLM": "exaone_moe"},
                parts.LlamaLike(
                    norms=parts.Norms(1e-5),
                    qk_norm=llama.EACH_HEAD,
                    positions=parts.Positions(windows="pattern", without="full"),
                    mixture=replace(_GLM_MOE, factor=2.5, experts="num_experts", shared="num_shared_experts"),
                    more=(parts.next_layers,),
                ),
            ),
            (
                {"Dots1ForCausalLM": "dots1"},
                parts.LlamaLike(
                    parts.by_config(),
                    qk_norm=llama.EACH_HEAD,
                    positions=parts.Positions(windows="upper"),
                    mixture=replace(_GLM_MOE, dense=0, renormalise=False),
                    more=(parts.next_layers,),
                ),
            ),
            (
                {"SolarOpenForCausalLM": "solar_open"},
                parts.LlamaLike(
                    parts.out_apart(default=False),
                    parts.Norms(1e-5),
                    positions=parts.Positions(parts.rope(1000000.0, partial=1.0)),
                    sizes=parts.Sizes(head_size=128, mlp_width=10240),  # only experts
                    mixture=replace(_GLM_MOE, dense=0),
                    more=(parts.next_layers,),
                ),
            ),
        )
    ),
)
