"""What a step costs, derived from shapes alone: floating-point operations and bytes of memory traffic.

Symbols: P_b matmul weights of all blocks, P_lm = width x vocabulary (the head, also where it is tied; looking up an
embedding is no arithmetic), t the context of a row, itself included, W_l the window of layer l and s_l its sinks. One
multiply-add is 2 FLOP. Norms, softmax, rotations and activations are left out: they are far below one percent of the
work.

    A(t)             = 4 H D sum_l min(t, s_l + W_l)              scores and the weighted sum of values
    n tokens onto p  = 2 P_b n + 2 P_lm rows + sum_{i=1..n} A(p + i)

So a cached step is 2 (P_b + P_lm) + A(t), and a step without the cache is a chunk of all t tokens onto nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tokenwright.cache import LayerSpec, Part
from tokenwright.config import ModelConfig
from tokenwright.engine.window import AttentionWindow


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a step, or of several added up."""

    flops: int = 0
    kv_read: int = 0  # bytes of K and V that attention must read
    kv_written: int = 0  # bytes of K and V stored

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.kv_read + other.kv_read, self.kv_written + other.kv_written)


class CostModel:
    """Costs of one model under one cache spec."""

    def __init__(self, config: ModelConfig, specs: Sequence[LayerSpec]) -> None:
        self.config = config
        self.specs = tuple(specs)

    @cached_property
    def block_weights(self) -> int:
        """P_b: weights that take part in a matrix product, in all blocks together."""
        matrices = (s for name, s in self.config.shapes.items() if name.startswith("layers.") and len(s) == 2)
        return sum(prod(shape) for shape in matrices)

    @property
    def head_weights(self) -> int:
        """P_lm: weights of the language-model head."""
        return self.config.width * self.config.vocab_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token more takes in the KV cache."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @cached_property
    def _reaches(self) -> Counter[AttentionWindow]:
        """How many layers have each reach."""
        return Counter(spec.window for spec in self.specs)

    @cached_property
    def _parts(self) -> Counter[Part]:
        """How many layers keep each part."""
        return Counter(part for spec in self.specs for part in spec.parts)

    def attention_flops(self, context: int) -> int:
        """A(t): one row over `context` tokens, itself included, in all layers."""
        reached = sum(count * window.kept(context - 1, context) for window, count in self._reaches.items())
        return 4 * self.config.heads * self.config.head_size * reached

    def chunk(self, start: int, length: int, rows: int = 1) -> Cost:
        """`length` tokens onto `start` cached ones, with logits for `rows` of them.

        Of what its rows read together each token is read once.
        """
        stop = start + length
        read, written = 0, 0
        for part, count in self._parts.items() if length else ():
            read += count * part.bytes_per_token * part.window.kept(start, stop)
            written += count * part.bytes_per_token * len(part.stored(range(start, stop)))
        return Cost(
            flops=2 * self.block_weights * length
            + 2 * self.head_weights * rows
            + sum(self.attention_flops(context) for context in range(start + 1, stop + 1)),
            kv_read=read,
            kv_written=written,
        )

    def run(self, prompt: int, written: int, *, cache: bool, reused: int = 0) -> Cost:
        """`written` >= 1 tokens after a prompt, the prompt in one chunk; with the cache or anew for every token.

        The K and V of the prompt's first `reused` tokens are there already.
        """
        assert 0 <= reused < prompt and (cache or not reused), "a cache has K and V to reuse, but not the last token's"
        contexts = range(prompt, prompt + written)
        if not cache:
            return sum((self.chunk(0, context) for context in contexts), Cost())
        steps = (self.chunk(context - 1, 1) for context in contexts[1:])
        return sum(steps, self.chunk(reused, prompt - reused))
