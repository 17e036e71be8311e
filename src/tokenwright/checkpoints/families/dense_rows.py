"""One row for each architecture without experts that differs from Llama in some parts or names."""

import re
from collections.abc import Iterator, Mapping
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
)  # fmt: skip
from tokenwright.checkpoints.families.llama_like import LlamaLike, MLPs, Norms, Positions, Sizes, by_config, rope
from tokenwright.checkpoints.families.positions import read_layer_types, windows_but
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import Scales
from tokenwright.models.graph import Graph
from tokenwright.models.op import XIELU

_FUSED_UP = {
    f"layers.{{i}}.mlp.{one}": family.TensorSource("layers.{i}.mlp.gate_up_proj", fused=True) for one in ("gate", "up")
}


def _turned_back(base: str, graph: Graph) -> family.Order | None:
    if not base.endswith((".q", ".k")):
        return None
    size = graph.rotary_size
    return family.Order(size, (*range(size // 2, size), *range(size // 2)))


def _from_llama(names: Mapping[str, family.TensorSource]) -> Iterator[tuple[re.Pattern[str], str]]:
    """Renames of Llama's tensors, as transformers 5 computes with them and may save them."""
    for ours, theirs in names.items():
        pattern = re.escape(f"model.{LLAMA.names[ours].name}.weight").replace(r"\{i\}", r"(\d+)")
        yield re.compile(pattern), theirs.name.replace("{i}", r"\1") + ".weight"


_EXAONE_NAMES = family.named("embed=wte norm=ln_f") | family.in_layers(
    """
    attention_norm=ln_1 attention.q=attn.attention.q_proj attention.k=attn.attention.k_proj
    attention.v=attn.attention.v_proj attention.o=attn.attention.out_proj mlp_norm=ln_2 mlp.gate=mlp.c_fc_0
    mlp.up=mlp.c_fc_1 mlp.down=mlp.c_proj
    """,
    "h.{i}",
)


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
        _EXAONE_NAMES,
        prefix="transformer.",
        renames=tuple(_from_llama(_EXAONE_NAMES)),
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
    row(  # norms multiply by 1 + weight
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


def _cohere_own(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    return {
        "context": keys.whole("model_max_length", facts["context"], most=MAX_TOKENS),
        "qk_norm": "own" if keys.flag("use_qk_norm", False) else None,
    }


def _first_cohere2_files(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:  # noqa: ARG001
    """Keys of early Cohere2 files, for which transformers has one fixed value."""
    keys.only("order_of_interleaved_layers", "local_attn_first", why="another order of layers")
    keys.only("position_embedding_type", "rope_gptj", why="other positions")
    keys.only("rotary_pct", 1, 1.0, why="rotation of a part of each head in this architecture")
    keys.only("use_gated_activation", True, why="an MLP without gates")
    keys.only("use_parallel_block", True, why="attention and MLP one after the other")
    keys.only("use_embedding_sharing", True, keys.raw("tie_word_embeddings") is not False, why="another head")
    keys.only("layer_switch", keys.whole("sliding_window_pattern", 4), why="another pattern of layers")
    return {}


def _cohere_kinds(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    """Layers of a kind whose rope_parameters are null have no rotation."""
    layers = facts["layers"]
    window = keys.whole("sliding_window", 4096, most=MAX_TOKENS)
    types, ropes = keys.raw("layer_types"), keys.raw("rope_parameters") or {}
    sliding = [False] * layers if types is None else read_layer_types(keys, types, layers)
    turned = [ropes.get(f"{kind}_attention", ropes) is not None for kind in ("full", "sliding")]
    return {
        "windows": tuple(window if slides else None for slides in sliding),
        "rotary": tuple(turned[slides] for slides in sliding),
    }


_COMMAND_R = LlamaLike(
    by_config(),
    Norms(1e-5, {"norm": "layer", "norm_bias": False}, key="layer_norm_eps"),
    positions=Positions(rope(500000.0), windows=None, repeated=False),
    sizes=Sizes(context=8192),
    scales=lambda keys, _: Scales(logits=keys.number("logit_scale", 0.0625)),
    tied=True,
    facts={"parallel": "one norm"},
    more=(_cohere_own,),
)
_COHERE2 = replace(
    _COMMAND_R,
    positions=Positions(windows=windows_but(4, 4096, "sliding_window_pattern"), without="full", repeated=False),
    more=(_cohere_own, _first_cohere2_files),
)
_COMPASS = replace(
    _COMMAND_R,
    positions=Positions(parts.two_ropes(10000.0, None), windows=None, repeated=False),
    scales=lambda keys, _: Scales(logits=keys.number("logit_scale", 1.0)),
    more=(_cohere_own, _cohere_kinds),
    unused=("pooling",),
)
# Command-R, Aya and Command-A: parallel attention and MLP over one LayerNorm without bias, scaled logits.
_COHERE = replace(
    LLAMA,
    architectures={"CohereForCausalLM": "cohere"},
    parse=_COMMAND_R.parse,
    neighbours=True,
    stacks=re.compile(r"layers\.\d+\.self_attn\.[qk]_norm\.weight"),  # [heads, head_dim]
)
COHERES = (
    _COHERE,
    replace(_COHERE, architectures={"Cohere2ForCausalLM": "cohere2"}, parse=_COHERE2.parse),
    replace(
        _COHERE,
        architectures={
            "CohereCompassForCausalLM": "cohere_compass_text",
            "CohereCompassForConditionalGeneration": "cohere_compass",
        },
        parse=_COMPASS.parse,
        neighbours=False,
    ),
)
