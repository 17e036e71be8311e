"""What sequences keep of their K and V as they grow: the planner's one way of counting tokens and bytes.

It counts by the specs by which the engine allocates, so that a plan and the engine cannot differ.

At t tokens a sequence keeps what the step reads that computes the last of them: t in a full layer, min(t, s + W) where
a window of W has s sinks. (Once that step is done, a window lets one more go: LLM.kv_bytes counts so.)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tokenwright.cache import LayerSpec
from tokenwright.engine.window import AttentionWindow

_FAR = 1 << 48  # tokens: beyond any text, whatever an option names


@dataclass(frozen=True)
class KVMemory:
    """What one sequence keeps in layers with these specs. All sizes are in bytes."""

    specs: tuple[LayerSpec, ...]

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

    @cached_property
    def _parts(self) -> Mapping[AttentionWindow, int]:
        """Bytes of one token in all parts of equal reach."""
        found: Counter[AttentionWindow] = Counter()
        for spec in self.specs:
            for part in spec.parts:
                found[part.window] += part.bytes_per_token
        return found


def _knots(window: AttentionWindow) -> set[int]:
    """Where the sinks or the stretch begin or end, and where a window leaves those places behind."""
    edges = {window.start, window.sinks} | (set() if window.stop is None else {window.stop})
    return edges if window.size is None else edges | {edge + window.size for edge in edges}
