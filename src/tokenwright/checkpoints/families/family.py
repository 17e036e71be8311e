"""The parts of every model family: where a checkpoint stores a tensor, and readers of keys that families share."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.config import ModelConfig
from tokenwright.formats import DType
from tokenwright.models.experts import Experts
from tokenwright.models.graph import Graph
from tokenwright.models.op import Activation

MOST_LAYERS, MOST_WIDTH, MOST_MLP, MOST_VOCAB = 4096, 1 << 20, 1 << 24, 1 << 24

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu",
}  # fmt: skip

_LAYER, _EXPERT = re.compile(r"^layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")
_TEXT_MODEL = re.compile(r"^(?:(model\.)?(?:language|text)_model|llm)\.")
# Prefixes that torch.compile, DistributedDataParallel, FSDP and PEFT add.
_WRAPPERS = re.compile(
    r"^(?:(?:_orig_mod|module|_fsdp_wrapped_module|base_model\.model)\.)+"
    r"|(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)\."
)
_TOWER = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|visual|connector|audio_tower|multi_modal_projector|embed_vision|embed_audio|vision_embedder|vqmodel|embed_tokens_extend|vision_embed_tokens|image_newline)(?:\.|$)"
)

_CONTEXT_REPEATED = ("max_sequence_length", "max_seq_len", "max_seq_length", "model_max_length", "seq_length")


class Order(NamedTuple):
    """The order of stored rows, which come in blocks of `block`: ours are the rows `rows` of each block, in turn."""

    block: int
    rows: tuple[int, ...]
    turned: int = 0  # if not 0, each block is then transposed: this many inputs become our rows

    def ours(self, row: int) -> int:
        return row // self.block * (self.turned or len(self.rows))

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        blocks = shape[0] // (self.turned or len(self.rows))
        return blocks * self.block, *((self.turned,) if self.turned else shape[1:])


def head_order(size: int, rotated: int, neighbours: bool, of: tuple[int, int] = (0, 1)) -> Order | None:
    """The order of the rows of q or k, head by head; None if the file has ours.

    neighbours: the file rotates 2 i with 2 i + 1, not i with i + rotated / 2; scores do not depend on the order. of:
    the index of this tensor among those whose heads the file interleaves, and their number: (0, 3) for q in q, k and v.
    """
    turned, still = rotated // 2, range(rotated, size)
    first = range(0, rotated, 2) if neighbours else range(turned)
    second = range(1, rotated, 2) if neighbours else range(turned, rotated)
    half = len(still) // 2
    rows = (*first, *still[:half], *second, *still[half:])
    if of[1] == 1 and rows == tuple(range(size)):
        return None
    return Order(size * of[1], tuple(of[0] * size + row for row in rows))


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a checkpoint stores one of our tensors; `name` has no family prefix."""

    name: str
    transpose: bool = False  # stored as [in, out] (GPT-2's Conv1D)
    fused: bool = False  # q, k and v, or gate and up, are one tensor
    rows: tuple[int, int, int] | None = None  # of a fused tensor: our rows are [first, last) along `out`, of this many
    stacked: bool = False  # all experts, or streams, are one tensor; `rows` are then the stored rows of one
    turn: tuple[int, int] = (0, 1)  # its index among tensors whose heads the file interleaves, and their number
    halves: bool = False  # the heads of a stacked tensor are not interleaved but concatenated
    order: Order | None = None  # the order of its rows, if it is not ours
    plus: float = 0.0  # added to the stored numbers, in fp32: Gemma's norms multiply by 1 + weight
    log: bool = False  # the file has -exp of our numbers
    wide: bool = False  # stays in fp32: a bias that decides which experts are chosen
    skipped: int = 0  # how many rows of the file come before ours

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.rows is not None and not self.stacked:
            shape = (self.rows[2], *shape[1:])
        elif self.order is not None:
            shape = self.order.stored(shape)
        shape = shape[::-1] if self.transpose else shape
        return (self.rows[2], *shape[1:]) if self.rows is not None and self.stacked else shape


@dataclass(frozen=True, slots=True)
class NextNames:
    """The names of the layer that predicts one token further (MTP). {i} is the number of layers before it."""

    project: str
    token_norm: str
    hidden_norm: str
    norm: str
    at: str = "layers.{i}"  # prefix of its tensors' names
    hidden_first: bool = False  # the projection reads the hidden state before the embedding
    plus: float = 0.0
    apart: Mapping[str, TensorSource] = field(default_factory=dict)  # experts that only this layer stores one by one


