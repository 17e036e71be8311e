"""Compiles a graph once into a list of dispatches over named buffers. Ops without a kernel are refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenwright.backends.wgpu.gpu import FACTS, HELP, Buffer, Gpu, Kernel
from tokenwright.backends.wgpu.lacking import lacking_on_gpu
from tokenwright.backends.wgpu.uploads import FORMATS, WeightsOnGpu
from tokenwright.cache import KVStore, Side
from tokenwright.config import Rope
from tokenwright.engine import AttentionWindow
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.models.combined import Mixed, Parallel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Deepstack, Graph
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.taps import Site

ROWS, WANTED, HIDDEN = 0, 1, 2  # a step's first words count tokens, rows of logits and of hidden states
GROUPS = 8  # from here on, for each group of layers, the places of slots and page tables
_ROWS_OF = {ROWS: 0, WANTED: 5, HIDDEN: 6}  # words with the places of the counted rows' numbers; 0: all
WIDE = 4  # rows of a large tile
TOP = 64  # of the logits of a row that is drawn from (`top.wgsl`)

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "xielu": 5, "clamped_swiglu": 6}
_KINDS = {None: 0, "rms": 1, "layer": 2}

Facts = tuple[int | float, ...]
Turn = tuple[Rope, AttentionWindow | None]  # a rotation; with a window it is that of queries on sinks


@dataclass(slots=True)
class Dispatch:
    """A kernel over buffers, in `blocks` of the first dimension; the second are rows, `each` for one counted row."""

    kernel: Kernel
    buffers: tuple[str | Buffer, ...]
    facts: int  # offset of its facts in bytes
    blocks: int | None  # None: the rows, 64 in a workgroup
    counted: int = 0
    each: int = 1
    wide: Kernel | None = None  # over tiles of WIDE rows
    drawn: bool = False  # only for a step that draws among the highest logits
    sites: list[tuple[Site, int, str, int]] = field(default_factory=list)  # a buffer, and the numbers of its rows
    bound: Any = None


def refuse(graph: Graph) -> None:
    """Raises CheckpointError for ops, or options of ops, that no kernel computes."""
    if missing := lacking_on_gpu(graph):
        told = f"{graph.architecture} needs {', '.join(missing)}"
        raise CheckpointError(f"{told}, which no kernel of device gpu computes; {HELP}", "device")


class Compiler:
    """Compiles one graph over one store. first: the number of its first layer, which then reads rows in "x"."""

    def __init__(
        self, gpu: Gpu, graph: Graph, weights: WeightsOnGpu, store: KVStore, wide: bool, first: int = 0
    ) -> None:
        self.gpu, self.graph, self.weights, self.store, self.tiles = gpu, graph, weights, store, wide
        self.views = {first + layer: store.view(layer) for layer in range(len(store.specs))}
        self.dispatches: list[Dispatch] = []
        self.words: dict[str, tuple[int, int]] = {}  # of a buffer: words of a row, and the count of rows
        self.turns: dict[Turn, int] = {}
        self._facts: list[bytes] = []
        sizes = graph.rotary_sizes
        self.head_sizes: dict[Turn, int] = {}
        for op, spec in zip(graph.attention, store.specs, strict=True):
            if op.rope is not None:
                for window in (None, spec.window if spec.window.sinks else None):
                    self.turns.setdefault((op.rope, window), len(self.turns))
                    self.head_sizes[op.rope, window] = sizes[op.rope]
        if first:
            self._room("x", graph.width)
        else:
            self._embed()
        for op in graph.blocks:
            self._block(op)
        self._head()
        self.facts = gpu.uploaded(np.frombuffer(b"".join(self._facts), np.uint8))

    def _room(self, name: str, words: int, counted: int = ROWS) -> str:
        self.words[name] = max(self.words.get(name, (0, 0))[0], words), counted
        return name

    def _add(
        self, kernel: Kernel, buffers: Sequence[str | Buffer | None], facts: Facts, blocks: int | None, **more: Any
    ) -> None:
        """Append a dispatch. facts: in the order of their numbers. None: no buffer."""
        words = [np.float32(one).view(np.uint32) if isinstance(one, float) else np.uint32(one) for one in facts]
        offset, filled = FACTS * len(self._facts), np.array(words, np.uint32).tobytes()
        self._facts.append(filled.ljust(FACTS, b"\0"))
        bound = tuple(self.gpu.nothing if one is None else one for one in buffers)
        self.dispatches.append(Dispatch(kernel, ("step", *bound), offset, blocks, **more))

    def _site(self, site: Site, layer: int, buffer: str, numbers: int) -> None:
        self.dispatches[-1].sites.append((site, layer, buffer, numbers))

    def _linear(
        self, x: str, matrix: Matrix, y: str, counted: int = ROWS, experts: Experts | None = None, rows: int = 1
    ) -> str:
        """y = matrix(x); of experts y [T x k, out], each of the chosen ones times its row of x, `rows` for a token."""
        of, k, stride = self.weights.matrices[matrix.name], experts.chosen if experts else 0, matrix.inner
        if experts and len(of.pieces) > 1:
            raise RequestError(f"{self.gpu.name} cannot bind the experts of {matrix.name} at once; {HELP}", "device")
        out = of.out // (experts.experts if experts else 1)
        self._room(y, out * max(1, k), counted)
        if of.group:
            quantised, blocks = self._room(f"quantised{counted}", of.row_words * rows, counted), of.depth // of.group
            facts: Facts = (stride, of.inner, of.depth, counted, rows)
            kernel = self.gpu.kernel("quantise", GROUP=of.group)
            self._add(kernel, (x, quantised), facts, -(-blocks // 64), counted=counted, each=rows)
            x, stride = quantised, of.row_words
        for piece in of.pieces:
            outputs = out if experts else piece.outputs
            facts = (stride, of.inner, of.slabs, outputs, out, piece.first, counted, int(of.bias is not None))
            facts = (*facts, piece.first, k, -(-out // 16), max(1, k) // rows)
            kernel, wide = (self.gpu.kernel("linear", **of.constants, TILE=tile) for tile in (1, WIDE))
            more = {"counted": counted, "each": max(1, k), "wide": None if experts or not self.tiles else wide}
            buffers = (x, piece.codes, piece.scales, of.bias, of.factors, "chosen" if experts else None, y)
            self._add(kernel, buffers, facts, -(-outputs // 16), **more)
        return y

    def _norm(self, of: Norm | None, x: str, y: str, size: int = 0, counted: int = ROWS, **more: Any) -> str:
        """y = factor norm(x), or y = (y + that) `added`. at: words of a row, and the first one read and written."""
        factor, added, size = more.get("factor", 1.0), more.get("added"), of.size if of else size
        stride, first = more.get("at", (size, 0))
        self._room(y, stride, counted)
        weight, bias = (self.weights.dense.get(f"{of.name}.{one}") if of else None for one in ("weight", "bias"))
        kernel = self.gpu.kernel(
            "norm", KIND=_KINDS[of.kind if of else None], WEIGHTED=weight is not None, BIASED=bias is not None,
            ADD=added is not None,
        )  # fmt: skip
        facts = (size, stride, first, stride, first, counted, _ROWS_OF[counted], of.eps if of else 0.0)
        self._add(kernel, (x, weight, bias, y), (*facts, float(factor), float(added or 1.0)), 1, counted=counted)
        return y

    def _embed(self) -> None:
        op, width = self.graph.embed, self.graph.width
        of, x = self.weights.matrices[op.table.name], self._room("x", width)
        target = x if op.norm is None else self._room("normed", width)
        places = self.weights.dense.get("positions.weight")
        for piece in of.pieces:
            kernel = self.gpu.kernel("embed", **of.constants, PLACES=places is not None)
            facts = (width, of.slabs, float(op.scale), piece.first, piece.outputs)
            self._add(kernel, (piece.codes, piece.scales, of.factors, places, target), facts, -(-width // 64))
        if op.norm is not None:
            self._norm(op.norm, target, x)
        self._site(Site.EMBEDDING, 0, x, width)

    def _block(self, op: Op) -> None:
        width = self.graph.width
        if isinstance(op, Parallel):
            read = self._norm(op.mlp.norm, "x", "beside", size=width)
            self._after(op.attention, self._attention(op.attention))
            self._after(op.mlp, self._mlp(op.mlp, read))
        elif isinstance(op, Mixed):
            read = self._norm(op.mlp.norm, "x", "normed", size=width)
            self._norm(op.mlp.post_norm, self._mlp(op.mlp, read), "both", size=width, factor=op.mlp.residual_scale)
            more, experts = self._experts(op.experts), op.experts
            self._norm(experts.post_norm, more, "both", size=width, factor=experts.residual_scale, added=1.0)
            self._norm(op.post_norm, "both", "x", added=self.weights.number(op.stream))
            self._site(Site.MLP, op.layer, "x", width)
        elif not isinstance(op, Deepstack):
            assert isinstance(op, Attention | MLP | Experts), "others are refused"
            by_type: Mapping[Any, Callable[[Any], str]]
            by_type = {Attention: self._attention, MLP: self._mlp, Experts: self._experts}
            self._after(op, by_type[type(op)](op))

    def _after(self, op: Attention | MLP | Experts, y: str) -> None:
        """x += residual_scale post_norm(y); then times the op's learned number."""
        stream = self.weights.number(op.stream if isinstance(op, MLP) else None)
        self._norm(op.post_norm, y, "x", size=self.graph.width, factor=op.residual_scale, added=stream)
        self._site(Site.ATTENTION if isinstance(op, Attention) else Site.MLP, op.layer, "x", self.graph.width)

    def _normed(self, of: Norm | None) -> str:
        return "x" if of is None else self._norm(of, "x", "normed")

    def _attention(self, op: Attention) -> str:
        view, size = self.views[op.layer], op.head_size
        [part] = view.parts
        normed = self._normed(op.norm)
        self._site(Site.ATTENTION_INPUT, op.layer, normed, self.graph.width)
        projected = self._linear(normed, op.qkv, "projected")
        places = [0, op.heads * size, (op.heads + op.projected[2]) * size]  # the first words of q, k and v
        window, scoring, learned = view.spec.window, op.scoring, op.sink_logits
        turns = [(op.rope, None), (op.rope, window)][: 1 + bool(window.sinks)]
        query = self._room("query", op.heads * size * len(turns))
        for turn in turns:
            self._heads(op, projected, op.q_norm, op.heads, places[0], query, turn)
        if len(turns) == 1:
            self._site(Site.QUERY, op.layer, query, op.heads * size)
        if op.source is None:
            self._heads(op, projected, op.k_norm, op.kv_heads, places[1], part.k, (op.rope, None))
            self._heads(op, projected, op.v_norm, op.kv_heads, places[2], part.v)
        kernel = self.gpu.kernel(
            "attention", D=size, HEADS=op.heads, K_CODEC=_codec(part.k), V_CODEC=_codec(part.v),
            WINDOW=window.size or 0, SINKS=window.sinks, CAPPED=scoring.cap is not None, LEARNED=learned is not None,
            GATED=op.out_gate,
        )  # fmt: skip
        table = GROUPS + 2 * part.group + 1
        facts: Facts = (float(scoring.scale), float(scoring.cap or 1.0), self.store.page_size, table, op.qkv.out)
        mixed, logits = self._room("mixed", op.heads * size), self.weights.numbers(learned)
        buffers = (query, *_buffers(part.k), *_buffers(part.v), projected, mixed)
        self._add(kernel, buffers, (*facts, op.qkv.out - op.heads * size, op.kv_heads, *logits), op.heads)
        if not op.out_gate:  # the tap of `mixed` is before the gate
            self._site(Site.MIXED, op.layer, mixed, op.heads * size)
        return self._linear(mixed, op.out, "result")

    def _heads(
        self, op: Attention, projected: str, norm: Norm | None, heads: int, first: int, to: str | Side, turn: Any = None
    ) -> None:
        """Norm, clip and rotate heads of `projected`; write them as floats, or to a side of the KV memory."""
        size, stride, stored = op.head_size, op.qkv.out, not isinstance(to, str)
        if norm is not None and norm.parts == 1 and norm.size != size:  # over all heads together
            projected, norm = self._norm(norm, projected, "normed heads", at=(stride, first)), None
        by_head, number = norm is not None and norm.parts > 1, self.turns.get(turn)
        weight = None if norm is None else self.weights.dense.get(f"{norm.name}.weight")
        kernel = self.gpu.kernel(
            "heads", D=size, NORM=2 if by_head else _KINDS[norm.kind if norm else None], WEIGHTED=weight is not None,
            NORM_LAST=op.norms_last, CLIPPED=op.clip is not None, ROTATED=number is not None,
            CODEC=0 if isinstance(to, str) else _codec(to),
        )  # fmt: skip
        slots = GROUPS + 2 * self.views[op.layer].parts[0].group
        rotation = GROUPS + 2 * len(self.store.groups) + (number or 0)
        beside = not stored and self.views[op.layer].spec.window.sinks > 0  # the queries on sinks, in each row
        row, at = heads * size * (1 + beside), heads * size * (turn is not None and turn[1] is not None)
        facts: Facts = (stride, first, row, slots if stored else 0, rotation, norm.eps if norm else 0.0)
        codes, scales = (to, None) if isinstance(to, str) else _buffers(to)
        buffers = (projected, weight, "rotations", codes, scales or self._room("unused", 1))
        self._add(kernel, buffers, (*facts, op.clip or 0.0, size if by_head else 0, heads, at), heads)

    def _mlp(self, op: MLP, x: str | None = None) -> str:
        up = self._linear(x or self._normed(op.norm), op.up, "projected")
        hidden = self._activated(up, op, op.down.inner)
        self._site(Site.MLP_HIDDEN, op.layer, hidden, op.down.inner)
        return self._linear(hidden, op.down, "result")

    def _activated(self, x: str, op: MLP | Experts, m: int, each: int = 1) -> str:
        """hidden [T, m]; of experts [T x each, m]."""
        hidden = self._room("hidden", m * each)
        first, second = (*(op.factors if isinstance(op, MLP) else ()), 1.0, 1.0)[:2]
        xielu = self.weights.xielu(op.learned if isinstance(op, MLP) else None)
        kernel = self.gpu.kernel("activate", ACT=_ACTIVATIONS[op.activation], GATED=op.gated)
        facts = (m, 0, 0, float(first), float(second), ROWS, each, *xielu)
        self._add(kernel, (x, hidden), facts, -(-m // 64), each=each)
        return hidden

    def _experts(self, op: Experts) -> str:
        routing, width, k = op.routing, self.graph.width, op.chosen
        own = None if op.router_norm is None else self._norm(op.router_norm, "x", "router input")
        rows = self._normed(op.norm)
        logits = self._linear(own or rows, op.router, "router logits")
        learned = (self.weights.dense.get(f"{one}.weight") for one in (op.correction, op.weight_scales))
        kernel = self.gpu.kernel(
            "route", EXPERTS=op.experts, CHOSEN=k, SIGMOID=routing.scores == "sigmoid", CORRECTED=bool(op.correction),
            GROUPS=routing.groups, CHOSEN_GROUPS=routing.chosen_groups, GROUP_BEST=routing.group_best,
            RENORMALISED=routing.renormalise, SCALED=bool(op.weight_scales), SHARED_GATE=routing.shared_gate,
        )  # fmt: skip
        chosen, weights = self._room("chosen", k), self._room("weights", k + 1)
        facts = (op.router.out, float(op.router_scale), float(routing.factor))
        self._add(kernel, (logits, *learned, chosen, weights), facts, None)
        up = self._linear(rows, op.up, "projected", experts=op)
        results = self._linear(self._activated(up, op, op.down.inner, k), op.down, "results", experts=op, rows=k)
        shared = None
        if op.shared is not None:
            first, last = op.shared
            up = self._linear(rows, first, "projected")
            shared = self._linear(self._activated(up, op, last.inner), last, "shared result")
        out, kernel = self._room("result", width), self.gpu.kernel("mix", SHARED=op.shared is not None)
        self._add(kernel, (results, weights, shared, out), (width, k), -(-width // 64))
        return out

    def _head(self) -> None:
        op = self.graph.head
        self._norm(op.norm, "x", "hidden states", counted=HIDDEN)
        rows = self._norm(op.norm, "x", "head rows", counted=WANTED, factor=op.scale)
        logits, found = self._linear(rows, op.matrix, "logits", WANTED), self._room("found", 3, WANTED)
        kernel = self.gpu.kernel("summary", CAPPED=op.cap is not None)
        self._add(kernel, (logits, found), (self.graph.vocab_size, float(op.cap or 1.0)), 1, counted=WANTED)
        kernel, top = self.gpu.kernel("top"), self._room("top", 1 + 2 * TOP, WANTED)
        self._add(kernel, (logits, top), (self.graph.vocab_size,), 1, counted=WANTED, drawn=True)


def check_store(store: KVStore) -> None:
    """Raises RequestError for K and V that no kernel reads."""
    if any(len(spec.parts) > 1 for spec in store.specs):
        raise RequestError("on a GPU all tokens are cached in one format; leave first out of kv", "kv")
    for side in (side for i in range(len(store.specs)) for part in store.view(i).parts for side in (part.k, part.v)):
        if side.size % (numbers := max(1, 32 // side.codec.bits)):
            name = side.codec.name
            raise RequestError(
                f"on a GPU {name} caches heads of whole {numbers}, not {side.size}; give another kv", "kv"
            )


def _codec(side: Side) -> int:
    return 1 + FORMATS[side.codec.name]


def _buffers(side: Side) -> tuple[Buffer, Buffer | None]:
    first, *rest = (one.buffers[0] for one in side.memory)
    return first, rest[0] if rest else None
