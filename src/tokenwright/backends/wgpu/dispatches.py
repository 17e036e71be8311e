"""A graph, compiled once into a list of dispatches over named buffers. Ops without a kernel are refused by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenwright.backends.wgpu.gpu import FACTS, Buffer, Gpu, Kernel
from tokenwright.backends.wgpu.uploads import Uploaded, WeightsOnGpu
from tokenwright.cache import KVStore, KVView, Side
from tokenwright.config import Heads, Rope
from tokenwright.engine import AttentionWindow
from tokenwright.errors import RequestError
from tokenwright.models.combined import Mixed, Parallel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.taps import Site

ROWS, WANTED, HIDDEN = 0, 1, 2  # the words of a step with its counts: tokens, rows of logits, rows of hidden states
TOKENS, POSITIONS, WANTED_ROWS, HIDDEN_ROWS, GROUPS = 3, 4, 5, 6, 8  # and with the places of its arrays
WIDE = 4  # rows of a tile where there are several
MOST_HEAD, MOST_EXPERTS = 512, 512

_ACTIVATIONS = {name: i for i, name in enumerate(("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"))}
_ACTIVATIONS["clamped_swiglu"] = 6
_CODECS = {name: 1 + i for i, name in enumerate(("float32", "bfloat16", "float16", "int8", "int4", "fp8"))}
_TOGETHER = {"float32": 1, "bfloat16": 2, "float16": 2, "int8": 4, "fp8": 4, "int4": 8}  # numbers in a word
_KINDS = {"rms": 1, "layer": 2}

Turn = tuple[Rope, AttentionWindow | None]  # a rotation of a step's rows; with a window, of queries on its sinks


@dataclass(slots=True)
class Dispatch:
    """A kernel over buffers. blocks: of the first dimension; the others are the step's rows, `each` for one counted."""

    kernel: Kernel
    wide: Kernel | None  # the same over tiles of WIDE rows
    buffers: tuple[str | Buffer, ...]  # a name is one of the workspace
    facts: int  # the offset of its facts in bytes
    blocks: int
    counted: int
    each: int = 1
    sites: list[tuple[Site, int, str, int]] = field(default_factory=list)  # a buffer, and the numbers of its rows
    bound: Any = None


def unsupported(graph: Graph) -> list[str]:
    """The names of a graph's ops, and of their options, that no kernel here computes, sorted."""
    missing: set[str] = set()
    if graph.embed.inputs is not None:
        missing.add("LayerInputs")
    for op in graph.blocks:
        for one in op.parts:
            missing |= _missing(one)
        if isinstance(op, Mixed) and op.inputs is not None:
            missing.add("InputGate")
    return sorted(missing)


def _missing(op: Op) -> set[str]:
    name = type(op).__name__
    if isinstance(op, Attention):
        norms = [one for one in (op.q_norm, op.k_norm, op.v_norm) if one is not None]
        plain = all(one.size == op.head_size or not op.norms_last for one in norms)
        found = {f"{name} with heads of {op.head_size}"} if op.head_size > MOST_HEAD or op.head_size % 2 else set()
        found |= {f"{name}.kept"} if op.kept else set()
        return found | (set() if plain else {f"{name}.norms_last over all heads"})
    if isinstance(op, MLP):
        return {f"{name}.{one}" for one in ("inputs", "deviations") if getattr(op, one) is not None}
    if isinstance(op, Experts):
        return {f"{name} of more than {MOST_EXPERTS}"} if op.experts > MOST_EXPERTS else set()
    return {name}


