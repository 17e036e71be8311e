"""Compile a graph for the native kernels: each op becomes a struct that points into the weights.

`COMPILERS` has a function for each op. A model with an op that is missing there runs op by op (`backends/torch`), with
the native kernels behind the `Kernels` protocol.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tokenwright.arrays import Array, address
from tokenwright.backends.adapters import Beside
from tokenwright.backends.device import torch_is_there
from tokenwright.backends.layout import Weights, xielu_of
from tokenwright.backends.native import structs
from tokenwright.backends.native.native_kernels import NativeKernels, matrix, recurrence_of, routing_of, turned
from tokenwright.backends.packed import Packed
from tokenwright.backends.split import Cuts
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head, Parallel
from tokenwright.models.latent import LatentAttention
from tokenwright.models.next_input import NextInput
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.recurrent import MOST_NORMS, Inner, Recurrence, Recurrent


class NativeModel:
    """A graph, its weights and its adapters as structs. It keeps the arrays alive that the structs point into.

    cuts, ranks: of a rank, whose matrices are parts of the graph's.
    """

    def __init__(
        self,
        graph: Graph,
        kernels: NativeKernels,
        weights: Weights,
        adapters: Beside,
        cuts: Cuts = MappingProxyType({}),
        ranks: structs.CRanks | None = None,
    ) -> None:
        self.graph = graph
        self.kernels = kernels
        self._weights = dict(weights)
        self._adapters = adapters
        self._cuts = cuts
        self._updates: list[object] = []  # arrays that ops point to, beside the weights
        self._count = max((number for each in adapters.values() for number in each), default=0)  # of adapters
        self._zeros = np.zeros(graph.width, np.float32)  # the bias of a LayerNorm without one
        self._ops = [COMPILERS[type(op)](op, self) for op in graph.ops]
        pairs = [structs.COp(structs.OPS.index(type(one)), ctypes.addressof(one)) for one in self._ops]
        self._list = (structs.COp * len(pairs))(*pairs)
        self.struct = structs.CModel(
            graph.width, len(graph.ropes), len(pairs), self._list, ranks and ctypes.pointer(ranks)
        )

    def packed(self, of: Matrix) -> Packed:
        found = self._weights[of.name]
        assert isinstance(found, Packed), "matrices are packed"
        return found

    def matrix(self, of: Matrix) -> structs.CMatrix:
        struct = matrix(self.packed(of))
        if of.name in self._cuts:
            struct.first, struct.whole = self._cuts[of.name].first, self._cuts[of.name].whole
        return struct

    def updates(self, of: Matrix) -> int | None:
        """The address of the adapters' updates of a matrix, by their numbers less one; None without adapters."""
        if not self._count:
            return None
        mine = self._adapters.get(of.name, {})
        every = (structs.CLowRank * self._count)()
        for number, one in mine.items():
            assert isinstance(one.down, Packed) and isinstance(one.up, Packed), "they are packed as the model is"
            every[number - 1] = structs.CLowRank(matrix(one.down), matrix(one.up))
        self._updates.append(every)
        return ctypes.addressof(every)

    def norm(self, of: Norm | None) -> structs.CNorm:
        """The struct of a norm; for None one without weights, which the kernels skip."""
        if of is None:
            return structs.CNorm()
        if not of.weighted:  # a null bias stands for RMSNorm
            zeros = None if of.kind == "rms" else address(self._zeros)
            return structs.CNorm(self.keep(np.ones(of.size, np.float32)), zeros, of.eps)
        bias = self.address(f"{of.name}.bias")
        if of.kind == "layer" and not of.bias:
            bias = address(self._zeros)
        return structs.CNorm(self.address(f"{of.name}.weight"), bias, of.eps)

    def recurrence(self, of: Recurrence) -> structs.CRecurrence:
        """The struct of a recurrence. Its taps are stored the other way round: [taps, channels]."""
        tensors = {name.removeprefix(f"{of.name}."): np.asarray(self._weights[name]) for name in of.shapes}
        taps = np.concatenate([tensors[f"{part}.weight"] for part, _ in of.parts])
        tensors = turned(of, tensors | {"conv.weight": taps})
        self._updates.append(tensors)
        places = {name: address(one) for name, one in tensors.items()}
        return recurrence_of(of, places, self.norm(of.norm))

    def pointed(self, structs: "ctypes.Array[Any]") -> int | None:
        """The address of structs that the model keeps alive; None if there are none."""
        self._updates.append(structs)
        return ctypes.addressof(structs) if len(structs) else None

    def keep(self, numbers: Array) -> int | None:
        """The address of an array that the model keeps alive beside its weights."""
        self._updates.append(numbers)
        return address(numbers)

    def xielu(self, name: str) -> int | None:
        """The address of an MLP's learned facts of the activation xIELU."""
        return self.keep(np.array(xielu_of(name, self._weights), np.float32))

    def factors(self, of: Matrix, sizes: Sequence[int], each: Sequence[float]) -> int | None:
        """The address of the factors of a matrix's outputs, of which some have each one; None without factors."""
        if not each:
            return None
        every, cut = np.repeat(np.array(each, np.float32), sizes), self._cuts.get(of.name)
        return self.keep(every if cut is None or cut.whole else every[cut.rows])

    def address(self, name: str) -> int | None:
        """The address of a dense tensor; None if the model lacks it."""
        dense = self._weights.get(name)
        assert not isinstance(dense, Packed), "norms and positions are not packed"
        return address(dense)


