"""The figures of a plan: bytes and operations, each by a formula over the blueprint.

Symbols: t the context, B the batch, W_l the reach of layer l, c_l the bytes that it keeps of a token, P_b and P_lm the
weights that a token is multiplied with in the blocks and in the head (trace/cost.py counts the same way).

    KV of a sequence  = sum_l c_l min(t, W_l)         and of all, B times that
    prefill           = B (2 P_b t + 2 P_lm + sum_l a_l sum_{i=1..t} min(i, W_l))       a_l: FLOP of a row and a token
    decode            = B (2 P_b + 2 P_lm + sum_l a_l min(t, W_l))
    read by a decode  = the weights, without the tables that are looked up, + the KV of all
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenwright.cache.codec import CODECS, GROUP, NATIVE, Codec
from tokenwright.config import EngineConfig
from tokenwright.planner.bandwidth import Bandwidth
from tokenwright.planner.blueprint import Blueprint, Layer

PAGE_SIZE = EngineConfig().page_size


@dataclass(frozen=True)
class Plan:
    """A model at a context (tokens of each sequence, prompt and completion) and a batch (sequences at once).

    `k`, `v` and `weights` are how numbers are kept; `window` is a limit to every layer's reach in tokens, on top of
    the model's own; `memory` is what there is, in bytes. Sizes are in bytes, work in floating-point operations.
    """

    model: str
    blueprint: Blueprint
    context: int
    batch: int
    k: Codec
    v: Codec
    weights: Codec
    window: int | None = None
    memory: int | None = None
    bandwidth: Bandwidth | None = None

    @cached_property
    def weight_bytes(self) -> int:
        """All weights. Quantised are matrices alone; norms and biases stay in the checkpoint's dtype."""
        return self.blueprint.weight_bytes(self.weights, self._vectors)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """What one token takes in all layers together."""
        return sum(self._kept(layer) for layer in self.blueprint.layers)

    @property
    def kv_bytes_per_sequence(self) -> int:
        return self.kv_bytes(self.context)

    @property
    def kv_bytes_total(self) -> int:
        return self.batch * self.kv_bytes_per_sequence

    @property
    def total_bytes(self) -> int:
        """Weights and cache; what a step needs besides (activations, torch itself) is not in it."""
        return self.weight_bytes + self.kv_bytes_total

    def kv_bytes(self, context: int) -> int:
        """The cache of one sequence of `context` tokens, those behind a window let go."""
        return self._over_layers(self._kept, lambda window: _reached(window, context))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's reach: the model's own window and the one asked for, whichever is shorter."""
        return tuple(self._window(layer) for layer in self.blueprint.layers)

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
        shape, pairs = self.blueprint, lambda window: _reached_by_all(window, self.context)
        attention = self._over_layers(_pair_flops, pairs)
        return self.batch * (2 * shape.block_weights * self.context + 2 * shape.head_weights + attention)

    @property
    def decode_flops(self) -> int:
        """One step at the full context: the last token of every sequence."""
        shape = self.blueprint
        attention = self._over_layers(_pair_flops, lambda window: _reached(window, self.context))
        return self.batch * (2 * shape.block_weights + 2 * shape.head_weights + attention)

    @property
    def weight_bytes_read(self) -> int:
        """Weights that a decode step reads: all but looked-up tables, and of experts those that the batch meets."""
        return self.blueprint.read_bytes(self.weights, self._vectors, self.batch)

    @property
    def decode_bytes(self) -> int:
        """What a decode step at the full context reads: weights, and K and V of every sequence."""
        return self.weight_bytes_read + self.kv_bytes_total

    @property
    def tokens_per_second(self) -> float | None:
        """What reading memory allows the whole batch: an upper bound. None without a bandwidth.

        A model so small that the processor's caches hold it is read faster than memory.
        """
        return None if self.bandwidth is None else self.batch * self.bandwidth.bytes_per_second / self.decode_bytes

    @property
    def engine_pages(self) -> int:
        """Pages that the engine's pool needs for the batch: LLM(..., pages=...)."""
        return self.batch * -(-self.context // PAGE_SIZE)

    @property
    def engine_kv_bytes(self) -> int:
        """What this version's engine takes for them: whole pages, one more to look with, and nothing let go."""
        return (self.engine_pages + 1) * PAGE_SIZE * self.kv_bytes_per_token

    @property
    def hindrances(self) -> tuple[str, ...]:
        """Why this version's engine cannot run the plan, in words; empty where it can."""
        found = {
            f"it has no decoder for {self.blueprint.architecture}": self.blueprint.config is None,
            f"it has no {self.weights.name} weights": self.weights.name not in NATIVE,
            f"its cache has no {self._kv_name}": not {self.k.name, self.v.name} <= NATIVE.keys(),
            f"its cache has the dtype of the weights ({self.weights.name})": self._mixes_dtypes,
            "it cannot shorten a model's reach to a window": self.window is not None,
        }
        return tuple(words for words, holds in found.items() if holds)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is assumed, and what a reader might overlook."""
        shape, grouped = self.blueprint, f"in groups of {GROUP}, each with a float16 scale"
        found = list(shape.remarks)
        if self.context > shape.context:
            found.append(f"{self.context:,} tokens are more than the model's context of {shape.context:,}")
        if self.weights.group:
            found.append(
                f"{self.weights.name} weights: every matrix, embeddings included, symmetric along its input {grouped}; "
                f"norms and biases in {shape.dtype}"
            )
        if self.k.group or self.v.group:
            names = " and ".join(dict.fromkeys(codec.name for codec in (self.k, self.v) if codec.group))
            found.append(f"{names} cache: each token and head {grouped}")
        if shape.experts:
            found.append(
                f"a token meets {shape.chosen} of {shape.experts} experts in a layer; a step of {self.batch:,} is "
                f"taken to read {shape.experts_met(self.batch)}, as if each were as likely"
            )
        return tuple(found)

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
            "weights": self.weights.name,
            "kv": {"k": self.k.name, "v": self.v.name},
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
            "engine": {
                "runs": not self.hindrances,
                "hindrances": list(self.hindrances),
                "page_size": PAGE_SIZE,
                "pages": self.engine_pages,
                "kv_bytes": self.engine_kv_bytes,
            },
            "remarks": list(self.remarks),
        }

    @property
    def _vectors(self) -> Codec:
        """How norms and biases are kept: converted with the weights, but never quantised."""
        return self.weights if self.weights.name in NATIVE else CODECS[self.blueprint.dtype]

    @property
    def _kv_name(self) -> str:
        return self.k.name if self.k == self.v else f"{self.k.name} and {self.v.name}"

    @property
    def _mixes_dtypes(self) -> bool:
        return {self.k.name, self.v.name, self.weights.name} <= NATIVE.keys() and not self.k == self.v == self.weights

    def _kept(self, layer: Layer) -> int:
        """c_l: bytes of one token in one layer."""
        return layer.layout.bytes_per_token(self.k, self.v)

    def _window(self, layer: Layer) -> int | None:
        given = [window for window in (layer.window, self.window) if window is not None]
        return min(given, default=None)

    def _over_layers(self, each: Callable[[Layer], int], tokens: Callable[[int | None], int]) -> int:
        """The sum over all layers of what a token is to it times the tokens that its reach gives."""
        return sum(each(layer) * tokens(self._window(layer)) for layer in self.blueprint.layers)

    def _most_context(self, limit: int) -> int | None:
        """The longest context whose caches for the batch take at most `limit` bytes; None: any does."""
        limit //= self.batch
        longest = max((window for window in self.windows if window is not None), default=0)
        if None not in self.windows and self.kv_bytes(longest) <= limit:
            return None
        top = longest + max(0, limit) + 2  # a token takes a byte at least
        return bisect_right(range(top), limit, key=self.kv_bytes) - 1 if limit >= 0 else 0


def _pair_flops(layer: Layer) -> int:
    return layer.pair_flops


def _reached(window: int | None, context: int) -> int:
    """Tokens that a row at the end of `context` tokens reads, itself included."""
    return context if window is None else min(context, window)


def _reached_by_all(window: int | None, context: int) -> int:
    """The same, summed over the rows at 1 .. context."""
    edge = _reached(window, context)
    return edge * (edge + 1) // 2 + (context - edge) * edge
