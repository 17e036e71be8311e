"""The KV format of each layer (layout x attention window x codec), and the groups of layers.

A layer that keeps the first tokens in another format has two parts, one after the other. Layers with an equal part form
a group: they share page numbers and memory. There are three layouts: K and V of heads; one row for all heads, which
begins with the value (`config.Latent`); one state a page in place of both (`config.RecurrentState`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tokenwright.cache.codec import CODECS, Codec
from tokenwright.checks import check_whole
from tokenwright.config import Heads, Latent, LayerKV, Learned, RecurrentState, Rope, angle_length
from tokenwright.engine.layer_group import AttentionWindow, Group, StateWindow
from tokenwright.errors import RequestError
from tokenwright.formats import DType, KVFormat

ENDLESS = 1 << 62  # tokens: longer than any text
ALONE = 1024  # tokens between the cached states of a model without attention
_NATIVE = KVFormat()


class CachedModel(Protocol):
    """The facts of a model that the cache needs; a `models.graph.Graph` has them."""

    @property
    def kv(self) -> Sequence[LayerKV]: ...

    @property
    def positions(self) -> Learned | Rope | None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """The positions [window.start, window.stop) of every text, stored in one format."""

    layout: Heads | Latent | RecurrentState
    window: AttentionWindow
    k: Codec
    v: Codec
    on_host: bool = False

    @property
    def state_bytes(self) -> int:
        return self.layout.nbytes if isinstance(self.layout, RecurrentState) else 0

    @property
    def bytes_per_token(self) -> int:
        return self.layout.bytes_per_token(self.k, self.v)

    def stored(self, positions: range) -> range:
        return stored(self.window, positions)


def stored(window: AttentionWindow, positions: range) -> range:
    first = max(positions.start, window.start)
    stop = positions.stop if window.stop is None else min(positions.stop, window.stop)
    return range(first, max(first, stop))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The KV format of one layer: tokens from `first` on in the codecs `k` and `v`, earlier ones in `native`."""

    layout: Heads | Latent | RecurrentState
    window: AttentionWindow
    k: Codec
    v: Codec
    first: int = 0
    native: Codec = field(kw_only=True)
    source: int | None = None  # the layer reads the K and V of the layer that many before it
    # Not shown, as names of cache files are made of the repr. unbiased: keys lack their projection's (large) bias.
    unbiased: bool = field(default=False, repr=False)
    on_host: bool = field(default=False, repr=False)  # the CPU computes this layer of a model on a device

    @property
    def parts(self) -> tuple[Part, ...]:
        rest = Part(self.layout, replace(self.window, start=self.first), self.k, self.v, self.on_host)
        if not self.first:
            return (rest,)
        return Part(self.layout, replace(self.window, stop=self.first), self.native, self.native, self.on_host), rest

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """The parts that the layer stores; none if it reads another layer's K and V."""
        return self.parts if self.source is None else ()

    @property
    def bytes_per_token(self) -> int:
        return 0 if self.source is not None else self.layout.bytes_per_token(self.k, self.v)

    @property
    def state_bytes(self) -> int:
        return self.parts[0].state_bytes

    def nbytes(self, tokens: int) -> int:
        """Bytes that the layer keeps once `tokens` tokens are computed: those that the next row can read."""
        kept = sum(part.window.tokens_read(tokens, tokens) * part.bytes_per_token for part in self.own_parts)
        return kept + (self.state_bytes if tokens else 0)

    def stored_bytes(self, positions: range) -> int:
        """Bytes of K and V of adjacent `positions`, expired ones included."""
        return sum(len(part.stored(positions)) * part.bytes_per_token for part in self.own_parts)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that have an equal part, and therefore share page numbers and memory."""

    part: Part
    layers: tuple[int, ...]

    @property
    def window(self) -> AttentionWindow:
        return self.part.window

    def page_bytes(self, page_size: int) -> int:
        return len(self.layers) * (page_size * self.part.bytes_per_token + self.part.state_bytes)


def layer_specs(
    model: CachedModel, dtype: DType, kv: KVFormat = _NATIVE, window: int | None = None, sinks: int = 0
) -> tuple[LayerSpec, ...]:
    """The spec of each layer of a model (its graph) that computes in `dtype`.

    window, sinks: in tokens, of every layer, the row itself included; a layer's own window may be smaller. Raises
    RequestError for what the model lacks.
    """
    states = [isinstance(layer.layout, RecurrentState) for layer in model.kv]
    both = [[size for size in (one.window, window) if size is not None] for one in model.kv]
    windows = [None if state else min(each, default=None) for each, state in zip(both, states, strict=True)]
    if all(states) and (window is not None or sinks):
        raise RequestError("this model has no attention, so no window; leave window and sinks out", "window", "sinks")
    _check_window(model.positions, windows, window, sinks)
    native, plain = _native_layers(len(windows), kv), CODECS[dtype]
    k, v = (plain if name == "native" else CODECS[name] for name in (kv.k, kv.v))
    if k != v and any(isinstance(layer.layout, Latent) for layer in model.kv):
        raise RequestError(
            f"this model keeps one latent for K and V together; give one kv format, not {str(kv)!r}", "kv"
        )
    specs: list[LayerSpec] = []
    for layer, size in enumerate(windows):
        layout, source = model.kv[layer].layout, model.kv[layer].source
        if source is not None:
            specs.append(replace(specs[source], source=layer - source))
            continue
        attended = AttentionWindow() if size is None else AttentionWindow(size, sinks)
        if layer in native or states[layer] or k == v == plain:
            specs.append(LayerSpec(layout, attended, plain, plain, native=plain))
        else:
            unbiased = k != plain and model.kv[layer].biased and not attended.sinks
            specs.append(LayerSpec(layout, attended, k, v, kv.first, native=plain, unbiased=unbiased))
    kept = StateWindow(every=_between_states(specs))
    return tuple(replace(spec, window=kept) if states[layer] else spec for layer, spec in enumerate(specs))


def _between_states(specs: Sequence[LayerSpec]) -> int:
    """Tokens from one state that stays cached to the next, so that states take no more bytes than K and V do."""
    kv = sum(spec.bytes_per_token for spec in specs)
    return max(1, -(-sum(spec.state_bytes for spec in specs) // kv)) if kv else ALONE


def _check_window(
    positions: Learned | Rope | None, windows: Sequence[int | None], window: int | None, sinks: int
) -> None:
    if window is not None:
        check_whole("window", window, 1)
    check_whole("sinks", sinks)
    if sinks and not any(windows):
        raise RequestError(
            "sinks stay visible beyond a window; give window as well, or leave sinks out", "window", "sinks"
        )
    if sinks and isinstance(positions, Learned):
        raise RequestError(
            "sinks need rotary positions, which can be read from another distance; this model has learned ones: "
            "leave sinks out (a window alone works)",
            "sinks",
        )
    if angle_length(positions, 1) is not None and (sinks or window is not None):
        raise RequestError(
            "this model has a RoPE scaling that depends on the length (dynamic, longrope), which a text without end "
            "does not have; leave window and sinks out",
            *("window", "sinks"),
        )


def _native_layers(layers: int, kv: KVFormat) -> set[int]:
    for layer in kv.native:
        if not -layers <= layer < layers:
            raise RequestError(
                f"native of kv: there is no layer {layer}; use 0 to {layers - 1}, or -1 to {-layers} backwards", "kv"
            )
    return {layer % layers for layer in kv.native}


def group_layers(specs: Sequence[LayerSpec]) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers, in the order of their first layers; one without a window comes first."""
    layers: dict[Part, list[int]] = {}
    for index, spec in enumerate(specs):
        for part in spec.own_parts:
            layers.setdefault(part, []).append(index)
    groups = [LayerGroup(part, tuple(found)) for part, found in layers.items()]
    return tuple(sorted(groups, key=lambda group: group.window != AttentionWindow()))


