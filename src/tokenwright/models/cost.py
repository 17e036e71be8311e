"""The cost of a step, derived from a model's graph: floating-point operations and bytes of K and V.

    A(t)             = sum_l a_l min(t, s_l + W_l)                scores and the weighted sum of values
    n tokens onto p  = 2 P_b n + 2 P_lm rows + sum_{i=1..n} A(p + i)

P_b: the weights of all blocks that each row is multiplied with; P_lm = width x vocabulary; t: the context of a row,
itself included; a_l: the FLOP for one row and one token that it attends to in layer l (4 H D with heads); W_l, s_l: the
layer's window and sinks. All else is below one percent, and omitted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenwright.cache import LayerSpec, Part
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.models.graph import Graph


@dataclass(frozen=True, slots=True)
class Cost:
    flops: int = 0
    kv_read: int = 0  # bytes of K, V and states that must be read
    kv_written: int = 0  # bytes of K, V and states stored

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.kv_read + other.kv_read, self.kv_written + other.kv_written)


class CostModel:
    def __init__(self, graph: Graph, specs: Sequence[LayerSpec]) -> None:
        self.graph = graph
        self.specs = tuple(specs)

    @cached_property
    def block_weights(self) -> int:
        return self.graph.embed.multiplied + sum(op.multiplied for op in self.graph.blocks)

    @property
    def head_weights(self) -> int:
        return self.graph.head.multiplied

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self.specs)

    @cached_property
    def _pair_flops(self) -> Mapping[AttentionWindow, int]:
        found: Counter[AttentionWindow] = Counter()
        for op, spec in zip(self.graph.attention, self.specs, strict=True):
            found[spec.window] += op.pair_flops
        return found

    @cached_property
    def _parts(self) -> Counter[Part]:
        return Counter(part for spec in self.specs for part in spec.parts)

    @cached_property
    def _own_parts(self) -> Counter[Part]:
        return Counter(part for spec in self.specs for part in spec.own_parts)

    def kept_bytes(self, tokens: int) -> int:
        kept = sum(
            count * part.bytes_per_token * part.window.tokens_read(tokens, tokens)
            for part, count in self._own_parts.items()
        )
        return kept + (self.state_bytes if tokens else 0)

    @cached_property
    def state_bytes(self) -> int:
        return sum(spec.state_bytes for spec in self.specs)

    def attention_flops(self, context: int) -> int:
        """A(t): FLOP of one row that attends to `context` tokens, itself included, in all layers."""
        return sum(flops * window.tokens_read(context - 1, context) for window, flops in self._pair_flops.items())

    def _attention_up_to(self, context: int) -> int:
        total = 0
        for window, flops in self._pair_flops.items():
            # Up to the edge each row attends to one more token than the last; later rows attend to as many.
            edge = window.tokens_read(context - 1, context)
            total += flops * (edge * (edge + 1) // 2 + (context - edge) * edge)
        return total

    def chunk(self, start: int, length: int, rows: int = 1) -> Cost:
        """The cost of `length` tokens onto `start` cached ones, each read once, with logits for `rows` of them."""
        stop = start + length
        read, written = 0, 0
        for part, count in self._parts.items() if length else ():
            read += count * part.bytes_per_token * part.window.tokens_read(start, stop)
        for part, count in self._own_parts.items() if length else ():
            written += count * part.bytes_per_token * len(part.stored(range(start, stop)))
        if length:
            read += self.state_bytes if start else 0
            written += self.state_bytes
        return Cost(self.flops(start, length, rows), read, written)

    def flops(self, start: int, length: int, rows: int = 1) -> int:
        products, stop = 2 * self.block_weights * length + 2 * self.head_weights * rows, start + length
        if length == 1:
            return products + self.attention_flops(stop)
        return products + self._attention_up_to(stop) - self._attention_up_to(start)

    def run(self, prompt: int, written: int, *, cache: bool, reused: int = 0) -> Cost:
        """The cost of `written` >= 1 tokens after a prompt of one chunk, `reused` tokens of which are cached."""
        assert 0 <= reused < prompt and (cache or not reused), "a cache has K and V to reuse, but not the last token's"
        contexts = range(prompt, prompt + written)
        if not cache:
            return sum((self.chunk(0, context) for context in contexts), Cost())
        steps = (self.chunk(context - 1, 1) for context in contexts[1:])
        return sum(steps, self.chunk(reused, prompt - reused))
