"""The figures of a plan: bytes and operations of a model's graph, for a batch of sequences.

With t the context, B the batch, W_l and s_l the window and the sinks of layer l (t and 0 in a full layer), and c_l the
bytes that it keeps of a token:

    KV of a sequence  = sum_l c_l min(t, s_l + W_l)
    prefill           = B chunks of t tokens              `models/cost.py` has the work of a chunk
    decode            = B chunks of one token after t - 1, which read the weights without lookup tables, and the KV
"""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from tokenwright.backends.layout import expert_bytes, read_bytes, weight_bytes
from tokenwright.backends.native.compile import lacking
from tokenwright.backends.wgpu.lacking import lacking_on_gpu
from tokenwright.cache import LayerSpec, group_layers, groups_for
from tokenwright.cache.codec import CODECS, Codec
from tokenwright.config import EngineConfig, Learned
from tokenwright.engine.layer_group import AttentionWindow, Group, StateWindow
from tokenwright.formats import DType, KVFormat, WeightFormat
from tokenwright.models.combined import mixtures
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import Graph
from tokenwright.planner.bandwidth import Bandwidth
from tokenwright.planner.find import Blueprint
from tokenwright.planner.remarks import remarks_on

ENGINE = EngineConfig()


@dataclass(frozen=True)
class Plan:
    """A model at a context (tokens of each sequence) and a batch (sequences at once). Sizes in bytes, work in FLOP."""

    model: str
    blueprint: Blueprint
    context: int
    batch: int
    kv: KVFormat
    weights: WeightFormat
    specs: tuple[LayerSpec, ...]
    window: int | None = None  # in addition to the model's own, as sinks
    sinks: int = 0
    memory: int | None = None
    bandwidth: Bandwidth | None = None
    adapters: tuple[int, ...] = ()
    expert_memory: int | None = None  # bytes for experts, of which the others stay on a disk
    disk: Bandwidth | None = None
    gpu_memory: int | None = None  # bytes of a card beside `memory`

    @property
    def graph(self) -> Graph:
        return self.blueprint.graph

    @cached_property
    def costs(self) -> CostModel:
        return CostModel(self.graph, self.specs)

    @property
    def _others(self) -> WeightFormat:
        return WeightFormat(self.blueprint.dtype) if self.blueprint.kept else self.weights

    @property
    def native(self) -> DType:
        return native_dtype(self.blueprint, self.weights)

    @property
    def k(self) -> Codec:
        return CODECS[self.native if self.kv.k == "native" else self.kv.k]

    @property
    def v(self) -> Codec:
        return CODECS[self.native if self.kv.v == "native" else self.kv.v]

    @property
    def kept_native(self) -> tuple[str, ...]:
        if self.k == self.v == CODECS[self.native]:
            return ()
        found = [f"the first {self.kv.first:,} tokens"] if any(spec.first for spec in self.specs) else []
        layers = [str(layer) for layer in sorted({layer % len(self.specs) for layer in self.kv.native})]
        if layers:
            found.append(f"layer{'s' if len(layers) > 1 else ''} {' and '.join(layers)}")
        return tuple(found)

    @cached_property
    def weight_bytes(self) -> int:
        return weight_bytes(self.graph, self._others, self.blueprint.kept)

    @cached_property
    def expert_bytes(self) -> int:
        return expert_bytes(self.graph, self._others, self.blueprint.kept)

    @property
    def held_bytes(self) -> int:
        if self.expert_memory is None:
            return self.weight_bytes
        return self.weight_bytes - max(0, self.expert_bytes - self.expert_memory)

    @property
    def disk_bytes(self) -> int:
        """The bytes of experts that a step reads from disk, without wrong prefetches."""
        if self.expert_memory is None or self.held_bytes == self.weight_bytes:
            return 0
        ops = mixtures(self.graph)
        met = sum(op.experts_met(self.batch) for op in ops) / sum(op.experts for op in ops)
        return round(met * (self.expert_bytes - self.expert_memory))

    @cached_property
    def kv_memory(self) -> "KVMemory":
        return KVMemory(self.specs)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all layers, before any window is full."""
        return self.costs.bytes_per_token

    @property
    def kv_bytes_per_sequence(self) -> int:
        """The most bytes at any length up to the context."""
        return self.kv_memory.most(self.context)

    @property
    def kv_bytes_total(self) -> int:
        return self.batch * self.kv_bytes_per_sequence

    @property
    def total_bytes(self) -> int:
        """Bytes without activations and Python itself."""
        return self.held_bytes + sum(self.adapters) + self.kv_bytes_total

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of one sequence in the step that computes the last of `tokens` tokens."""
        return self.kv_memory.at(tokens)

    @property
    def attention_windows(self) -> tuple[AttentionWindow, ...]:
        """Each layer's window, the smaller of the model's and the plan's, and its sinks."""
        return tuple(spec.window for spec in self.specs if not spec.state_bytes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window in tokens, the row itself included; None for a full layer or a state."""
        return tuple(None if spec.state_bytes else spec.window.size for spec in self.specs)

    @property
    def states(self) -> dict[str, Any] | None:
        """The layers that keep a state, their bytes, and the tokens between cached states."""
        found = {i: spec.window for i, spec in enumerate(self.specs) if spec.state_bytes}
        every = [window.every for window in found.values() if isinstance(window, StateWindow)]
        return {"layers": list(found), "bytes": self.kv_memory.states, "every": every[0]} if found else None

    @property
    def endless(self) -> bool:
        """Whether texts may exceed the model's context, which takes a window and rotary positions."""
        return self.window is not None and not isinstance(self.graph.positions, Learned)

    @property
    def cache_exceeds_weights_at(self) -> int | None:
        """The smallest context at which the batch's caches exceed the weights; None: never."""
        most = self._most_context(self.weight_bytes)
        return None if most is None else most + 1

    @property
    def fits(self) -> bool | None:
        """Whether weights and cache fit `memory`; None if it is not given."""
        return None if self.memory is None else self.total_bytes <= self.memory

    def gpu_bytes(self, layers: int) -> int:
        """The bytes of the last `layers` layers, their K and V and the head."""
        graph, first = self.graph, self.graph.layers - layers
        part = replace(graph, blocks=graph.blocks_from(first))
        if first and not graph.tied_head:  # the CPU reads the embedding
            part = replace(part, embed=replace(graph.embed, table=graph.head.matrix))
        kv = KVMemory(self.specs[first:]).most(self.context) if layers else 0
        return weight_bytes(part, self._others, self.blueprint.kept) + self.batch * kv

    @cached_property
    def gpu_layers(self) -> int | None:
        """How many last layers fit `gpu_memory`; None if it is not given, 0 if no GPU computes the graph."""
        most, counts = self.gpu_memory, range(1, 1 if lacking_on_gpu(self.graph) else self.graph.layers + 1)
        return None if most is None else bisect_right(counts, most, key=self.gpu_bytes)

    @property
    def most_context(self) -> int | None:
        """The longest context that fits at this batch; None: unlimited, or `memory` is not given."""
        return None if self.memory is None else self._most_context(self.memory - self.held_bytes - sum(self.adapters))

    @property
    def most_batch(self) -> int | None:
        """How many sequences of this context fit; None if `memory` is not given."""
        if self.memory is None:
            return None
        left = self.memory - self.held_bytes - sum(self.adapters)
        return max(0, left) // self.kv_bytes_per_sequence

    @property
    def prefill_flops(self) -> int:
        return self.batch * self.costs.chunk(0, self.context).flops

    @property
    def decode_flops(self) -> int:
        return self.batch * self.costs.chunk(self.context - 1, 1).flops

    @property
    def weight_bytes_read(self) -> int:
        """Bytes without the lookup tables and experts that a step does not use."""
        return read_bytes(self.graph, self._others, self.batch, self.blueprint.kept)

    @property
    def decode_bytes(self) -> int:
        """Bytes read by a step at the full context: weights, K and V, and the largest adapters, one a sequence."""
        chosen = sorted(self.adapters, reverse=True)[: self.batch]
        return self.weight_bytes_read + sum(chosen) + self.batch * self.kv_bytes(self.context)

    @property
    def tokens_per_second(self) -> float | None:
        """The upper bound for the batch, from memory bandwidth."""
        if self.bandwidth is None:
            return None
        seconds = self.decode_bytes / self.bandwidth.bytes_per_second
        if self.disk is not None:
            seconds += self.disk_bytes / self.disk.bytes_per_second
        return self.batch / seconds

    @property
    def engine_pages(self) -> int:
        """Pages that LLM(pages=..., max_sequences=batch) needs in a group without a window."""
        return self.batch * -(-self.context // ENGINE.page_size)

    @cached_property
    def engine_groups(self) -> tuple[Group, ...]:
        """The page groups of that LLM; empty if the engine cannot run the model."""
        if lacking(self.graph):
            return ()
        return groups_for(self.specs, ENGINE.page_size, self.engine_pages, ENGINE.token_budget, self.batch)

    @property
    def engine_kv_bytes(self) -> int | None:
        """Bytes with a scratch page in each group; None if the engine cannot run the model."""
        return sum((group.pages + 1) * group.page_bytes for group in self.engine_groups) or None

    @property
    def hindrances(self) -> tuple[str, ...]:
        """Why the engine cannot run the plan; empty if it can."""
        return (f"it has no decoder for {self.graph.architecture}",) if lacking(self.graph) else ()

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(remarks_on(self))

    def facts(self) -> dict[str, Any]:
        def named(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        graph, speed = self.graph, self.bandwidth
        return {
            "model": self.model,
            "architecture": graph.architecture,
            "parameters": graph.parameters,
            "active_parameters": graph.active_parameters,
            "dtype": self.blueprint.dtype,
            "model_context": graph.context,
            **named("context", "batch"),
            "weights": str(self.weights),
            "kv": {"k": self.k.name, "v": self.v.name, "first": self.kv.first, "native": list(self.kv.native)},
            **named("window", "sinks"),
            "windows": list(self.windows),
            **named("states", "weight_bytes"),
            "adapter_bytes": list(self.adapters),
            **named("kv_bytes_per_token", "kv_bytes_per_sequence", "kv_bytes_total", "total_bytes"),
            **named("cache_exceeds_weights_at", "memory", "fits", "most_context", "most_batch"),
            **named("prefill_flops", "decode_flops", "decode_bytes", "weight_bytes_read"),
            "bandwidth": speed and speed.facts(),
            **named("expert_memory", "disk_bytes", "gpu_memory", "gpu_layers"),
            "disk": self.disk and self.disk.facts(),
            "tokens_per_second_at_most": self.tokens_per_second,
            "engine": self._engine_facts(),
            "remarks": list(self.remarks),
        }

    def _engine_facts(self) -> dict[str, Any]:
        sizes = [
            {"layers": list(own.layers), "pages": group.pages, "page_bytes": group.page_bytes}
            for own, group in zip(group_layers(self.specs), self.engine_groups, strict=False)
        ]
        return {
            "runs": not self.hindrances,
            "hindrances": list(self.hindrances),
            "page_size": ENGINE.page_size,
            "pages": self.engine_pages,
            "max_sequences": self.batch,
            "token_budget": ENGINE.token_budget,
            "groups": sizes,
            "kv_bytes": self.engine_kv_bytes,
        }

    def _most_context(self, limit: int) -> int | None:
        if limit < 0:
            return 0
        limit //= self.batch
        full = self.kv_memory.knots[-1]
        if self.kv_memory.bounded and self.kv_memory.most(full) <= limit:
            return None
        top = min(full + limit + 2, sys.maxsize)  # each further token takes a byte or more
        return bisect_right(range(top), limit, key=self.kv_memory.most) - 1


def native_dtype(model: Blueprint, weights: WeightFormat) -> DType:
    return model.dtype if weights.quantised else cast(DType, weights.name)


_FAR = 1 << 48  # tokens: longer than any text


@dataclass(frozen=True)
class KVMemory:
    """The KV memory of a sequence: each layer keeps all t tokens, or min(t, s + W) with a window W and s sinks."""

    specs: tuple[LayerSpec, ...]

    def at(self, tokens: int) -> int:
        kept = sum(nbytes * window.tokens_read(tokens - 1, tokens) for window, nbytes in self._parts.items())
        return kept + (self.states if tokens else 0)

    @property
    def states(self) -> int:
        return sum(spec.state_bytes for spec in self.specs)

    def most(self, tokens: int) -> int:
        """The most bytes up to `tokens`; above `at(tokens)` if wider first tokens leave a window."""
        return max(self.at(count) for count in (tokens, *(knot for knot in self.knots if knot < tokens)))

    @cached_property
    def knots(self) -> tuple[int, ...]:
        """Ascending counts of tokens between which `at` is linear."""
        return tuple(sorted({0} | {min(knot, _FAR) for window in self._parts for knot in _knots(window)}))

    @property
    def bounded(self) -> bool:
        """Whether a text of any length fits a finite memory: every layer has a window."""
        return all(spec.window.size is not None for spec in self.specs)

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
