"""Ways to run a decoder: as the engine's Runner over pages, and as a plain function over a cache of its own."""

from collections.abc import Sequence

import torch

from tokenwright.backends.native.program import NativeDecoder, Program
from tokenwright.backends.torch.batch import Batcher, Piece
from tokenwright.backends.torch.decoder import Decoder, Logits
from tokenwright.cache import KVStore, LayerSpec
from tokenwright.config import DynamicScaling, ModelConfig, Rope
from tokenwright.engine import Chunk, Output, Step
from tokenwright.engine.step import ALL, LAST
from tokenwright.errors import ContextError, RequestError
from tokenwright.models.taps import Tap, ignore


class Forward:
    """A decoder over one KV store: pieces of texts go in, logits of the wanted rows come out.

    Native kernels do it in one call; where somebody looks, and with other kernels, the decoder does it part by part.
    """

    def __init__(self, config: ModelConfig, decoder: Decoder, store: KVStore) -> None:
        self.decoder = decoder
        self.batcher = Batcher(config, store)
        self.program = Program(decoder.native, store) if isinstance(decoder, NativeDecoder) else None

    def __call__(self, pieces: Sequence[Piece | Chunk], wanted: Sequence[int], tap: Tap = ignore) -> Logits:
        """`wanted`: rows, counted over all pieces."""
        if self.program is None or tap is not ignore:
            return self._by_parts(pieces, wanted, tap)
        self.decoder.layer_tokens += sum(len(piece.tokens) for piece in pieces) * self.decoder.graph.layers
        return self.program(pieces, wanted)

    @torch.inference_mode()
    def _by_parts(self, pieces: Sequence[Piece | Chunk], wanted: Sequence[int], tap: Tap) -> Logits:
        x = self.decoder.forward(self.batcher(pieces), self.batcher.store, tap)  # [T, width]
        logits = self.decoder.logits(x[list(wanted)])
        return Logits(logits) if self.program is None else Logits(logits, *self.program.model.kernels.summarise(logits))


class TorchRunner:
    """Computes the engine's steps with one decoder over one KV store."""

    def __init__(self, config: ModelConfig, decoder: Decoder, store: KVStore) -> None:
        self.decoder = decoder
        self.store = store
        self.compute = Forward(config, decoder, store)

    def forward(self, step: Step, tap: Tap = ignore) -> Output[torch.Tensor]:
        wanted: list[int] = []
        rows: list[range] = []
        first = 0
        for chunk in step.chunks:
            kept = _wanted(chunk, range(first, first + len(chunk.tokens)))
            rows.append(range(len(wanted), len(wanted) + len(kept)))
            wanted += kept
            first += len(chunk.tokens)
        logits = self.compute(step.chunks, wanted, tap)
        return Output(tuple(rows), logits.rows, logits.best, logits.log_totals)


def _wanted(chunk: Chunk, rows: range) -> range:
    if chunk.wants is LAST:
        return rows[-1:]
    return rows if chunk.wants is ALL else rows[:0]


class Cache:
    """The K and V of one text for `Model`: it grows as needed and knows its `length` in tokens."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.length = 0

    @property
    def store(self) -> KVStore:
        return self.forward.batcher.store

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of the tokens it holds, which are all that it was given."""
        return sum(spec.stored_bytes(range(self.length)) for spec in self.store.specs)


class Model:
    """The decoder as a function: `logits, cache = model(tokens, cache)`.

    It computes the K and V of `tokens` (ids), which follow what `cache` holds (None: nothing), appends them to the
    cache in place, and returns the logits [len(tokens), vocabulary] in fp32 on the CPU, with the cache.
    Raises RequestError for no tokens or ids beyond the vocabulary, ContextError beyond the context.
    """

    PAGE_SIZE = 64

    def __init__(self, config: ModelConfig, decoder: Decoder, specs: Sequence[LayerSpec], device: torch.device) -> None:
        self.config = config
        self.decoder = decoder
        self.specs = tuple(specs)
        self.device = device
        self.context = config.context
        if isinstance(config.positions, Rope) and isinstance(config.positions.scaling, DynamicScaling):
            # Its angles depend on a length fixed in advance, which a plain function is not told.
            self.context = config.positions.scaling.original_context

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        length = len(tokens) + (cache.length if cache else 0)
        if not len(tokens) or not all(type(token) is int and 0 <= token < self.config.vocab_size for token in tokens):
            raise RequestError(f"tokens must be a list of ids from 0 to {self.config.vocab_size - 1}, at least one")
        if length > self.context:
            raise ContextError(length, self.context)
        cache = cache or Cache(self._over(length))
        pages = -(-length // self.PAGE_SIZE)
        if pages > cache.store.pages[0]:
            grown = self._over(2 * length)
            grown.batcher.store.take(cache.store)
            cache.forward = grown
        table = {page: page for page in range(pages)}
        piece = Piece(tokens, cache.length, [table] * len(cache.store.groups), length)
        logits = cache.forward([piece], range(len(tokens))).rows
        cache.length = length
        return logits.cpu(), cache

    def _over(self, tokens: int) -> Forward:
        """The decoder over a fresh store for so many tokens, within the context."""
        pages = -(-max(1, min(tokens, self.context)) // self.PAGE_SIZE)
        return Forward(self.config, self.decoder, KVStore(self.specs, pages, self.PAGE_SIZE, self.device))
