"""The KV memory of a sequence as it grows, from the specs with which the engine allocates, so that they cannot differ.

At t tokens a sequence keeps what the step reads that computes the last of them: t in a full layer, min(t, s + W) with a
window of W and s sinks. (After that step one more position leaves the window: LLM.kv_bytes counts without it.)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tokenwright.cache import LayerSpec
from tokenwright.engine.layer_group import AttentionWindow

_FAR = 1 << 48  # tokens: longer than any text, whatever the options


@dataclass(frozen=True)
class KVMemory:
    specs: tuple[LayerSpec, ...]

    def at(self, tokens: int) -> int:
        kept = sum(nbytes * window.kept(tokens - 1, tokens) for window, nbytes in self._parts.items())
        return kept + (self.states if tokens else 0)

    @property
    def states(self) -> int:
        return sum(spec.state_bytes for spec in self.specs)

    def most(self, tokens: int) -> int:
        """The most bytes at any length up to `tokens`: above `at(tokens)` where wider first tokens leave a window."""
        return max(self.at(count) for count in (tokens, *(knot for knot in self.knots if knot < tokens)))

    @cached_property
    def knots(self) -> tuple[int, ...]:
        """Counts of tokens, in ascending order, between which `at` is linear."""
        return tuple(sorted({0} | {min(knot, _FAR) for window in self._parts for knot in _knots(window)}))

    @property
    def bounded(self) -> bool:
        """Whether a text of any length fits a finite memory: every layer has a window."""
        return all(spec.window.size is not None for spec in self.specs)  # that of a state is two

    @cached_property
    def _parts(self) -> Mapping[AttentionWindow, int]:
        found: Counter[AttentionWindow] = Counter()
        for spec in self.specs:
            for part in spec.own_parts if not spec.state_bytes else ():
                found[part.window] += part.bytes_per_token
        return found


def _knots(window: AttentionWindow) -> set[int]:
    edges = {window.start, window.sinks} | (set() if window.stop is None else {window.stop})
    return edges if window.size is None else edges | {edge + window.size for edge in edges}
