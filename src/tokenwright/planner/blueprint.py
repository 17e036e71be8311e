"""What a plan needs to know of a model: its tensors' shapes, what each layer keeps of a token, and what work it is.

A supported model's blueprint is drawn from the very `ModelConfig` that the engine runs; of others there is a blueprint
alone (`others.py`), and `config` is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from tokenwright.cache.codec import Codec
from tokenwright.cache.spec import Heads, Latent
from tokenwright.config import DType, ModelConfig

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

    def weight_bytes(self, matrices: Codec, vectors: Codec) -> int:
        """Bytes of all weights, with matrices in one codec and vectors (norms, biases) in another."""
        return sum(_nbytes(shape, matrices, vectors) for shape in self.tensors.values())

    def read_bytes(self, matrices: Codec, vectors: Codec, rows: int) -> int:
        """Bytes of the weights that a step of `rows` tokens reads.

        All but tables in which a row is looked up, and the experts that no token meets.
        """
        met = self.experts_met(rows)
        tables = {"positions.weight"} | ({"embed.weight"} if "head.weight" in self.tensors else set())
        shapes = [shape for name, shape in self.tensors.items() if name not in tables]
        return sum(_nbytes((met, *shape[1:]) if len(shape) == 3 else shape, matrices, vectors) for shape in shapes)


def of_config(config: ModelConfig, remarks: tuple[str, ...] = ()) -> Blueprint:
    """The blueprint of a model that the engine runs."""
    layout = Heads(config.kv_heads, config.head_size)
    pair_flops = 4 * config.heads * config.head_size
    layers = tuple(Layer(layout, window, pair_flops) for window in config.windows)
    return Blueprint(
        config.architecture, config.context, config.dtype, config.shapes, layers, config=config, remarks=remarks
    )


def _nbytes(shape: Shape, matrices: Codec, vectors: Codec) -> int:
    """Bytes of one tensor; a matrix is quantised along its input, the last dimension."""
    codec = matrices if len(shape) > 1 else vectors
    return prod(shape[:-1]) * codec.nbytes(shape[-1])
