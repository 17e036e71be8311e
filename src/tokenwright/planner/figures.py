"""The figures of a plan: bytes and operations, each by a formula over the blueprint.

Symbols: t the context, B the batch, W_l and s_l the window and the sinks of layer l (t and 0 where it is full), c_l the
bytes that it keeps of a token, P_b and P_lm the weights that a token is multiplied with in the blocks and in the head
(models/cost.py counts the same way).

    KV of a sequence  = sum_l c_l min(t, s_l + W_l)       and of all, B times that; `resident.py` counts it
    prefill           = B (2 P_b t + 2 P_lm + sum_l a_l sum_{i=1..t} min(i, s_l + W_l))   a_l: FLOP of a row and a token
    decode            = B (2 P_b + 2 P_lm + sum_l a_l min(t, s_l + W_l))
    read by a decode  = the weights, without the tables that are looked up, + the KV of all

First tokens that stay native have another c_l than the rest. A window lets go of them, so that such a sequence may keep
less at its end than before: memory is then counted where it keeps most.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from tokenwright.cache import LayerSpec, group_layers, groups_for
from tokenwright.cache.codec import CODECS, Codec
from tokenwright.config import DType, EngineConfig, KVFormat, Rope, WeightFormat
from tokenwright.engine.window import AttentionWindow, Group
from tokenwright.planner.bandwidth import Bandwidth
from tokenwright.planner.blueprint import Blueprint
from tokenwright.planner.remarks import remarks
from tokenwright.planner.resident import Resident

ENGINE = EngineConfig()  # what an LLM is opened with where nobody says otherwise


@dataclass(frozen=True)
class Plan:
    """A model at a context (tokens of each sequence, prompt and completion) and a batch (sequences at once).

    `kv` and `weights` are how numbers are kept; `window` is a limit to every layer's reach in tokens, on top of the
    model's own, `sinks` are first tokens that stay in reach, and `specs` what all that means for each layer; `memory`
    is what there is, in bytes. Sizes are in bytes, work in floating-point operations.
    """

    model: str
    blueprint: Blueprint
    context: int
    batch: int
    kv: KVFormat
    weights: WeightFormat
    specs: tuple[LayerSpec, ...]
    window: int | None = None
    sinks: int = 0
    memory: int | None = None
    bandwidth: Bandwidth | None = None

    @property
    def native(self) -> DType:
        """What native means for the cache: the dtype of the weights, and of quantised weights the checkpoint's."""
        return native_dtype(self.blueprint, self.weights)

    @property
    def k(self) -> Codec:
        return CODECS[self.native if self.kv.k == "native" else self.kv.k]

    @property
    def v(self) -> Codec:
        return CODECS[self.native if self.kv.v == "native" else self.kv.v]

    @property
    def kept_native(self) -> tuple[str, ...]:
        """What is not kept in `k` and `v`, in words."""
        if self.k == self.v == CODECS[self.native]:
            return ()
        found = [f"the first {self.kv.first:,} tokens"] if any(spec.first for spec in self.specs) else []
        layers = [str(layer) for layer in sorted({layer % len(self.specs) for layer in self.kv.native})]
        if layers:
            found.append(f"layer{'s' if len(layers) > 1 else ''} {' and '.join(layers)}")
        return tuple(found)

    @cached_property
    def weight_bytes(self) -> int:
        """All weights. Quantised are matrices alone; beside them norms, biases and positions are kept in float32."""
        return self.blueprint.weight_bytes(self.weights)

    @cached_property
    def resident(self) -> Resident:
        """What a sequence keeps as it grows."""
        return Resident(self.blueprint.layers, self.specs)

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token more takes in all layers together, beyond the `first` and before any window is full."""
        return self.resident.per_token

    @property
    def kv_bytes_per_sequence(self) -> int:
        """The most that a sequence keeps on its way to the context; but for a window over first tokens, its end."""
        return self.resident.most(self.context)

    @property
    def kv_bytes_total(self) -> int:
        return self.batch * self.kv_bytes_per_sequence

    @property
    def total_bytes(self) -> int:
        """Weights and cache; what a step needs besides (activations, torch itself) is not in it."""
        return self.weight_bytes + self.kv_bytes_total

    def kv_bytes(self, tokens: int) -> int:
        """What one sequence keeps at so many tokens, the last of which is being computed: what that step reads."""
        return self.resident.at(tokens)

    @property
    def attention_windows(self) -> tuple[AttentionWindow, ...]:
        """Each layer's reach: the model's own window and the one asked for, whichever is shorter, and the sinks."""
        return tuple(spec.window for spec in self.specs)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window in tokens, the row itself included; None for a full layer."""
        return tuple(window.size for window in self.attention_windows)

    @property
    def endless(self) -> bool:
        """Whether the engine lets texts grow past the model's context: a window was asked for, positions are rotary."""
        config = self.blueprint.config
        return self.window is not None and (config is None or isinstance(config.positions, Rope))

    @property
    def cache_exceeds_weights_at(self) -> int | None:
        """The smallest context at which the caches of the whole batch take more than the weights; None: at none."""
        most = self._most_context(self.weight_bytes)
        return None if most is None else most + 1

    @property
    def fits(self) -> bool | None:
        """Whether weights and cache fit the memory; None where no memory was given."""
        return None if self.memory is None else self.total_bytes <= self.memory

    @property
    def most_context(self) -> int | None:
        """The longest context that fits at this batch, 0 if none does; None: any, or no memory was given.

        The model's own context is another limit.
        """
        return None if self.memory is None else self._most_context(self.memory - self.weight_bytes)

    @property
    def most_batch(self) -> int | None:
        """The most sequences of this context that fit, 0 if none does; None where no memory was given."""
        if self.memory is None:
            return None
        return max(0, self.memory - self.weight_bytes) // self.kv_bytes_per_sequence

    @property
    def prefill_flops(self) -> int:
        """The whole context in one pass, for every sequence, with logits for its last token."""
        shape, attention = self.blueprint, self.resident.all_flops(self.context)
        return self.batch * (2 * shape.block_weights * self.context + 2 * shape.head_weights + attention)

    @property
    def decode_flops(self) -> int:
        """One step at the full context: the last token of every sequence."""
        shape, attention = self.blueprint, self.resident.row_flops(self.context)
        return self.batch * (2 * shape.block_weights + 2 * shape.head_weights + attention)

    @property
    def weight_bytes_read(self) -> int:
        """Weights that a decode step reads: all but looked-up tables, and of experts those that the batch meets."""
        return self.blueprint.read_bytes(self.weights, self.batch)

    @property
    def decode_bytes(self) -> int:
        """What a decode step at the full context reads: weights, and K and V of every sequence."""
        return self.weight_bytes_read + self.batch * self.kv_bytes(self.context)

    @property
    def tokens_per_second(self) -> float | None:
        """What reading memory allows the whole batch: an upper bound. None without a bandwidth.

        A model so small that the processor's caches hold it is read faster than memory.
        """
        return None if self.bandwidth is None else self.batch * self.bandwidth.bytes_per_second / self.decode_bytes

    @property
    def engine_pages(self) -> int:
        """Pages that the batch needs where all of a text is kept: LLM(pages=..., max_sequences=batch)."""
        return self.batch * -(-self.context // ENGINE.page_size)

    @cached_property
    def engine_groups(self) -> tuple[Group, ...]:
        """The groups of pages of that LLM; none where it has no decoder.

        A window's group has no more than `max_sequences` can use, which is why the batch is given.
        """
        if self.blueprint.config is None:
            return ()
        return groups_for(self.specs, ENGINE.page_size, self.engine_pages, ENGINE.token_budget, self.batch)

    @property
    def engine_kv_bytes(self) -> int | None:
        """Bytes that it allocates: whole pages, and one more in each group. None where it has no decoder."""
        return sum((group.pages + 1) * group.page_bytes for group in self.engine_groups) or None

    @property
    def hindrances(self) -> tuple[str, ...]:
        """Why this version's engine cannot run the plan, in words; empty where it can."""
        return () if self.blueprint.config else (f"it has no decoder for {self.blueprint.architecture}",)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is assumed, and what a reader might overlook."""
        return tuple(remarks(self))

    def facts(self) -> dict[str, Any]:
        """All figures as plain values for JSON."""
        shape, speed = self.blueprint, self.bandwidth
        return {
            "model": self.model,
            "architecture": shape.architecture,
            "parameters": shape.parameters,
            "dtype": shape.dtype,
            "model_context": shape.context,
            "context": self.context,
            "batch": self.batch,
            "weights": str(self.weights),
            "kv": {"k": self.k.name, "v": self.v.name, "first": self.kv.first, "native": list(self.kv.native)},
            "window": self.window,
            "sinks": self.sinks,
            "windows": list(self.windows),
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_sequence": self.kv_bytes_per_sequence,
            "kv_bytes_total": self.kv_bytes_total,
            "total_bytes": self.total_bytes,
            "cache_exceeds_weights_at": self.cache_exceeds_weights_at,
            "memory": self.memory,
            "fits": self.fits,
            "most_context": self.most_context,
            "most_batch": self.most_batch,
            "prefill_flops": self.prefill_flops,
            "decode_flops": self.decode_flops,
            "decode_bytes": self.decode_bytes,
            "weight_bytes_read": self.weight_bytes_read,
            "bandwidth": speed and {"bytes_per_second": speed.bytes_per_second, "kind": speed.kind, "of": speed.place},
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
        """The longest context whose caches for the batch take at most `limit` bytes; None: any does."""
        if limit < 0:
            return 0
        limit //= self.batch
        full = self.resident.knots[-1]
        if self.resident.bounded and self.resident.most(full) <= limit:
            return None
        top = full + limit + 2  # beyond its last knot, a token takes a byte at least
        return bisect_right(range(top), limit, key=self.resident.most) - 1


def native_dtype(shape: Blueprint, weights: WeightFormat) -> DType:
    """The dtype of a native cache."""
    return shape.dtype if weights.quantised else cast(DType, weights.name)
