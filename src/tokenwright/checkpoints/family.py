"""What every model family is made of: where a checkpoint stores a tensor, and readers of keys that families share."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tokenwright.checkpoints.strict import Keys
from tokenwright.config import DType, ModelConfig
from tokenwright.models.graph import Activation, Graph

MOST_LAYERS, MOST_VOCAB = 4096, 1 << 24  # far above any known model: a config beyond is damaged

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}

_LAYER, _EXPERT = re.compile(r"^layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")
_CONTEXT_REPEATED = ("max_sequence_length", "max_seq_len", "max_seq_length", "model_max_length", "seq_length")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint stores one of our tensors; `name` is without the family's prefix."""

    name: str
    transpose: bool = False  # stored as [in, out], as GPT-2's Conv1D does
    fused: bool = False  # the file has the whole matrix (q, k and v; gate and up) in one tensor
    rows: tuple[int, int, int] | None = None  # of a fused one: our rows [first, last) along `out`, of so many
    paired: int = 0  # the size of a head whose rows are stored as 0, size / 2, 1, size / 2 + 1, ...; 0: in order

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor in the file, where our tensor has `shape`."""
        if self.rows is not None:
            shape = (self.rows[2], *shape[1:])
        return shape[::-1] if self.transpose else shape


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that share one config reader and one table of names.

    `parse` returns the ModelConfig and the graph of an architecture. `names` maps our names to the checkpoint's, both
    without `.weight` and `.bias`; {i} is the layer, {e} the expert. `prefix` is optional before the names in a file.
    `inert` matches tensors that are not weights.
    """

    architectures: Mapping[str, str]  # architecture -> model_type of config.json
    parse: Callable[[Keys, str], tuple[ModelConfig, Graph]]
    prefix: str
    names: dict[str, Source]
    inert: re.Pattern[str]

    def sources(self, graph: Graph) -> dict[str, Source]:
        """The checkpoint's source for every tensor of `graph.shapes`."""
        found, rows = {}, _rows_of_parts(graph)
        for name in graph.shapes:
            base, kind = name.rsplit(".", 1)
            source = self.names[_LAYER.sub(r"layers.{i}.", _EXPERT.sub(r".experts.{e}.", base))]
            layer, expert = _LAYER.match(base), _EXPERT.search(base)
            at = source.name.format(i=layer[1] if layer else "", e=expert[1] if expert else "")
            part = rows[base] if source.fused else None
            found[name] = Source(f"{at}.{kind}", source.transpose and kind == "weight", source.fused, part)
        return found


def _rows_of_parts(graph: Graph) -> dict[str, tuple[int, int, int]]:
    """For each linear layer of a matrix: its rows [first, last) of the matrix, and the number of all rows."""
    found: dict[str, tuple[int, int, int]] = {}
    for matrix in graph.matrices.values():
        first = 0
        for part, out in matrix.parts:
            found[part] = (first, first + out, matrix.out)
            first += out
    return found


class Parsed(NamedTuple):
    """A parsed config.json: the family, the model's hyperparameters and its graph."""

    family: Family
    config: ModelConfig
    graph: Graph


def check_repeats(keys: Keys, *contexts: int) -> None:
    """Refuse a key that repeats the context and says another one than `contexts`: with and without RoPE scaling."""
    for key in _CONTEXT_REPEATED:
        said = keys.whole(key, contexts[0])
        if said not in contexts:
            raise keys.error(
                f"{key} is {said:,}, but the model's context is {contexts[0]:,}; correct the one that is wrong, "
                f"or remove {key}"
            )


def activation(keys: Keys, key: str, default: str) -> Activation:
    name = keys.text(key, default)
    if name not in _ACTIVATIONS:
        raise keys.error(f"{key} = {name!r} is not one of {', '.join(_ACTIVATIONS)}; Tokenwright lacks it")
    return _ACTIVATIONS[name]


def dtype(keys: Keys) -> DType:
    """The dtype that the config declares; the dtypes in the weight files override it."""
    name = str(keys.raw("dtype") or keys.raw("torch_dtype") or "").removeprefix("torch.")
    return next((known for known in ("float32", "bfloat16", "float16") if known == name), "float32")


def size_of_head(keys: Keys, width: int, heads: int) -> int:
    if width % heads:
        raise keys.error(
            f"a width of {width} cannot be divided into {heads} heads; correct config.json (or give head_dim)"
        )
    return width // heads


def named(pairs: Mapping[str, str | Source]) -> dict[str, Source]:
    return {ours: Source(at) if isinstance(at, str) else at for ours, at in pairs.items()}