_ANGLES = re.compile(r"(?:.+\.)?rotary(?:_emb)?\.(?:inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that share one config reader and one table of names. {i} is a layer, {e} an expert."""

    architectures: Mapping[str, str]  # architecture -> model_type of config.json
    parse: Callable[[JsonKeys, str], tuple[ModelConfig, Graph]]
    prefix: str
    names: dict[str, TensorSource]  # our names to the checkpoint's, both without .weight and .bias
    inert: re.Pattern[str] = re.compile("(?!)")  # tensors that are not read, besides those of angles
    neighbours: bool = False  # files rotate dimensions 2 i and 2 i + 1 of a head together
    aliases: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()
    stacks: re.Pattern[str] | None = None  # tensors [n, out, ...] that are read as [n out, ...]
    plain: Mapping[str, TensorSource] = field(default_factory=dict)  # other names in folders without quantised weights
    orders: Callable[[str, Graph], Order | None] | None = None  # the orders of rows; None: only heads are reordered
    own_orders: Callable[[str, Graph], Order | None] | None = None
    following: NextNames | None = None
    shared_kv: re.Pattern[str] | None = None  # unused K and V in layers that read another layer's
    fitted: Callable[[Graph, dict[str, Stored]], Graph] = lambda graph, _: graph  # fits the graph to the tensors

    def inert_in(self, bare: str, config: ModelConfig) -> bool:
        if self.inert.fullmatch(bare) or _ANGLES.fullmatch(bare):
            return True
        found = self.shared_kv.fullmatch(bare) if self.shared_kv is not None else None
        return found is not None and int(found[1]) >= config.layers - config.kv_shared

    def bare(self, name: str) -> str:
        """A name in a file without the prefixes of the family, of wrappers and of the text model."""
        bare = _TEXT_MODEL.sub("", _WRAPPERS.sub("", name)).removeprefix(self.prefix)
        for pattern, ours in self.renames:
            if pattern.fullmatch(bare):
                return pattern.sub(ours, bare)
        return self.aliases.get(bare, bare)

    def shape_of(self, bare: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            return (1,)
        if (
            self.stacks is None
            or len(shape) < 2
            or (len(shape) == 3 and shape[-1] == 1)
            or not self.stacks.fullmatch(bare)
        ):
            return shape  # mlx-lm transposes convolutions (second_names.py)
        if len(shape) == 4:  # [1, 1, n, 1]
            return (prod(shape),)
        return shape[0] * shape[1], *shape[2:]

    def sources(self, graph: Graph, *, plain: bool = False) -> dict[str, TensorSource]:
        """The source of every tensor of `graph.shapes`. plain: the folder has no quantised weights."""
        found, rows, names = {}, _rows_of_parts(graph), {**self.names, **(self.plain if plain else {})}
        mixed = (op for one in graph.blocks for op in one.parts if isinstance(op, Experts))
        experts = {_LAYER.findall(op.router.name)[0]: op.experts for op in mixed}
        for name in graph.shapes:
            base, kind = name.rsplit(".", 1)
            source = names[_LAYER.sub(r"layers.{i}.", _EXPERT.sub(".experts.{e}.", base))]
            layer, expert = _LAYER.match(base), _EXPERT.search(base)
            at = source.name.format(i=layer[1] if layer else "", e=expert[1] if expert else "")
            one = replace(
                source,
                name=f"{at}.{kind}",
                transpose=source.transpose and kind == "weight",
                plus=source.plus if kind == "weight" else 0.0,
                rows=_in_turn(rows[base], source.turn) if source.fused else None,
                order=self._order(base, source, graph),
            )
            if source.stacked and layer and expert:
                each = one.stored(graph.shapes[name])[0]
                first = int(expert[1]) * each
                one = replace(one, rows=(first, first + each, experts[layer[1]] * each))
            elif source.stacked and not layer:
                alike = [other for other in graph.shapes if other.startswith(f"{base.rpartition('.')[0]}.")]
                first, each = alike.index(name), one.stored(graph.shapes[name])[0]
                one = replace(one, rows=(first * each, (first + 1) * each, len(alike) * each))
            elif source.skipped:
                last = source.skipped + graph.shapes[name][0]
                one = replace(one, rows=(source.skipped, last, last))
            found[name] = one
        return found

    def _order(self, base: str, source: TensorSource, graph: Graph) -> Order | None:
        part = base.rsplit(".", 1)[-1]
        if source.halves:
            out, (index, count) = graph.shapes[f"{base}.weight"][0], source.turn
            return Order(count * out, tuple(range(index * out, (index + 1) * out)))
        if (source.fused or source.stacked) and source.turn[1] > 1:
            return Order(source.turn[1], (source.turn[0],))
        if self.orders is not None:
            return self.orders(base, graph)
        if self.own_orders is not None and (found := self.own_orders(base, graph)) is not None:
            return found
        if part not in ("q", "k", "v", "out_gate", "q_norm", "k_norm"):
            return None
        size, rope = graph.rotary_size, next(iter(graph.ropes), None)
        if rope is None or part in ("v", "out_gate"):
            return head_order(size, size, False, source.turn)
        return head_order(size, rope.rotated or size, self.neighbours, source.turn)


def _in_turn(rows: tuple[int, int, int], turn: tuple[int, int]) -> tuple[int, int, int]:
    """Row indices of one part of a fused matrix whose parts are interleaved row by row."""
    first, last, count = rows
    start = first - turn[0] * (last - first)
    return start, start + turn[1] * (last - first), count


def _rows_of_parts(graph: Graph) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for matrix in graph.matrices.values():
        first = 0
        for part, out in matrix.parts:
            found[part] = (first, first + out, matrix.out)
            first += out
    return found


class Parsed(NamedTuple):
    family: Family
    config: ModelConfig
    graph: Graph


def check_repeats(keys: JsonKeys, *contexts: int) -> None:
    """Refuse a key that repeats the context with another value than `contexts` (with and without RoPE scaling)."""
    for key in _CONTEXT_REPEATED:
        said = keys.whole(key, contexts[0])
        if said not in contexts:
            raise keys.error(
                f"{key} is {said:,}, but the model's context is {contexts[0]:,}; correct the one that is wrong, "
                f"or remove {key}"
            )


def activation(keys: JsonKeys, key: str, default: str) -> Activation:
    name = keys.text(key, default)
    if name not in _ACTIVATIONS:
        raise keys.error(f"{key} = {name!r} is not one of {', '.join(_ACTIVATIONS)}; Tokenwright lacks it")
    return _ACTIVATIONS[name]


def next_layer(bare: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to an MTP layer, by its name: it is after the last layer, or called MTP."""
    layer = _LAYER.match(bare)
    if bare.startswith("mtp"):
        return True
    return layer is not None and config.layers <= int(layer[1]) < config.layers + config.next_layers


def tower_of(name: str) -> str | None:
    found = _TOWER.match(name)
    return found[1] if found else None


def heads_of(keys: JsonKeys, default: int | None = None, kv_default: int | None = None) -> tuple[int, int]:
    heads = keys.whole("num_attention_heads", default, most=1 << 16)
    shared = keys.whole("num_key_value_heads", kv_default or heads, most=1 << 16)
    if heads % shared:
        raise keys.error(f"{heads} query heads cannot share {shared} key-value heads evenly; correct config.json")
    return heads, shared


def dtype(keys: JsonKeys) -> DType:
    """The dtype that the config declares; the dtypes in the weight files override it."""
    name = str(keys.raw("dtype") or keys.raw("torch_dtype") or "").removeprefix("torch.")
    return next((known for known in ("float32", "bfloat16", "float16") if known == name), "float32")


def size_of_head(keys: JsonKeys, width: int, heads: int) -> int:
    if width % heads:
        raise keys.error(
            f"a width of {width} cannot be divided into {heads} heads; correct config.json (or give head_dim)"
        )
    return width // heads


def only_silu(keys: JsonKeys) -> None:
    keys.only("hidden_act", "silu", "swish", why="another activation behind a convolution")


def pairs(text: str) -> dict[str, str]:
    return {one: other for one, _, other in (pair.partition("=") for pair in text.split())}


def named(text: str) -> dict[str, TensorSource]:
    return {ours: TensorSource(theirs) for ours, theirs in pairs(text).items()}


def in_layers(text: str, at: str = "layers.{i}") -> dict[str, TensorSource]:
    """The sources of a layer's tensors, from a text of OURS=THEIRS. at: the prefix in files."""
    return {f"layers.{{i}}.{ours}": TensorSource(f"{at}.{theirs}") for ours, theirs in pairs(text).items()}


def mlp_names(ours: str, theirs: str, parts: str = "gate_proj up_proj down_proj") -> dict[str, TensorSource]:
    names = zip(("gate", "up", "down"), parts.split(), strict=True)
    return {f"layers.{{i}}.{ours}.{one}": TensorSource(f"layers.{{i}}.{theirs}.{part}") for one, part in names}


def stacked_experts(
    up: str, down: str, *, transpose: bool = False, halves: bool = True, at: str = "layers.{i}"
) -> dict[str, TensorSource]:
    """Sources of experts in one tensor: each has its gates before its values, or (not halves) they alternate by row."""
    first, second = (
        TensorSource(f"{at}.{up}", transpose=transpose, stacked=True, turn=(half, 2), halves=halves) for half in (0, 1)
    )
    third = TensorSource(f"{at}.{down}", transpose=transpose, stacked=True)
    parts = {"gate": first, "up": second, "down": third}
    return {f"layers.{{i}}.mlp.experts.{{e}}.{one}": source for one, source in parts.items()}


def one_more(names: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The names, with 1 added to the stored weights of norms."""
    of_norms = {name: replace(one, plus=1.0) for name, one in names.items() if name.endswith("norm")}
    return {**names, **of_norms}


def without_ending(names: str) -> tuple[re.Pattern[str], str]:
    """Rename tensors of a layer that lack `.weight`; `names` is a pattern."""
    return re.compile(rf"((?:mtp\.)?layers\.\d+\.(?:{names}))"), r"\1.weight"