def compiles(graph: Graph) -> bool:
    """Whether the native backend can compile every op of a graph."""
    return all(type(op) in COMPILERS for op in graph.ops)


def lacking(graph: Graph) -> list[str]:
    """The names of a graph's block ops that no backend has, sorted. Asks torch's only for ops that are missing here."""
    missing = [op for op in graph.blocks if type(op) not in COMPILERS]
    if missing and torch_is_there():
        from tokenwright.backends.torch.ops import OPS

        missing = [op for op in missing if type(op) not in OPS]
    return sorted({type(op).__name__ for op in missing})


def _embed(op: Embed, model: NativeModel) -> structs.CEmbedOp:
    return structs.CEmbedOp(model.matrix(op.table), model.address("positions.weight"), op.scale, model.norm(op.norm))


def _after(op: Attention | LatentAttention | MLP | Experts | Recurrent, model: NativeModel) -> structs.CAfter:
    return structs.CAfter(model.norm(op.post_norm), op.residual_scale)


def _parallel(op: Parallel, model: NativeModel) -> structs.CParallelOp:
    return structs.CParallelOp(_attention(op.attention, model), _mlp(op.mlp, model))


def _attention(op: Attention, model: NativeModel) -> structs.CAttentionOp:
    learned = None if op.sink_logits is None else model.address(f"{op.sink_logits}.weight")
    slopes = model.keep(np.array(op.slopes, np.float32)) if op.slopes else None
    sizes = (op.kv_heads, op.head_size, op.head_size)
    return structs.CAttentionOp(
        op.layer,
        op.kept,
        structs.CHeads(op.heads, *sizes, op.scoring.scale, op.scoring.cap or 0, learned, slopes),
        -1 if op.rotary is None else model.graph.ropes.index(op.rotary),
        model.norm(op.norm),
        model.matrix(op.qkv),
        model.norm(op.q_norm),
        model.norm(op.k_norm),
        _head_norms(op),
        op.norms_last,
        model.matrix(op.out),
        _after(op, model),
        model.updates(op.qkv),
        model.updates(op.out),
        op.out_gate,
    )


def _head_norms(op: Attention) -> int:
    """What the norms of q and k are over, as `HeadNorms` in step.h numbers it."""
    if op.q_norm is None or op.q_norm.size == op.head_size:
        return structs.EACH_HEAD
    return structs.ALL_HEADS if op.q_norm.parts == 1 else structs.OWN_WEIGHTS


