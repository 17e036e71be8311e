"""GPT-2 and relatives: LayerNorms, MLPs without gates, most with biases."""

import re
from dataclasses import replace

from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.family import MOST_MLP, Family, Order, head_order, in_layers, named, pairs
from tokenwright.checkpoints.families.family import TensorSource as Source
from tokenwright.checkpoints.families.graph_builder import decoder
from tokenwright.checkpoints.families.positions import read_rope
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS
from tokenwright.config import ModelConfig, Rope, Scales
from tokenwright.models.graph import Attention, Graph

_GPT2_KEYS = """
    hidden_size=n_embd num_hidden_layers=n_layer num_attention_heads=n_head max_position_embeddings=n_positions
    intermediate_size=n_inner num_key_value_heads=n_head
"""


def _wide(keys: JsonKeys) -> int:
    return keys.whole("intermediate_size", 4 * keys.whole("hidden_size"), most=MOST_MLP)


def gelus(default: str = "gelu_new", key: str = "activation_function") -> parts.MLPs:
    return parts.MLPs(default, gated=False, key=key)


def _norms(key: str = "layer_norm_epsilon", eps: float = 1e-5) -> parts.Norms:
    return parts.Norms(eps, {"norm": "layer"}, key=key)


def _by_groups(base: str, graph: Graph) -> Order | None:
    """The row order in files that store, for each KV head, its heads of q, then its k and v."""
    attention, _, part = base.rpartition(".")
    if part not in ("q", "k", "v"):
        return None
    (queries, _), (keys, _) = (graph.shapes[f"{attention}.{one}.weight"] for one in "qk")
    each, size = queries // keys, graph.rotary_size
    first, last = {"q": (0, each), "k": (each, each + 1), "v": (each + 1, each + 2)}[part]
    return Order((each + 2) * size, tuple(range(first * size, last * size)))


LIKE_GPT2 = parts.LlamaLike(
    lambda _: parts.Biases(True, True, True),
    _norms(),
    positions=parts.NoPositions(learned=True),
    sizes=parts.Sizes(mlp_width=_wide),
    mlps=gelus(),
    tied=True,
    keys=pairs(_GPT2_KEYS),
)
_LINEARS = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "attention.o": "attn.c_proj"}
GPT2 = Family(
    architectures={"GPT2LMHeadModel": "gpt2"},
    parse=LIKE_GPT2.parse,
    prefix="transformer.",
    names=named("embed=wte positions=wpe norm=ln_f head=lm_head")
    | in_layers("attention_norm=ln_1 mlp_norm=ln_2", "h.{i}")
    | {f"layers.{{i}}.{ours}": Source(f"h.{{i}}.{theirs}", transpose=True) for ours, theirs in _LINEARS.items()}
    | {f"layers.{{i}}.attention.{one}": Source("h.{i}.attn.c_attn", transpose=True, fused=True) for one in "qkv"},
    inert=re.compile(r"h\.\d+\.attn\.(?:attention\.)?(?:bias|masked_bias|causal_mask|embed_positions)"),
)


