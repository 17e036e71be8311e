"""The names of tensors of Llama and the architectures whose arithmetic differs from it in a few facts.

`llama_config.py` has these facts, and reads their config.json.
"""

import re
from dataclasses import replace

from tokenwright.checkpoints.families.family import Family, NextNames, Order, TensorSource, named
from tokenwright.checkpoints.families.llama_config import parse_llama
from tokenwright.checkpoints.families.mixtures import (
    BIAS_RENAMES,
    BIAS_STACKS,
    ERNIE_NAMES,
    GPT_OSS_NAMES,
    GPT_OSS_PLAIN,
    GPT_OSS_RENAMES,
    GPT_OSS_STACKS,
    HUNYUAN_NAMES,
    MINIMAX_NAMES,
    MIXTRAL_NAMES,
    QWEN_NAMES,
)
from tokenwright.checkpoints.families.routed import ROUTED_NAMES, ROUTED_NEXT, ROUTED_RENAMES
from tokenwright.models.graph import Graph
from tokenwright.models.op import XIELU

LLAMA = Family(
    architectures={
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Mistral3ForConditionalGeneration": "mistral3",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen2VLForConditionalGeneration": "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3VLForConditionalGeneration": "qwen3_vl",
        "SmolLM3ForCausalLM": "smollm3",
        "SeedOssForCausalLM": "seed_oss",
        "MinistralForCausalLM": "ministral",
        "Ministral3ForCausalLM": "ministral3",
        "GraniteForCausalLM": "granite",
        "ArceeForCausalLM": "arcee",
        "MiniCPMForCausalLM": "minicpm",
        "CwmForCausalLM": "cwm",
        "StableLmForCausalLM": "stablelm",
        "Jais2ForCausalLM": "jais2",
        "OlmoForCausalLM": "olmo",
        "Emu3ForCausalLM": "emu3",
        "Emu3ForConditionalGeneration": "emu3",
        "GotOcr2ForConditionalGeneration": "got_ocr2",
        "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe_diarize",
    },
    parse=parse_llama,
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

MIMO = replace(
    LLAMA,
    architectures={"MiMoForCausalLM": "mimo"},
    following=NextNames(
        *("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"), at="mtp_layers.0", hidden_first=True
    ),
)

_FUSED_UP = {
    f"layers.{{i}}.mlp.{one}": TensorSource("layers.{i}.mlp.gate_up_proj", fused=True) for one in ("gate", "up")
}

HUNYUAN = replace(
    LLAMA,
    architectures={"HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"},
    names=LLAMA.names
    | named(
        {
            "layers.{i}.attention.q_norm": "layers.{i}.self_attn.query_layernorm",
            "layers.{i}.attention.k_norm": "layers.{i}.self_attn.key_layernorm",
        }
    ),
)

HUNYUAN_MOE = replace(
    HUNYUAN,
    architectures={"HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe"},
    names=HUNYUAN.names | named(HUNYUAN_NAMES),
)

AFMOE_ROUTER = {
    "layers.{i}.mlp.router": TensorSource("layers.{i}.mlp.router.gate"),
    "layers.{i}.mlp.correction": TensorSource("layers.{i}.mlp.expert_bias", wide=True),
}
EXPERT_BIAS = (re.compile(r"(layers\.\d+\.mlp\.expert_bias)"), r"\1.weight")
HUNYUAN3 = replace(
    LLAMA,
    architectures={"HYV3ForCausalLM": "hy_v3"},
    names=LLAMA.names
    | ROUTED_NAMES
    | {name: one for name, one in named(HUNYUAN_NAMES).items() if ".shared." in name}
    | AFMOE_ROUTER,
    renames=(EXPERT_BIAS,),
)

APERTUS = replace(
    LLAMA,
    architectures={"ApertusForCausalLM": "apertus", "Apertus1p5TextForCausalLM": "apertus1p5_text"},
    names=LLAMA.names
    | named(
        {
            "layers.{i}.attention_norm": "layers.{i}.attention_layernorm",
            "layers.{i}.mlp_norm": "layers.{i}.feedforward_layernorm",
        }
    )
    | {f"layers.{{i}}.mlp.act.{one}": TensorSource(f"layers.{{i}}.mlp.act_fn.{one}", wide=True) for one in XIELU},
    renames=((re.compile(rf"(layers\.\d+\.mlp\.act_fn\.(?:{'|'.join(XIELU)}))"), r"\1.weight"),),
    inert=re.compile(r"layers\.\d+\.mlp\.act_fn\.eps"),
)

AFMOE = replace(
    LLAMA,
    architectures={"AfmoeForCausalLM": "afmoe"},
    names=LLAMA.names
    | ROUTED_NAMES
    | named(
        {
            "layers.{i}.attention.out_gate": "layers.{i}.self_attn.gate_proj",
            "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp_norm": "layers.{i}.pre_mlp_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_mlp_layernorm",
        }
    )
    | AFMOE_ROUTER,
    renames=(EXPERT_BIAS,),
)

HELIUM = replace(LLAMA, architectures={"HeliumForCausalLM": "helium"}, neighbours=True)

HYPERCLOVAX = replace(
    LLAMA,
    architectures={"HyperCLOVAXForCausalLM": "hyperclovax"},
    names=LLAMA.names
    | named(
        {"layers.{i}.attention_post_norm": "layers.{i}.post_norm1", "layers.{i}.mlp_post_norm": "layers.{i}.post_norm2"}
    ),
)

# Its norms multiply by 1 + weight.
NEMOTRON_PLAIN = replace(
    LLAMA,
    architectures={"NemotronForCausalLM": "nemotron"},
    names={name: replace(one, plus=1.0) if name.endswith("norm") else one for name, one in LLAMA.names.items()},
)

PHI3 = replace(
    LLAMA,
    architectures={"Phi3ForCausalLM": "phi3", "Phi4MultimodalForCausalLM": "phi4_multimodal"},
    names=LLAMA.names
    | {
        f"layers.{{i}}.attention.{one}": TensorSource("layers.{i}.self_attn.qkv_proj", fused=True)
        for one in ("q", "k", "v")
    }
    | _FUSED_UP,
)

ERNIE = replace(LLAMA, architectures={"Ernie4_5ForCausalLM": "ernie4_5"}, neighbours=True)

GLM = replace(LLAMA, architectures={"GlmForCausalLM": "glm"}, neighbours=True, names=LLAMA.names | _FUSED_UP)

GLM4 = replace(
    GLM,
    architectures={"Glm4ForCausalLM": "glm4"},
    names=GLM.names
    | named(
        {
            "layers.{i}.attention_post_norm": "layers.{i}.post_self_attn_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_mlp_layernorm",
        }
    ),
)

OLMO2 = replace(
    LLAMA,
    architectures={"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3", "Exaone4ForCausalLM": "exaone4"},
    names=LLAMA.names
    | named(
        {
            "layers.{i}.attention_post_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
        }
    ),
)

FLEX_OLMO = replace(OLMO2, architectures={"FlexOlmoForCausalLM": "flex_olmo"}, names=OLMO2.names | named(QWEN_NAMES))

SINKS = {"layers.{i}.attention.sinks": TensorSource("layers.{i}.self_attn.sinks")}
SINK_RENAME = (re.compile(r"(layers\.\d+\.self_attn\.sinks)"), r"\1.weight")
GRANITE_SWA = replace(
    LLAMA,
    architectures={"GraniteSWAForCausalLM": "granite_swa"},
    names=LLAMA.names | SINKS,
    renames=(SINK_RENAME,),
)

STARCODER2 = replace(
    LLAMA,
    architectures={"Starcoder2ForCausalLM": "starcoder2"},
    names=LLAMA.names
    | named({"layers.{i}.mlp.up": "layers.{i}.mlp.c_fc", "layers.{i}.mlp.down": "layers.{i}.mlp.c_proj"}),
)

MIXTRAL = replace(LLAMA, architectures={"MixtralForCausalLM": "mixtral"}, names=LLAMA.names | named(MIXTRAL_NAMES))

MINIMAX = replace(
    MIXTRAL,
    architectures={"MiniMaxM2ForCausalLM": "minimax_m2"},
    names=MIXTRAL.names | MINIMAX_NAMES,
    renames=BIAS_RENAMES,
)

ROUTED = replace(
    LLAMA,
    architectures={
        "Glm4MoeForCausalLM": "glm4_moe",
        "ExaoneMoEForCausalLM": "exaone_moe",
        "ExaoneMoeForCausalLM": "exaone_moe",
        "Dots1ForCausalLM": "dots1",
        "SolarOpenForCausalLM": "solar_open",
    },
    names=LLAMA.names | ROUTED_NAMES,
    renames=ROUTED_RENAMES,
    following=ROUTED_NEXT,
)

ERNIE_MOE = replace(
    ERNIE,
    architectures={"Ernie4_5_MoeForCausalLM": "ernie4_5_moe"},
    names=LLAMA.names | ROUTED_NAMES | ERNIE_NAMES,
    renames=BIAS_RENAMES,
    stacks=BIAS_STACKS,
)

QWEN_MOE = replace(
    LLAMA,
    architectures={
        "Qwen2MoeForCausalLM": "qwen2_moe",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "OlmoeForCausalLM": "olmoe",
        "MellumForCausalLM": "mellum",
    },
    names=LLAMA.names | named(QWEN_NAMES),
)

_FC1 = "layers.{i}.mlp.experts.fc1"
# Its files have the experts of a layer in one tensor, of each [in, out], the gates before the values.
ARIA = replace(
    LLAMA,
    architectures={"AriaTextForCausalLM": "aria_text", "AriaForConditionalGeneration": "aria"},
    names=LLAMA.names
    | ROUTED_NAMES
    | {
        "layers.{i}.mlp.router": TensorSource("layers.{i}.mlp.router"),
        "layers.{i}.mlp.experts.{e}.gate": TensorSource(_FC1, transpose=True, stacked=True, turn=(0, 2), halves=True),
        "layers.{i}.mlp.experts.{e}.up": TensorSource(_FC1, transpose=True, stacked=True, turn=(1, 2), halves=True),
        "layers.{i}.mlp.experts.{e}.down": TensorSource("layers.{i}.mlp.experts.fc2", transpose=True, stacked=True),
    },
    renames=(
        (re.compile(r"(layers\.\d+\.mlp\.experts)\.gate_up_proj"), r"\1.fc1.weight"),
        (re.compile(r"(layers\.\d+\.mlp\.experts)\.down_proj"), r"\1.fc2.weight"),
    ),
    stacks=re.compile(r"layers\.\d+\.mlp\.experts\.fc[12]\.weight"),
)


def _turned_back(base: str, graph: Graph) -> Order | None:
    """The order of rows of q and k in files that turn heads the other way: the second half of a head is our first."""
    if not base.endswith((".q", ".k")):
        return None
    size = graph.rotary_size
    return Order(size, (*range(size // 2, size), *range(size // 2)))


NANOCHAT = replace(
    LLAMA,
    architectures={"NanoChatForCausalLM": "nanochat"},
    names=LLAMA.names | named({"layers.{i}.mlp.up": "layers.{i}.mlp.fc1", "layers.{i}.mlp.down": "layers.{i}.mlp.fc2"}),
    own_orders=_turned_back,
)

GPT_OSS = replace(
    LLAMA,
    architectures={"GptOssForCausalLM": "gpt_oss"},
    names=LLAMA.names | GPT_OSS_NAMES,
    renames=GPT_OSS_RENAMES,
    stacks=GPT_OSS_STACKS,
    plain=GPT_OSS_PLAIN,
)