def _latent(op: LatentAttention, model: NativeModel) -> structs.CLatentOp:
    sizes = (1, op.rank + op.rope_size, op.rank)
    return structs.CLatentOp(
        op.layer,
        structs.CHeads(op.heads, *sizes, op.scoring.scale, op.scoring.cap or 0, None, None),
        -1 if op.rotary is None else model.graph.ropes.index(op.rotary),
        op.nope_size,
        model.norm(op.norm),
        model.matrix(op.down),
        model.norm(op.q_norm),
        structs.CMatrix() if op.q_up is None else model.matrix(op.q_up),
        model.norm(op.kv_norm),
        model.matrix(op.k_up),
        model.matrix(op.v_up),
        model.matrix(op.out),
        _after(op, model),
        model.updates(op.down),
        None if op.q_up is None else model.updates(op.q_up),
        model.updates(op.out),
    )


def _mlp(op: MLP, model: NativeModel) -> structs.CMLPOp:
    activation = structs.ACTIVATIONS[op.activation]
    up, down = model.matrix(op.up), model.matrix(op.down)
    updates = model.updates(op.up), model.updates(op.down)
    learned = None if op.learned is None else model.xielu(op.learned)
    factors = model.factors(op.up, [out for _, out in op.up.parts], op.factors)
    return structs.CMLPOp(
        activation, op.gated, learned, factors, model.norm(op.norm), up, down, _after(op, model), *updates
    )


def _experts(op: Experts, model: NativeModel) -> structs.CExpertsOp:
    shared = [model.matrix(one) for one in op.shared] if op.shared else [structs.CMatrix(), structs.CMatrix()]
    return structs.CExpertsOp(
        routing_of(op.routing, None if op.correction is None else model.address(f"{op.correction}.weight")),
        structs.ACTIVATIONS[op.activation],
        op.gated,
        model.norm(op.norm),
        model.matrix(op.router),
        model.matrix(op.up),
        model.matrix(op.down),
        *shared,
        _after(op, model),
    )


def _inner(one: Inner, model: NativeModel) -> structs.CInnerMatrix:
    assert len(one.norms) <= MOST_NORMS
    sizes = (ctypes.c_int64 * MOST_NORMS)(*(norm.size for norm in one.norms))
    norms = (structs.CNorm * MOST_NORMS)(*(model.norm(norm) for norm in one.norms))
    return structs.CInnerMatrix(one.at, model.matrix(one.matrix), sizes, norms)


def _recurrent(op: Recurrent, model: NativeModel) -> structs.CRecurrentOp:
    assert not (op.factors and op.inner), "no family has both"
    inner = (structs.CInnerMatrix * len(op.inner))(*(_inner(one, model) for one in op.inner))
    return structs.CRecurrentOp(
        op.layer,
        op.beside,
        model.factors(op.project, [rows for rows, _ in op.factors], [one for _, one in op.factors]),
        model.recurrence(op.recurrence),
        model.norm(op.norm),
        model.matrix(op.project),
        model.matrix(op.out),
        op.row,
        len(op.inner),
        model.pointed(inner),
        _after(op, model),
        model.updates(op.project),
        model.updates(op.out),
    )


def _next_input(op: NextInput, model: NativeModel) -> structs.CNextInputOp:
    norms = model.norm(op.token_norm), model.norm(op.hidden_norm)
    return structs.CNextInputOp(*norms, model.matrix(op.project), op.hidden_first)


def _head(op: Head, model: NativeModel) -> structs.CHeadOp:
    return structs.CHeadOp(model.norm(op.norm), model.matrix(op.matrix), op.scale, op.cap or 0)


COMPILERS: Mapping[type[Op], Callable[[Any, NativeModel], ctypes.Structure]] = {
    Embed: _embed,
    Attention: _attention,
    LatentAttention: _latent,
    MLP: _mlp,
    Experts: _experts,
    Parallel: _parallel,
    Recurrent: _recurrent,
    NextInput: _next_input,
    Head: _head,
}
