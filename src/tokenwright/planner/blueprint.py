"""What a plan needs to know of a model: its tensors' shapes, what each layer keeps of a token, and what work it is.

A supported model's blueprint is drawn from the very `ModelConfig` that the engine runs; of others there is a blueprint
alone (`others.py`), and `config` is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tokenwright.backends.layout import format_of
from tokenwright.backends.packed import packed_sizes
from tokenwright.cache.spec import Heads, Latent
from tokenwright.config import DTYPE_BYTES, DType, ModelConfig, WeightFormat

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention. `window`: its reach in tokens, itself included, or None for full attention."""

    layout: Heads | Latent
    window: int | None
    pair_flops: int  # of one row and one token that it reads, over all query heads


@dataclass(frozen=True)
class Blueprint:
    """A model as far as its memory and its work go.

    `tensors` are under our names: vectors [n], matrices [out, in], the experts of a layer in one [E, out, in], of
    which each token meets `chosen`. `remarks` are what a reader of the plan should know of how it was drawn.
    """

    architecture: str
    context: int
    dtype: DType
    tensors: Mapping[str, Shape]
    layers: tuple[Layer, ...]
    chosen: int = 0
    config: ModelConfig | None = None
    packed: WeightFormat | None = None  # of a folder whose weights are quantised
    remarks: tuple[str, ...] = field(default=())

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(map(prod, self.tensors.values()))

    @property
    def experts(self) -> int:
        """E: the experts of a layer that has any; 0 where none has."""
        return max((shape[0] for shape in self.tensors.values() if len(shape) == 3), default=0)

    @cached_property
    def block_weights(self) -> int:
        """P_b: weights of all blocks that one token is multiplied with."""
        blocks = [shape for name, shape in self.tensors.items() if name.startswith("layers.")]
        dense = sum(prod(shape) for shape in blocks if len(shape) == 2)
        return dense + sum(self.chosen * prod(shape[1:]) for shape in blocks if len(shape) == 3)

    @property
    def head_weights(self) -> int:
        """P_lm: weights of the language-model head, which may be the embedding."""
        return prod(self.tensors["embed.weight"])

    def experts_met(self, rows: int) -> int:
        """Experts of a layer that `rows` tokens meet between them, if each meets any with the same chance."""
        missed = (1 - self.chosen / self.experts) ** rows if self.experts else 1.0
        return round(self.experts * (1 - missed))

    def weight_bytes(self, form: WeightFormat) -> int:
        """Bytes of all weights in a format that is not native."""
        return sum(_nbytes(name, shape, form) for name, shape in self.tensors.items())

    def read_bytes(self, form: WeightFormat, rows: int) -> int:
        """Bytes of the weights that a step of `rows` tokens reads.

        All but tables in which a row is looked up, and the experts that no token meets.
        """
        met = self.experts_met(rows)
        tables = {"positions.weight"} | ({"embed.weight"} if "head.weight" in self.tensors else set())
        read = {name: shape for name, shape in self.tensors.items() if name not in tables}
        return sum(_nbytes(name, (met, *shape[1:]) if len(shape) == 3 else shape, form) for name, shape in read.items())


def of_config(config: ModelConfig, packed: WeightFormat | None = None, remarks: tuple[str, ...] = ()) -> Blueprint:
    """The blueprint of a model that the engine runs."""
    layout = Heads(config.kv_heads, config.head_size)
    pair_flops = 4 * config.heads * config.head_size
    layers = tuple(Layer(layout, window, pair_flops) for window in config.windows)
    return Blueprint(
        config.architecture,
        config.context,
        config.dtype,
        config.shapes,
        layers,
        config=config,
        packed=packed,
        remarks=remarks,
    )


def _nbytes(name: str, shape: Shape, form: WeightFormat) -> int:
    """Bytes of one tensor. Where matrices are quantised, all else is kept in fp32, a table of positions too."""
    if not form.quantised:
        return prod(shape) * DTYPE_BYTES[form.name]
    if len(shape) < 2 or name == "positions.weight":
        return 4 * prod(shape)
    *each, out, inner = shape
    codes, scales = packed_sizes(out, inner, format_of(name.removesuffix(".weight"), form))
    return prod(each) * (codes + 2 * scales)
