"""What sequences keep of their K and V as they grow: the planner's one way of counting tokens and bytes.

Formats and reach come from `layer_specs`, by which the engine allocates, so that a plan and the engine cannot differ; a
token's bytes come from the blueprint's layout, which may be one that the engine does not have.

At t tokens a sequence keeps what the step reads that computes the last of them: t in a full layer, min(t, s + W) where
a window of W has s sinks. (Once that step is done, a window lets one more go: LLM.kv_bytes counts so.)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.config import DType, KVFormat, ModelConfig, Rope
from tokenwright.engine.window import AttentionWindow
from tokenwright.planner.blueprint import Blueprint, Layer

_FAR = 1 << 48  # tokens: beyond any text, whatever an option names


def specs_of(shape: Blueprint, native: DType, kv: KVFormat, window: int | None, sinks: int) -> tuple[LayerSpec, ...]:
    """The format and the reach of each layer. Raises RequestError for what the model cannot have."""
    return layer_specs(shape.config or _stand_in(shape), native, kv, window, sinks)


def _stand_in(shape: Blueprint) -> ModelConfig:
    """As much of a config as `layer_specs` needs for formats and reach. Its sizes mean nothing."""
    layers = len(shape.layers)
    return ModelConfig(
        "llama", shape.architecture, layers, width=1, heads=1, kv_heads=1, head_size=1, mlp_width=1, vocab_size=1,
        context=shape.context, positions=Rope(), windows=tuple(layer.window for layer in shape.layers),
        rotary=(True,) * layers, norm="rms", norm_eps=1e-6, activation="silu", gated=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Resident:
    """What one sequence keeps in layers, each with its spec. All sizes are in bytes."""

    layers: tuple[Layer, ...]
    specs: tuple[LayerSpec, ...]

    @cached_property
    def per_token(self) -> int:
        """One token more in all layers, beyond the `first` and before any window is full."""
        each = zip(self.layers, self.specs, strict=True)
        return sum(layer.layout.bytes_per_token(spec.k, spec.v) for layer, spec in each)

    def at(self, tokens: int) -> int:
        """What is kept at so many tokens."""
        return sum(nbytes * window.kept(tokens - 1, tokens) for window, nbytes in self._parts.items())

    def most(self, tokens: int) -> int:
        """The most that is kept on the way to so many tokens.

        That is more than at the end only where a window lets go of first tokens that are kept in a wider format.
        """
        return max(self.at(count) for count in (tokens, *(knot for knot in self.knots if knot < tokens)))

    @cached_property
    def knots(self) -> tuple[int, ...]:
        """Counts of tokens, in order, between which `at` is a straight line."""
        return tuple(sorted({0} | {min(knot, _FAR) for window in self._parts for knot in _knots(window)}))

    @property
    def bounded(self) -> bool:
        """Whether a text may grow without end in a finite memory: every layer has a window."""
        return all(spec.window.size is not None for spec in self.specs)

    def row_flops(self, tokens: int) -> int:
        """Attention's work for the last of so many tokens: FLOP."""
        return sum(flops * window.kept(tokens - 1, tokens) for window, flops in self._pairs.items())

    def all_flops(self, tokens: int) -> int:
        """The same for each of them, together."""
        total = 0
        for window, flops in self._pairs.items():
            edge = window.kept(tokens - 1, tokens)  # rows before it read one token more each, those after it as many
            total += flops * (edge * (edge + 1) // 2 + (tokens - edge) * edge)
        return total

    @cached_property
    def _parts(self) -> Mapping[AttentionWindow, int]:
        """Bytes of one token in all parts of equal reach."""
        found: Counter[AttentionWindow] = Counter()
        for layer, spec in zip(self.layers, self.specs, strict=True):
            for part in spec.parts:
                found[part.window] += layer.layout.bytes_per_token(part.k, part.v)
        return found

    @cached_property
    def _pairs(self) -> Mapping[AttentionWindow, int]:
        """FLOP of one row and one token that it reads, in all layers of equal reach."""
        found: Counter[AttentionWindow] = Counter()
        for layer, spec in zip(self.layers, self.specs, strict=True):
            found[spec.window] += layer.pair_flops
        return found


def _knots(window: AttentionWindow) -> set[int]:
    """Where the sinks or the stretch begin or end, and where a window leaves those places behind."""
    edges = {window.start, window.sinks} | (set() if window.stop is None else {window.stop})
    return edges if window.size is None else edges | {edge + window.size for edge in edges}