class Compiler:
    """Compiles one graph over one store. Raises RequestError for a cache format without kernels."""

    def __init__(self, gpu: Gpu, graph: Graph, weights: WeightsOnGpu, store: KVStore, wide: bool) -> None:
        self.gpu, self.graph, self.weights, self.store, self.tiles = gpu, graph, weights, store, wide
        self.dispatches: list[Dispatch] = []
        self.words: dict[str, tuple[int, int]] = {}  # of each buffer of the workspace: words of a row, and what counts
        self.turns: dict[Turn, int] = {}  # their numbers
        self._facts: list[bytes] = []
        sizes = graph.rotary_sizes
        self.head_sizes: dict[Turn, int] = {}
        for op, spec in zip(graph.attention, store.specs, strict=True):
            if op.rope is not None:
                for window in (None, spec.window if spec.window.sinks else None):
                    self.turns.setdefault((op.rope, window), len(self.turns))
                    self.head_sizes[op.rope, window] = sizes[op.rope]
        self._embed()
        for op in graph.blocks:
            self._block(op)
        self._head()
        self.facts = gpu.uploaded(np.frombuffer(b"".join(self._facts), np.uint8))

    # -- buffers and dispatches

    def _room(self, name: str, words: int, counted: int = ROWS) -> str:
        """A buffer of the workspace with at least so many words for each row."""
        self.words[name] = max(self.words.get(name, (0, 0))[0], words), counted
        return name

    def _add(
        self,
        kernel: str,
        constants: Mapping[str, int | bool],
        buffers: tuple[str | Buffer, ...],
        facts: Mapping[int, int | float],
        blocks: int,
        counted: int = ROWS,
        each: int = 1,
        tiled: bool = False,
    ) -> None:
        words = np.zeros(FACTS // 4, np.uint32)
        for place, value in facts.items():
            words[place] = np.float32(value).view(np.uint32) if isinstance(value, float) else value
        offset = FACTS * len(self._facts)
        self._facts.append(words.tobytes())
        tile = {"TILE": 1} if kernel == "linear" else {}
        plain = self.gpu.kernel(kernel, **constants, **tile)
        wide = self.gpu.kernel(kernel, **constants, TILE=WIDE) if tiled and self.tiles else None
        self.dispatches.append(Dispatch(plain, wide, ("step", *buffers), offset, blocks, counted, each))

    def _site(self, site: Site, layer: int, buffer: str, numbers: int) -> None:
        """What the last dispatch has completed, for a tap."""
        self.dispatches[-1].sites.append((site, layer, buffer, numbers))

    def _quantised(self, x: str, stride: int, of: Uploaded, counted: int, each: int) -> str:
        """The rows of `x` as a quantised matrix takes them."""
        rows = self._room(f"quantised{counted}", of.row_words * each, counted)
        facts = {0: stride, 1: of.inner, 2: of.depth, 3: counted, 4: each}
        blocks = -(-of.depth // of.group // 64)
        self._add("quantise", {"GROUP": of.group}, (x, rows), facts, blocks, counted, each)
        return rows

    def _linear(self, x: str, matrix: Matrix, y: str, counted: int = ROWS, stride: int = 0) -> str:
        """y = matrix(x). stride: words of a row of x."""
        of = self.weights.matrices[matrix.name]
        self._room(y, of.out, counted)
        if of.group:
            x, stride = self._quantised(x, stride or of.inner, of, counted, 1), of.row_words
        for piece in of.pieces:
            facts = {0: stride or of.inner, 1: of.inner, 2: of.slabs, 3: piece.outputs, 4: of.out, 5: piece.first}
            facts |= {6: counted, 7: int(of.bias is not None), 8: piece.first, 11: 1}
            buffers = (x, piece.codes, piece.scales, of.bias or self.gpu.nothing, self.gpu.nothing, y)
            constants = {"FORMAT": of.format, "GROUP": of.group}
            self._add("linear", constants, buffers, facts, -(-piece.outputs // 16), counted, tiled=True)
        return y

    def _chosen(self, x: str, matrix: Matrix, y: str, op: Experts, rows: int) -> str:
        """y [T x k, out] = the matrix of each chosen expert times its row of x: one of `rows` rows for a token."""
        of, k = self.weights.matrices[matrix.name], op.chosen
        if len(of.pieces) > 1:
            raise RequestError(
                f"{self.gpu.name} cannot bind {matrix.name} to a kernel at once; use device cpu", "device"
            )
        out, stride = of.out // op.experts, of.inner
        self._room(y, out * k)
        if of.group:
            x, stride = self._quantised(x, stride, of, ROWS, rows), of.row_words
        facts = {0: stride, 1: of.inner, 2: of.slabs, 3: out, 4: out, 6: ROWS, 7: int(of.bias is not None)}
        facts |= {9: k, 10: -(-out // 16), 11: k // rows}
        [piece] = of.pieces
        buffers = (x, piece.codes, piece.scales, of.bias or self.gpu.nothing, "chosen", y)
        self._add("linear", {"FORMAT": of.format, "GROUP": of.group}, buffers, facts, -(-out // 16), ROWS, k)
        return y

    def _norm(
        self,
        of: Norm | None,
        x: str,
        y: str,
        *,
        size: int = 0,
        at: tuple[int, int] = (0, 0),
        counted: int = ROWS,
        rows: int = 0,
        factor: float = 1.0,
        added: float | None = None,
    ) -> str:
        """y = factor norm(x), or y = (y + that) `added`. at: the row's words, and its first one here, in both."""
        size = of.size if of else size
        stride, first = at if at[0] else (size, 0)
        self._room(y, stride, counted)
        weight, bias = (self.weights.dense.get(f"{of.name}.{one}") if of else None for one in ("weight", "bias"))
        constants = {"KIND": _KINDS[of.kind] if of else 0, "WEIGHTED": weight is not None, "BIASED": bias is not None}
        facts: dict[int, int | float] = {0: size, 1: stride, 2: first, 3: stride, 4: first, 5: counted, 6: rows}
        floats = (of.eps if of else 0.0, factor, 1.0 if added is None else added)
        facts |= {7 + i: float(one) for i, one in enumerate(floats)}
        buffers = (x, weight or self.gpu.nothing, bias or self.gpu.nothing, y)
        self._add("norm", {**constants, "ADD": added is not None}, buffers, facts, 1, counted)
        return y

    # -- ops

    def _embed(self) -> None:
        op, width = self.graph.embed, self.graph.width
        of, x = self.weights.matrices[op.table.name], self._room("x", width)
        target = x if op.norm is None else self._room("normed", width)
        places = self.weights.dense.get("positions.weight")
        for piece in of.pieces:
            facts: dict[int, int | float] = {
                0: width,
                1: of.slabs,
                2: float(op.scale),
                3: piece.first,
                4: piece.outputs,
            }
            constants = {"FORMAT": of.format, "GROUP": of.group, "PLACES": places is not None}
            buffers = (piece.codes, piece.scales, places or self.gpu.nothing, target)
            self._add("embed", constants, buffers, facts, -(-width // 64))
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
        else:
            assert isinstance(op, Attention | MLP | Experts), "others are refused"
            by_type: Mapping[Any, Callable[[Any], str]]
            by_type = {Attention: self._attention, MLP: self._mlp, Experts: self._experts}
            self._after(op, by_type[type(op)](op))

    def _after(self, op: Attention | MLP | Experts, y: str) -> None:
        """x += residual_scale post_norm(y); then times a learned number, where the op has one."""
        stream = self.weights.number(op.stream if isinstance(op, MLP) else None)
        self._norm(op.post_norm, y, "x", size=self.graph.width, factor=op.residual_scale, added=stream)
        self._site(Site.ATTENTION if isinstance(op, Attention) else Site.MLP, op.layer, "x", self.graph.width)

    def _normed(self, of: Norm | None) -> str:
        return "x" if of is None else self._norm(of, "x", "normed")

    def _attention(self, op: Attention) -> str:
        view, size = self.store.view(op.layer), op.head_size
        [part] = view.parts
        normed = self._normed(op.norm)
        self._site(Site.ATTENTION_INPUT, op.layer, normed, self.graph.width)
        projected = self._linear(normed, op.qkv, "projected")
        stride, places = op.qkv.out, [0, op.heads * size, 0]  # the first words of q, k and v
        places[2] = places[1] + (op.kv_heads * size if op.values == "own" else 0)
        query = self._room("query", op.heads * size)
        self._heads(op, projected, query, op.q_norm, op.heads, places[0], None, (op.rope, None))
        self._site(Site.QUERY, op.layer, query, op.heads * size)
        on_sinks = query
        if op.rope is not None and view.spec.window.sinks:
            on_sinks = self._room("sink query", op.heads * size)
            self._heads(op, projected, on_sinks, op.q_norm, op.heads, 0, None, (op.rope, view.spec.window))
        if op.source is None:
            group = GROUPS + 2 * part.group
            self._heads(op, projected, None, op.k_norm, op.kv_heads, places[1], (part.k, group), (op.rope, None))
            self._heads(op, projected, None, op.v_norm, op.kv_heads, places[2], (part.v, group), None)
        window, scoring, learned = view.spec.window, op.scoring, op.sink_logits
        constants = {
            "D": size, "HEADS": op.heads, "K_CODEC": _codec(part.k), "V_CODEC": _codec(part.v),
            "WINDOW": window.size or 0, "SINKS": window.sinks, "CAPPED": scoring.cap is not None,
            "LEARNED": learned is not None, "GATED": op.out_gate,
        }  # fmt: skip
        facts = {0: float(scoring.scale), 1: float(scoring.cap or 1.0), 2: self.store.page_size, 6: op.kv_heads}
        facts |= {3: GROUPS + 2 * part.group + 1, 4: stride, 5: stride - op.heads * size}
        memory = (*_buffers(part.k, self.gpu), *_buffers(part.v, self.gpu))
        logits = self.gpu.nothing if learned is None else self.weights.dense[f"{learned}.weight"]
        mixed = self._room("mixed", op.heads * size)
        self._add("attention", constants, (query, on_sinks, *memory, logits, projected, mixed), facts, op.heads)
        if not op.out_gate:  # the tap of `mixed` is before the gate, and the kernel's result behind it
            self._site(Site.MIXED, op.layer, mixed, op.heads * size)
        return self._linear(mixed, op.out, "result")

    def _heads(
        self,
        op: Attention,
        projected: str,
        floats: str | None,
        norm: Norm | None,
        heads: int,
        first: int,
        stored: tuple[Side, int] | None,
        turn: tuple[Rope | None, AttentionWindow | None] | None,
    ) -> None:
        """Norm, clip and rotate heads of `projected`, and write them as floats or into the KV memory."""
        size, stride = op.head_size, op.qkv.out
        if norm is not None and norm.parts == 1 and norm.size != size:  # over all heads together
            projected, norm = self._norm(norm, projected, "normed heads", at=(stride, first)), None
        by_head = norm is not None and norm.parts > 1
        weight = None if norm is None else self.weights.dense.get(f"{norm.name}.weight")
        turned = turn is not None and turn[0] is not None
        codec = 0 if stored is None else _codec(stored[0])
        constants = {
            "D": size, "NORM": 0 if norm is None else 2 if by_head else _KINDS[norm.kind],
            "WEIGHTED": weight is not None, "NORM_LAST": op.norms_last,
            "CLIPPED": op.clip is not None,
            "ROTATED": turned, "CODEC": codec,
        }  # fmt: skip
        number = self.turns[turn] if turned else 0  # type: ignore[index]
        facts: dict[int, int | float] = {0: stride, 1: first, 2: heads * size, 8: heads, 7: size if by_head else 0}
        facts |= {4: GROUPS + 2 * len(self.store.groups) + number, 5: norm.eps if norm else 0.0, 6: op.clip or 0.0}
        target: tuple[str | Buffer, ...] = (floats or "", "unused")
        self._room("unused", 1)
        if stored is not None:
            side, facts[3] = stored
            codes, scales = _buffers(side, self.gpu)
            target = codes, scales if len(side.memory) > 1 else "unused"
        self._add("heads", constants, (projected, weight or self.gpu.nothing, "rotations", *target), facts, heads)

    def _mlp(self, op: MLP, x: str | None = None) -> str:
        up = self._linear(x or self._normed(op.norm), op.up, "projected")
        hidden = self._activated(up, op.down.inner, op.activation, op.gated, 1, op.factors, op.learned)
        self._site(Site.MLP_HIDDEN, op.layer, hidden, op.down.inner)
        return self._linear(hidden, op.down, "result")

    def _activated(
        self,
        x: str,
        m: int,
        activation: str,
        gated: bool,
        each: int,
        factors: tuple[float, ...] = (),
        learned: str | None = None,
    ) -> str:
        hidden = self._room("hidden", m * each)
        facts: dict[int, int | float] = {0: m, 5: ROWS, 6: each}
        first, second = (*factors, 1.0, 1.0)[:2]
        facts |= {3: float(first), 4: float(second)}
        facts |= dict(zip((7, 8, 9), self.weights.xielu(learned), strict=True))
        constants = {"ACT": _ACTIVATIONS[activation], "GATED": gated}
        self._add("activate", constants, (x, hidden), facts, -(-m // 64), ROWS, each)
        return hidden

    def _experts(self, op: Experts) -> str:
        routing, width, k = op.routing, self.graph.width, op.chosen
        own = None if op.router_norm is None else self._norm(op.router_norm, "x", "router input")
        rows = self._normed(op.norm)
        logits = self._linear(own or rows, op.router, "router logits")
        learned = [self.weights.dense.get(f"{one}.weight") for one in (op.correction, op.weight_scales)]
        constants = {
            "EXPERTS": op.experts, "CHOSEN": k, "SIGMOID": routing.scores == "sigmoid",
            "CORRECTED": bool(op.correction),
            "GROUPS": routing.groups, "CHOSEN_GROUPS": routing.chosen_groups, "GROUP_BEST": routing.group_best,
            "RENORMALISED": routing.renormalise, "SCALED": bool(op.weight_scales), "SHARED_GATE": routing.shared_gate,
        }  # fmt: skip
        chosen, weights = self._room("chosen", k), self._room("weights", k + 1)
        buffers = (logits, *(one or self.gpu.nothing for one in learned), chosen, weights)
        facts: dict[int, int | float] = {0: op.router.out, 1: float(op.router_scale), 2: float(routing.factor)}
        self._add("route", constants, buffers, facts, -1)
        up = self._chosen(rows, op.up, "projected", op, 1)
        hidden = self._activated(up, op.down.inner, op.activation, op.gated, k)
        results = self._chosen(hidden, op.down, "results", op, k)
        shared = self.gpu.nothing
        if op.shared is not None:
            first, last = op.shared
            up = self._linear(rows, first, "projected")
            shared = self._linear(self._activated(up, last.inner, op.activation, op.gated, 1), last, "shared result")
        out = self._room("result", width)
        constants = {"SHARED": op.shared is not None, "ADD": False}
        self._add("mix", constants, (results, weights, shared, out), {0: width, 1: k}, -(-width // 64))
        return out

    def _head(self) -> None:
        op, vocabulary = self.graph.head, self.graph.vocab_size
        self._norm(op.norm, "x", "hidden states", counted=HIDDEN, rows=HIDDEN_ROWS)
        rows = self._norm(op.norm, "x", "head rows", counted=WANTED, rows=WANTED_ROWS, factor=op.scale)
        logits = self._linear(rows, op.matrix, "logits", WANTED)
        found = self._room("found", 3, WANTED)
        facts = {0: vocabulary, 1: float(op.cap or 1.0)}
        self._add("summary", {"CAPPED": op.cap is not None}, (logits, found), facts, 1, WANTED)


def check_store(store: KVStore) -> None:
    """Raises RequestError for K and V that no kernel here reads."""
    for layer, spec in enumerate(store.specs):
        if len(spec.parts) > 1:
            raise RequestError("on a GPU all tokens are cached in one format; leave first out of kv", "kv")
        view: KVView = store.view(layer)
        for side in (view.parts[0].k, view.parts[0].v):
            together = _TOGETHER[side.codec.name]
            if not isinstance(spec.layout, Heads) or side.size % together:
                raise RequestError(
                    f"on a GPU a head of {side.size} numbers cannot be cached as {side.codec.name}; give another kv",
                    "kv",
                )


def _codec(side: Side) -> int:
    return _CODECS[side.codec.name]


def _buffers(side: Side, gpu: Gpu) -> tuple[Buffer, Buffer]:
    """The buffers of the codes and of the scales."""
    first, *rest = (one.buffer for one in side.memory)
    return first, rest[0] if rest else gpu.nothing
