"""Models that Tokenwright can plan but not run yet: DeepSeek-V3, as a graph that only describes sizes.

The parser reads only the keys that determine shapes. It refuses, by name, any key that it neither reads nor knows to
leave the sizes unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast, get_args

from tokenwright.checkpoints.strict import Keys
from tokenwright.config import DType, Latent, LayerKV
from tokenwright.models.graph import Embed, Graph, Head, Matrix, Norm, Op, Shape

_MOST = 1 << 24
_SIZELESS = frozenset(
    (
        "architectures", "model_type", "transformers_version", "auto_map", "torch_dtype", "dtype", "use_cache",
        "cache_implementation", "initializer_range", "attention_dropout", "pretraining_tp", "bos_token_id",
        "eos_token_id", "pad_token_id", "rms_norm_eps", "hidden_act", "hidden_activation", "rope_theta",
        "rope_scaling", "rope_parameters", "rope_local_base_freq", "rope_interleave", "query_pre_attn_scalar",
        "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention", "boi_token_index",
        "eoi_token_index", "image_token_index", "image_token_id", "mm_tokens_per_image", "vision_config", "ep_size",
        "aux_loss_alpha", "seq_aux", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
        "scoring_func", "num_key_value_heads", "qk_head_dim", "head_dim", "output_router_logits",
    )
)  # fmt: skip
_ADVICE = "the planner cannot tell whether that changes the sizes. If it does not, remove it from config.json"


@dataclass(frozen=True)
class Sized(Op):
    """A block's op that describes its tensors but not its arithmetic: no backend implements it.

    tensors: vectors [n], matrices [out, in], and the experts of a layer in one [E, out, in]; the router sends each row
    to `chosen` experts. For attention, `layer` is its KV layout and window, and `pair` the FLOP for one row and one
    token that it attends to.
    """

    tensors: Mapping[str, Shape]
    layer: LayerKV | None = None
    pair: int = 0
    chosen: int = 0

    @property
    def shapes(self) -> dict[str, Shape]:
        return dict(self.tensors)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        flat = ((name, shape) for name, shape in self.tensors.items() if len(shape) == 2)
        return tuple(Matrix.single(name.removesuffix(".weight"), *shape) for name, shape in flat)

    @property
    def multiplied(self) -> int:
        shapes = (shape for shape in self.tensors.values() if len(shape) > 1)
        return sum(prod(shape) if len(shape) == 2 else self.chosen * prod(shape[1:]) for shape in shapes)

    @property
    def idle(self) -> int:
        stacks = (shape for shape in self.tensors.values() if len(shape) == 3)
        return sum((shape[0] - self.chosen) * prod(shape[1:]) for shape in stacks)

    def read(self, rows: int) -> dict[str, Shape]:
        met = self.experts_met(rows)
        return {name: (met, *shape[1:]) if len(shape) == 3 else shape for name, shape in self.tensors.items()}

    @property
    def kv(self) -> LayerKV | None:
        return self.layer

    @property
    def pair_flops(self) -> int:
        return self.pair

    @property
    def experts(self) -> int:
        """E, the number of experts; 0 for a dense op."""
        return max((shape[0] for shape in self.tensors.values() if len(shape) == 3), default=0)

    def experts_met(self, rows: int) -> int:
        """Expected number of distinct experts that `rows` tokens activate, if the router chooses uniformly."""
        missed = (1 - self.chosen / self.experts) ** rows if self.experts else 1.0
        return round(self.experts * (1 - missed))


class Planned(NamedTuple):
    """A graph for the planner, the dtype of its weights, and remarks to print with the plan."""

    graph: Graph
    dtype: DType
    remarks: tuple[str, ...]


def planned_only(config: Mapping[str, Any], where: str) -> Planned | None:
    """Parse a config.json of one of these models; None for any other. Raises CheckpointError."""
    listed = config.get("architectures")
    name = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
    reader = _READERS.get(name) if isinstance(name, str) else None
    return reader(_keys(config, where), str(name)) if reader else None


def _keys(values: Mapping[str, Any], where: str) -> Keys:
    return Keys({key: value for key, value in values.items() if not key.startswith("_")}, where)


def _dtype(keys: Keys) -> DType:
    name = str(keys.raw("dtype") or keys.raw("torch_dtype")).removeprefix("torch.")
    return cast(DType, name) if name in get_args(DType) else "float32"


def _linears(at: str, **shapes: Shape) -> dict[str, Shape]:
    return {f"{at}.{name}.weight": shape for name, shape in shapes.items()}


def _gated(at: str, width: int, inner: int, *experts: int) -> dict[str, Shape]:
    """The tensors of a gated MLP; with `experts`, of that many in one tensor each."""
    wide, narrow = (*experts, inner, width), (*experts, width, inner)
    return _linears(at, gate=wide, up=wide, down=narrow)


def _ends(keys: Keys, vocab: int, width: int, tied: bool) -> tuple[Embed, Head]:
    table = Matrix.single("embed", vocab, width)
    norm = Norm("norm", "rms", width, keys.number("rms_norm_eps", 1e-6))
    return Embed(table), Head(norm, table if tied else Matrix.single("head", vocab, width))


def _deepseek3(keys: Keys, architecture: str) -> Planned:
    """DeepSeek-V3 (arXiv 2412.19437): a latent in place of K and V (MLA), and experts in all but the first layers.

    The FLOP count assumes absorbed attention: scores and sums use the latent itself, and the up-projection is
    multiplied with the query and with the result instead.
    """
    layers = keys.whole("num_hidden_layers", most=4096)
    d, heads = keys.whole("hidden_size", most=_MOST), keys.whole("num_attention_heads", most=_MOST)
    rank, rope = keys.whole("kv_lora_rank", most=_MOST), keys.whole("qk_rope_head_dim", most=_MOST)
    nope, value = keys.whole("qk_nope_head_dim", most=_MOST), keys.whole("v_head_dim", most=_MOST)
    vocab, dense = keys.whole("vocab_size", most=_MOST), keys.whole("first_k_dense_replace", 0, least=0)
    chosen = keys.whole("num_experts_per_tok", most=_MOST)
    keys.only("attention_bias", False, why="biases of attention")
    keys.only("tie_word_embeddings", False, why="a tied head")
    keys.only("moe_layer_freq", 1, why="experts in some layers only")
    keys.only("topk_method", "noaux_tc", why="another choice of experts")
    q_rank = 0 if keys.is_null("q_lora_rank") else keys.whole("q_lora_rank", most=_MOST)
    q = _low_rank("q", d, q_rank, rope=0, out=heads * (nope + rope))
    kv = _low_rank("kv", d, rank, rope, out=heads * (nope + value))
    embed, head = _ends(keys, vocab, d, tied=False)
    mlp, moe = _gated("", d, keys.whole("intermediate_size", most=_MOST)), _experts(keys, d)
    kept, pair = LayerKV(Latent(rank, rope)), 2 * heads * (2 * rank + rope)
    blocks: list[Op] = []
    for i in range(layers):
        at = f"layers.{i}"
        attention = _linears(f"{at}.attention", **q, **kv, o=(d, heads * value)) | _linears(at, attention_norm=(d,))
        blocks.append(Sized(attention, kept, pair))
        inner = {f"{at}.mlp{name}": shape for name, shape in (mlp if i < dense else moe).items()}
        blocks.append(Sized(inner | _linears(at, mlp_norm=(d,)), chosen=chosen))
    context, remarks = keys.whole("max_position_embeddings"), _deepseek3_remarks(keys)
    dtype = _dtype(keys)
    keys.finish(_SIZELESS, _ADVICE)
    return Planned(Graph(architecture, context, embed, tuple(blocks), head), dtype, remarks)


def _low_rank(name: str, width: int, rank: int, rope: int, out: int) -> dict[str, Shape]:
    """A low-rank projection: matrix a, norm, matrix b; `rope` more outputs of a bypass b. rank 0: one matrix."""
    if not rank:
        return {name: (out, width)}
    return {f"{name}_a": (rank + rope, width), f"{name}_a_norm": (rank,), f"{name}_b": (out, rank)}


def _experts(keys: Keys, width: int) -> dict[str, Shape]:
    """The router with its score-correction bias, the routed experts, and the shared experts as one wide MLP."""
    count, inner = keys.whole("n_routed_experts", most=_MOST), keys.whole("moe_intermediate_size", most=_MOST)
    router: dict[str, Shape] = {".router.weight": (count, width), ".router.bias": (count,)}
    keys.whole("num_experts_per_tok", most=count)
    shared = keys.whole("n_shared_experts", most=_MOST)
    return router | _gated(".experts", width, inner, count) | _gated(".shared", width, shared * inner)


def _deepseek3_remarks(keys: Keys) -> tuple[str, ...]:
    remarks = ["attention counted with the latent absorbed"]
    if keys.whole("num_nextn_predict_layers", 0, least=0):
        remarks.append("without the layers that predict a second token (MTP)")
    stored = keys.raw("quantization_config")
    if stored is not None:
        kind = stored.get("quant_method") if isinstance(stored, dict) else None
        if kind != "fp8":
            raise keys.error("quantization_config must be of quant_method fp8, as the model was published")
        remarks.append(f"its files hold fp8; native is the dtype that config.json names, {_dtype(keys)}")
    return tuple(remarks)


_READERS: Mapping[str, Callable[[Keys, str], Planned]] = {
    "DeepseekV3ForCausalLM": _deepseek3,
}

PLANNED = tuple(_READERS)  # the architectures
