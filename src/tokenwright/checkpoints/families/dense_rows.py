"""Architectures without experts that differ from Llama in some parts or names: a row each."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families import family
from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.llama import (
    ALL_HEADS,
    EACH_HEAD,
    ERNIE_PARTS,
    HUNYUAN_NORMS,
    LAST,
    LLAMA,
    POST_NORMS,
    SINK_RENAME,
    SINKS,
    row,
)
from tokenwright.checkpoints.families.llama_like import LlamaLike, MLPs, Norms, Positions, Sizes, by_config, rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.models.graph import Graph
from tokenwright.models.op import XIELU

_FUSED_UP = {
    f"layers.{{i}}.mlp.{one}": family.TensorSource("layers.{i}.mlp.gate_up_proj", fused=True) for one in ("gate", "up")
}


def _turned_back(base: str, graph: Graph) -> family.Order | None:
    """Row order of q and k in files whose heads have their halves swapped."""
    if not base.endswith((".q", ".k")):
        return None
    size = graph.rotary_size
    return family.Order(size, (*range(size // 2, size), *range(size // 2)))


def _exaone_layers(keys: JsonKeys) -> int:
    return keys.whole("num_layers", keys.whole("num_hidden_layers", 32))


_MISTRAL = LlamaLike(positions=Positions(windows="all"))
_QWEN2 = LlamaLike(parts.qwen2_biases, positions=Positions(windows="upper"))
_QWEN3 = LlamaLike(by_config(), qk_norm=EACH_HEAD, positions=Positions(windows="upper"), sizes=Sizes(head_size=128))
_EMU3 = LlamaLike(by_config(mlp=True), Norms(1e-5), positions=Positions(rope(1000000.0)))
_GRANITE_SWA = LlamaLike(
    by_config(mlp=True),
    Norms(1e-5),
    positions=Positions(windows="fourth", without="based"),
    scales=parts.granite_scales,
    tied=True,
    facts={"sink_logits": True},
)
_GLM = LlamaLike(
    parts.out_apart(), Norms(1.5625e-07), positions=Positions(rope(partial=0.5)), sizes=Sizes(head_size=128)
)

PHI3 = row(
    {"Phi3ForCausalLM": "phi3", "Phi4MultimodalForCausalLM": "phi4_multimodal"},
    LlamaLike(norms=Norms(1e-5), positions=Positions(rope(partial=1.0), windows="given")),
    {f"layers.{{i}}.attention.{one}": family.TensorSource("layers.{i}.self_attn.qkv_proj", fused=True) for one in "qkv"}
    | _FUSED_UP,
)
DENSE: tuple[family.Family, ...] = (
    LLAMA,
    PHI3,
    row({"MistralForCausalLM": "mistral", "Mistral3ForConditionalGeneration": "mistral3"}, _MISTRAL),
    row({"MinistralForCausalLM": "ministral"}, LlamaLike(positions=Positions(windows="typed"))),
    row({"Ministral3ForCausalLM": "ministral3"}, LlamaLike(norms=Norms(1e-5), positions=Positions(windows="given"))),
    row(
        {
            "Qwen2ForCausalLM": "qwen2",
            "Qwen2VLForConditionalGeneration": "qwen2_vl",
            "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
        },
        _QWEN2,
    ),
    row({"GotOcr2ForConditionalGeneration": "got_ocr2"}, replace(_QWEN2, tied=True)),
    row(
        {"MiMoForCausalLM": "mimo"},
        replace(_QWEN2, more=(parts.next_layers,)),
        following=family.NextNames(
            *("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
            at="mtp_layers.0",
            hidden_first=True,
        ),
    ),
    row({"Qwen3ForCausalLM": "qwen3", "Qwen3VLForConditionalGeneration": "qwen3_vl"}, _QWEN3),
    row({"MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe_diarize"}, replace(_QWEN3, tied=True)),
    row(
        {"SmolLM3ForCausalLM": "smollm3"},
        LlamaLike(
            by_config(mlp=True), positions=Positions(rope(2000000.0), windows="nope", without="listed"), tied=True
        ),
    ),
    row({"Emu3ForCausalLM": "emu3", "Emu3ForConditionalGeneration": "emu3"}, _EMU3),
    row({"SeedOssForCausalLM": "seed_oss"}, LlamaLike(parts.out_apart(mlp=True), sizes=Sizes(head_size=128))),
    row({"ArceeForCausalLM": "arcee"}, LlamaLike(by_config(mlp=True), Norms(1e-5), mlps=parts.RELU2)),
    row(
        {"BitNetForCausalLM": "bitnet"},
        LlamaLike(by_config(), Norms(1e-5), None, Positions(rope(500000.0)), mlps=MLPs("relu2"), facts=parts.SUB_NORMS),
        family.in_layers("attention.out_norm=self_attn.attn_sub_norm mlp.down_norm=mlp.ffn_sub_norm"),
    ),
    row({"MiniCPMForCausalLM": "minicpm"}, LlamaLike(by_config(), scales=parts.minicpm_scales, tied=True)),
    row(
        {"ExaoneForCausalLM": "exaone"},  # transformers 5 writes Llama's keys
        LlamaLike(
            norms=Norms(lambda keys: keys.number("layer_norm_epsilon", keys.number("rms_norm_eps", 1e-5))),
            positions=Positions(rope(500000.0)),
            sizes=Sizes(_exaone_layers, 4096, 32, 8, 0, 14336, 102400, 4096),
            mlps=MLPs(key="activation_function"),
            more=(parts.silu_twice,),
            unused=("embed_dropout",),
        ),
        family.named("embed=wte norm=ln_f")
        | family.in_layers(
            """
            attention_norm=ln_1 attention.q=attn.attention.q_proj attention.k=attn.attention.k_proj
            attention.v=attn.attention.v_proj attention.o=attn.attention.out_proj mlp_norm=ln_2 mlp.gate=mlp.c_fc_0
            mlp.up=mlp.c_fc_1 mlp.down=mlp.c_proj
            """,
            "h.{i}",
        ),
        prefix="transformer.",
        inert=re.compile(r"h\.\d+\.attn\.attention\.rotary\.inv_freq|rotary\.inv_freq"),
    ),
    row(
        {"CwmForCausalLM": "cwm"},
        LlamaLike(norms=Norms(1e-5), positions=Positions(rope(1000000.0), windows="cwm"), sizes=Sizes(head_size=128)),
    ),
    row(
        {"HeliumForCausalLM": "helium"},
        LlamaLike(norms=Norms(1e-8), positions=Positions(rope(100000.0)), sizes=Sizes(head_size=128)),
        neighbours=True,
    ),
    row({"GraniteForCausalLM": "granite"}, LlamaLike(by_config(mlp=True), scales=parts.granite_scales)),
    row({"GraniteSWAForCausalLM": "granite_swa"}, _GRANITE_SWA, SINKS, renames=(SINK_RENAME,)),
    row(
        {"HyperCLOVAXForCausalLM": "hyperclovax"},
        LlamaLike(by_config(mlp=True), scales=parts.hyperclovax_scales, more=(parts.later_norms,)),
        family.in_layers("attention_post_norm=post_norm1 mlp_post_norm=post_norm2"),
    ),
    row(
        {"StableLmForCausalLM": "stablelm"},
        LlamaLike(
            parts.stablelm_biases,
            parts.LAYER_NORMS,
            positions=Positions(rope(partial=0.25)),
            more=(parts.side_by_side,),
        ),
    ),
    row(
        {"Jais2ForCausalLM": "jais2"},
        LlamaLike(by_config(mlp=True, default=True), parts.LAYER_NORMS, mlps=parts.RELU2, more=(parts.side_by_side,)),
    ),
    row(  # its norms multiply by 1 + weight
        {"NemotronForCausalLM": "nemotron"},
        LlamaLike(
            by_config(mlp=True),
            parts.LAYER_NORMS,
            positions=Positions(rope(partial=0.5)),
            mlps=parts.RELU2,
            more=(parts.side_by_side,),
        ),
        family.one_more(LLAMA.names),
    ),
    row(
        {"Starcoder2ForCausalLM": "starcoder2"},
        LlamaLike(
            parts.everywhere(True),
            parts.LAYER_NORMS,
            positions=Positions(windows="given"),
            mlps=MLPs("gelu_pytorch_tanh", gated=False),
            tied=True,
            more=(parts.side_by_side,),
        ),
        family.in_layers("mlp.up=mlp.c_fc mlp.down=mlp.c_proj"),
    ),
    row({"OlmoForCausalLM": "olmo"}, LlamaLike(by_config(), parts.BARE_LAYER_NORMS, more=(parts.clip,))),
    row({"Olmo2ForCausalLM": "olmo2"}, LlamaLike(by_config(), parts.behind(1e-5), ALL_HEADS), POST_NORMS),
    row(
        {"Olmo3ForCausalLM": "olmo3"},
        LlamaLike(
            by_config(), parts.behind(1e-5), ALL_HEADS, Positions(parts.two_ropes(500000.0, None), windows="pattern")
        ),
        POST_NORMS,
    ),
    row(
        {"Exaone4ForCausalLM": "exaone4"},
        LlamaLike(norms=parts.behind(1e-5), qk_norm=EACH_HEAD, positions=Positions(windows="pattern", without="full")),
        POST_NORMS,
    ),
    row({"GlmForCausalLM": "glm"}, _GLM, _FUSED_UP, neighbours=True),
    row(
        {"Glm4ForCausalLM": "glm4"},
        replace(_GLM, norms=parts.around(1.5625e-07)),
        _FUSED_UP | family.in_layers("attention_post_norm=post_self_attn_layernorm mlp_post_norm=post_mlp_layernorm"),
        neighbours=True,
    ),
    row({"Ernie4_5ForCausalLM": "ernie4_5"}, ERNIE_PARTS, neighbours=True),
    row(
        {"HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"},
        LlamaLike(
            by_config(), Norms(1e-5), LAST, Positions(rope(alpha=True)), more=(parts.hunyuan,), unused=("num_experts",)
        ),
        HUNYUAN_NORMS,
    ),
    row(
        {"ApertusForCausalLM": "apertus", "Apertus1p5TextForCausalLM": "apertus1p5_text"},
        LlamaLike(by_config(mlp=True), Norms(1e-5), EACH_HEAD, mlps=MLPs("xielu", gated=False)),
        family.in_layers("attention_norm=attention_layernorm mlp_norm=feedforward_layernorm")
        | {
            f"layers.{{i}}.mlp.act.{one}": family.TensorSource(f"layers.{{i}}.mlp.act_fn.{one}", wide=True)
            for one in XIELU
        },
        renames=(family.without_ending(rf"mlp\.act_fn\.(?:{'|'.join(XIELU)})"),),
        inert=re.compile(r"layers\.\d+\.mlp\.act_fn\.eps"),
    ),
    row(
        {"NanoChatForCausalLM": "nanochat"},
        LlamaLike(by_config(), parts.BARE_NORMS, LAST, mlps=parts.RELU2, more=(parts.capped_logits,)),
        family.in_layers("mlp.up=mlp.fc1 mlp.down=mlp.fc2"),
        own_orders=_turned_back,
    ),
)