def groups_for(specs: Sequence[LayerSpec], page_size: int, pages: int, chunk: int, sequences: int) -> tuple[Group, ...]:
    """The engine's groups: `pages` pages without a window, and at most as many as can be used with one.

    chunk: the most tokens of a text that one step computes. sequences: the most that run at once.
    """
    found = []
    for group in group_layers(specs):
        most = sequences * group.window.max_pages(ENDLESS, chunk, page_size)
        if isinstance(group.window, StateWindow):
            used = _states(group.window, page_size, pages, chunk, most)
            found.append(Group(used, group.window, group.page_bytes(page_size)))
            continue
        used = max(1, pages - group.window.start // page_size)  # another group holds a text's first pages
        found.append(Group(min(used, most), group.window, group.page_bytes(page_size)))
    return tuple(found)


def _states(window: StateWindow, page_size: int, pages: int, chunk: int, most: int) -> int:
    """The pages of a group of states: those cached with `pages` pages of K and V, and those of `most` + 1 texts."""
    kept = -(-pages * page_size // max(window.every, page_size))
    return min(pages, kept + min(most, kept + window.max_pages(ENDLESS, chunk, page_size)))


def pages_within(
    specs: Sequence[LayerSpec], page_size: int, memory: int, chunk: int, sequences: int, most_tokens: int
) -> int:
    """The most pages for `groups_for` that fit `memory` bytes and that `sequences` texts of `most_tokens` can fill."""

    def needed(pages: int) -> int:
        groups = groups_for(specs, page_size, pages, chunk, sequences)
        return sum((group.pages + 1) * group.page_bytes for group in groups)

    return bisect_right(range(1, sequences * -(-most_tokens // page_size) + 1), memory, key=needed)