def _shared_heads(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    return {"kv_heads": 1 if keys.flag("multi_query", True) else facts["heads"]}


_BIGCODE = replace(LIKE_GPT2, mlps=gelus("gelu_pytorch_tanh"), more=(_shared_heads,), unused=("num_key_value_heads",))
BIGCODE = replace(
    GPT2,
    architectures={"GPTBigCodeForCausalLM": "gpt_bigcode"},
    parse=_BIGCODE.parse,
    names={name: replace(one, transpose=False, fused=False) for name, one in GPT2.names.items()},
    own_orders=_by_groups,
)


def _neo_windows(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    if (types := keys.raw("attention_layers")) is None:
        types = ["global", "local"] * (facts["layers"] // 2)
        keys.only("attention_types", [[types[:2], len(types) // 2]], why="types of layers without attention_layers")
    if not isinstance(types, list) or len(types) != facts["layers"] or not {*map(str, types)} <= {"global", "local"}:
        raise keys.error("attention_layers must give each layer's type, global or local")
    window = keys.whole("window_size", 256, most=MAX_TOKENS)
    return {"windows": tuple(window if kind == "local" else None for kind in types)}


_GPT_NEO = replace(
    LIKE_GPT2,
    biases=lambda _: parts.Biases(False, True, True),
    scales=lambda *_: Scales(attention=1.0),
    more=(_neo_windows,),
    unused=("attention_types", "embed_dropout", "resid_dropout"),
    keys=pairs("num_hidden_layers=num_layers num_attention_heads=num_heads"),
)
GPT_NEO = replace(
    GPT2,
    architectures={"GPTNeoForCausalLM": "gpt_neo"},
    parse=_GPT_NEO.parse,
    names={name: replace(one, transpose=False) for name, one in GPT2.names.items()}
    | in_layers(" ".join(f"attention.{one[0]}={one}_proj" for one in ("q", "k", "v", "out")), "h.{i}.attn.attention"),
)


def _opt_norms(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    keys.only("do_layer_norm_before", True, why="norms of the residual stream behind each addition")
    keys.only("word_embed_proj_dim", facts["width"], why="embeddings of another width")
    keys.only("layer_norm_elementwise_affine", True, why="norms without weights in this architecture")
    keys.only("_remove_final_layer_norm", False, why="no norm behind the last layer")
    return {}


_OPT = replace(
    LIKE_GPT2,
    biases=lambda keys: parts.Biases(*[keys.flag("enable_bias", True)] * 3),
    norms=parts.Norms(lambda _: 1e-5, {"norm": "layer"}),
    mlps=gelus("relu"),
    more=(_opt_norms,),
    unused=("dropout", "layerdrop", "activation_dropout", "init_std"),
    keys={"intermediate_size": "ffn_dim"},
)
OPT = replace(
    GPT2,
    architectures={"OPTForCausalLM": "opt"},
    parse=_OPT.parse,
    prefix="model.decoder.",
    names=named("embed=embed_tokens norm=final_layer_norm head=lm_head")
    | {"positions": Source("embed_positions", skipped=2)}
    | in_layers("""
        attention_norm=self_attn_layer_norm attention.q=self_attn.q_proj attention.k=self_attn.k_proj
        attention.v=self_attn.v_proj attention.o=self_attn.out_proj mlp_norm=final_layer_norm mlp.up=fc1 mlp.down=fc2
    """),
)


_BIOGPT = replace(
    _OPT,
    biases=LIKE_GPT2.biases,
    mlps=gelus("gelu", "hidden_act"),
    scales=lambda keys, facts: Scales(facts["width"] ** 0.5 if keys.flag("scale_embedding", True) else 1.0),
    more=(),
    unused=(*_OPT.unused, "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    keys={},
)
BIOGPT = replace(
    OPT,
    architectures={"BioGptForCausalLM": "biogpt"},
    parse=_BIOGPT.parse,
    prefix="biogpt.",
    names=OPT.names | named("norm=layer_norm"),
    aliases={"output_projection.weight": "lm_head.weight"},
)


def _gptj_blocks(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    keys.only("qk_layernorm", False, why="a LayerNorm of each head of q and k in this architecture")
    if facts["tied_head"]:
        raise keys.error("tie_word_embeddings asks for a head tied to the embeddings that has a bias")
    return {"parallel": "one norm", "head_bias": True}


_GPTJ = replace(
    LIKE_GPT2,
    biases=lambda _: parts.Biases(False, False, True),
    positions=parts.Positions(parts.counted_rope(10000.0, 64), windows=None),
    more=(_gptj_blocks,),
    tied=False,
)
GPTJ = replace(
    GPT2,
    architectures={"GPTJForCausalLM": "gptj"},
    parse=_GPTJ.parse,
    names=named("embed=wte norm=ln_f head=lm_head")
    | in_layers(
        """
        attention_norm=ln_1 attention.q=attn.q_proj attention.k=attn.k_proj attention.v=attn.v_proj
        attention.o=attn.out_proj mlp.up=mlp.fc_in mlp.down=mlp.fc_out
        """,
        "h.{i}",
    ),
    neighbours=True,
)


def _in_shards(base: str, graph: Graph) -> Order | None:
    """The row order of CodeGen's files: four shards in turn, each with its heads of q, of v and of k."""
    attention, _, part = base.rpartition(".")
    if part not in ("q", "k", "v"):
        return None
    size, local = graph.rotary_size, graph.shapes[f"{attention}.{part}.weight"][0] // 4
    turned = head_order(size, graph.ropes[0].rotated or size, neighbours=part != "v")
    rows = range(size) if turned is None or part == "v" else turned.rows
    first = "qvk".index(part) * local
    return Order(3 * local, tuple(first + at + row for at in range(0, local, size) for row in rows))


def _shards(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    if facts["heads"] % 4:
        raise keys.error(f"n_head is {facts['heads']}, but CodeGen's files have four shards of whole heads")
    return {}


CODEGEN = replace(
    GPTJ,
    architectures={"CodeGenForCausalLM": "codegen"},
    parse=replace(_GPTJ, more=(_gptj_blocks, _shards)).parse,
    names=GPTJ.names | {f"layers.{{i}}.attention.{one}": Source("h.{i}.attn.qkv_proj") for one in "qkv"},
    own_orders=_in_shards,
)


def _falcon_blocks(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:
    keys.only("alibi", False, why="biases of scores by the distance (ALiBi)")
    groups, heads = keys.flag("new_decoder_architecture", False), facts["heads"]
    given, shared = keys.whole("num_kv_heads", heads, most=heads), _shared_heads(keys, facts)["kv_heads"]
    kv_heads = given if groups else shared
    if heads % kv_heads:
        raise keys.error(f"{heads} query heads cannot share {kv_heads} key-value heads evenly; correct config.json")
    beside = keys.flag("parallel_attn", True) or groups
    two = keys.whole("num_ln_in_parallel_attn", 2 if groups else 1, most=2) == 2 and groups
    return {"kv_heads": kv_heads, "parallel": ("two norms" if two else "one norm") if beside else None}


_FALCON = parts.LlamaLike(
    lambda keys: parts.Biases(*[keys.flag("bias", False)] * 3),
    _norms(),
    positions=parts.Positions(parts.rope(), windows=None),
    sizes=parts.Sizes(mlp_width=_wide, context=2048),
    mlps=gelus("gelu", "activation"),
    tied=True,
    more=(_falcon_blocks,),
    keys={"intermediate_size": "ffn_hidden_size"},
)
_BIG = "attention.o={0}.dense mlp_norm=post_attention_layernorm mlp.up=mlp.dense_h_to_4h mlp.down=mlp.dense_4h_to_h"
FALCON = Family(
    architectures={"FalconForCausalLM": "falcon"},
    parse=_FALCON.parse,
    prefix="transformer.",
    names=named("embed=word_embeddings norm=ln_f head=lm_head")
    | in_layers(f"attention_norm=input_layernorm {_BIG.format('self_attention')}", "h.{i}")
    | {f"layers.{{i}}.attention.{one}": Source("h.{i}.self_attention.query_key_value") for one in "qkv"},
    renames=(
        (re.compile(r"(h\.\d+)\.ln_attn\.(\w+)"), r"\1.input_layernorm.\2"),
        (re.compile(r"(h\.\d+)\.ln_mlp\.(\w+)"), r"\1.post_attention_layernorm.\2"),
    ),
    own_orders=_by_groups,
)


def _neox_rope(keys: JsonKeys, head_size: int, context: int) -> tuple[Rope, int, None]:
    theta, partial = keys.number("rotary_emb_base", 10000.0, above=1.0), keys.number("rotary_pct", 0.25)
    return (*read_rope(keys, theta, head_size, context, partial), None)


def _neox_blocks(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:  # noqa: ARG001
    keys.only("tie_word_embeddings", False, why="a head tied to the embeddings in this architecture")
    return {"parallel": "two norms" if keys.flag("use_parallel_residual", True) else None}


_NEOX = parts.LlamaLike(
    lambda keys: parts.Biases(keys.flag("attention_bias", True), keys.flag("attention_bias", True), True),
    _norms("layer_norm_eps"),
    positions=parts.Positions(_neox_rope, windows=None),
    sizes=parts.Sizes(context=2048),
    mlps=gelus("gelu", "hidden_act"),
    more=(_neox_blocks,),
)


def _heads_in_turn(name: str) -> dict[str, Source]:
    return {f"layers.{{i}}.attention.{one}": Source(name, turn=(at, 3)) for at, one in enumerate("qkv")}


NEOX = Family(
    architectures={"GPTNeoXForCausalLM": "gpt_neox"},
    parse=_NEOX.parse,
    prefix="gpt_neox.",
    names=named("embed=embed_in norm=final_layer_norm head=embed_out")
    | in_layers(f"attention_norm=input_layernorm {_BIG.format('attention')}")
    | _heads_in_turn("layers.{i}.attention.query_key_value"),
    aliases={"lm_head.weight": "embed_out.weight"},  # as transformers 5 writes it
    inert=re.compile(r"layers\.\d+\.(?:self_attn|attention)\.(?:bias|masked_bias)"),
)


_PHI = replace(
    _NEOX,
    biases=LIKE_GPT2.biases,
    positions=parts.Positions(parts.rope(partial=0.5), windows=None),
    mlps=gelus(key="hidden_act"),
    more=(_gptj_blocks,),
)
PHI = replace(
    NEOX,
    architectures={"PhiForCausalLM": "phi"},
    parse=_PHI.parse,
    prefix="model.",
    names=named("embed=embed_tokens norm=final_layernorm head=lm_head")
    | in_layers("""
        attention_norm=input_layernorm attention.q=self_attn.q_proj attention.k=self_attn.k_proj
        attention.v=self_attn.v_proj attention.o=self_attn.dense mlp.up=mlp.fc1 mlp.down=mlp.fc2
    """),
    aliases={},
)


def _persimmon_norms(keys: JsonKeys, facts: parts.Facts) -> parts.Facts:  # noqa: ARG001
    keys.skip("image_size", "patch_size", "num_channels")  # Fuyu's
    return {"qk_norm": "biased" if keys.flag("qk_layernorm", True) else None}


_PERSIMMON = replace(
    _NEOX,
    positions=parts.Positions(parts.rope(partial=0.5), windows=None),
    sizes=parts.Sizes(context=16384),
    mlps=gelus("relu2", "hidden_act"),
    more=(_persimmon_norms,),
)
PERSIMMON = replace(
    NEOX,
    architectures={"PersimmonForCausalLM": "persimmon", "FuyuForCausalLM": "fuyu"},
    parse=_PERSIMMON.parse,
    prefix="model.",
    names=named("embed=embed_tokens norm=final_layernorm head=lm_head")
    | in_layers(f"""
        attention_norm=input_layernorm attention.q_norm=self_attn.q_layernorm
        attention.k_norm=self_attn.k_layernorm {_BIG.format("self_attn")}
    """)
    | _heads_in_turn("layers.{i}.self_attn.query_key_value"),
    aliases={},
)


def _last_bias(keys: JsonKeys, config: ModelConfig) -> tuple[ModelConfig, Graph]:
    keys.only("rotary_pct", 1.0, why="rotation of a part of each head in this architecture")
    keys.only("rotary_emb_base", 10000, why="another base of the rotation")
    graph = decoder(config)
    *before, attention, mlp = graph.blocks
    assert isinstance(attention, Attention), "a layer is attention, then an MLP"
    return config, replace(graph, blocks=(*before, replace(attention, out=replace(attention.out, bias=True)), mlp))


_NEOX_JAPANESE = replace(
    _NEOX,
    biases=parts.no_biases,
    positions=parts.Positions(parts.rope(partial=1.0), windows=None),
    sizes=parts.Sizes(mlp_width=lambda keys: keys.whole("intermediate_multiple_size", 4) * keys.whole("hidden_size")),
    more=(),
    tied=True,
    graph=_last_bias,
)
NEOX_JAPANESE = replace(
    NEOX,
    architectures={"GPTNeoXJapaneseForCausalLM": "gpt_neox_japanese"},
    parse=_NEOX_JAPANESE.parse,
    prefix="gpt_neox_japanese.",
    names=NEOX.names | named("head=lm_head"),
    aliases={"embed_out.weight": "lm_head.weight"},
    renames=((re.compile(r"(layers\.\d+\.attention\.dense)_bias"), r"\1.bias"),),
)
OLDER = (GPT2, BIGCODE, GPT_NEO, OPT, BIOGPT, GPTJ, CODEGEN, FALCON, NEOX, NEOX_JAPANESE, PERSIMMON, PHI)
