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
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.struct_builders import matrix, recurrence_of, routing_of, turned
from tokenwright.backends.packed import Packed
from tokenwright.config import Rope
from tokenwright.models.combined import Mixed, Parallel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head
from tokenwright.models.latent import LatentAttention
from tokenwright.models.layer_inputs import InputGate, LayerInputs
from tokenwright.models.next_input import NextInput
from tokenwright.models.op import Matrix, Norm, Op
from tokenwright.models.recurrent import MOST_NORMS, Inner, Recurrence, Recurrent
from tokenwright.models.residual_streams import Correct, Laurel, Merge, Predict, Spread, StreamRouter
from tokenwright.models.split import Cuts


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
        angles = sum(graph.rotary_sizes.values())
        self.struct = structs.CModel(graph.width, angles, len(pairs), self._list, ranks and ctypes.pointer(ranks))

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

    def rotation(self, of: Rope | None) -> int:
        """Where the numbers of a rotation begin in a row of all rotations; -1 for None."""
        sizes = self.graph.rotary_sizes
        return -1 if of is None else sum(sizes[one] for one in self.graph.ropes[: self.graph.ropes.index(of)])

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

    def number(self, name: str) -> float:
        """A learned number."""
        return float(np.asarray(self._weights[name])[0])

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
    inputs = structs.CLayerInputs() if op.inputs is None else _layer_inputs(op.inputs, model)
    learned = model.address("positions.weight")
    return structs.CEmbedOp(model.matrix(op.table), learned, op.scale, model.norm(op.norm), inputs)


def _layer_inputs(of: LayerInputs, model: NativeModel) -> structs.CLayerInputs:
    size = of.norm.size
    project = model.matrix(of.project), of.project_scale, model.norm(of.norm)
    return structs.CLayerInputs(model.matrix(of.table), of.scale, *project, of.project.out // size, size, of.factor)


def _input_gate(of: InputGate, stream: float, model: NativeModel) -> structs.CInputGate:
    matrices = model.matrix(of.gate), model.matrix(of.out)
    after = structs.CAfter(model.norm(of.post_norm), 1.0, stream)
    updates = model.updates(of.gate), model.updates(of.out)
    return structs.CInputGate(of.at, structs.ACTIVATIONS[of.activation], *matrices, after, *updates)


def _after(op: Attention | LatentAttention | Experts | Recurrent, model: NativeModel) -> structs.CAfter:
    return structs.CAfter(model.norm(op.post_norm), op.residual_scale, 1.0)


def _parallel(op: Parallel, model: NativeModel) -> structs.CParallelOp:
    return structs.CParallelOp(_attention(op.attention, model), _mlp(op.mlp, model))


def _attention(op: Attention, model: NativeModel) -> structs.CAttentionOp:
    assert op.clip is None or not (op.norms_last or op.source is not None), "no family has both"
    learned = None if op.sink_logits is None else model.address(f"{op.sink_logits}.weight")
    sizes = (op.kv_heads, op.head_size, op.head_size)
    return structs.CAttentionOp(
        op.layer,
        op.kept,
        structs.CHeads(op.heads, *sizes, op.scoring.scale, op.scoring.cap or 0, learned),
        model.rotation(op.rotary),
        model.norm(op.norm),
        model.matrix(op.qkv),
        model.norm(op.q_norm),
        model.norm(op.k_norm),
        model.norm(op.v_norm),
        _sources(op),
        _head_norms(op),
        op.norms_last,
        model.matrix(op.out),
        _after(op, model),
        model.updates(op.qkv),
        model.updates(op.out),
        op.out_gate,
        op.clip or 0,
    )


def _sources(op: Attention) -> int:
    """Where K and V come from, as `Sources` in step.h numbers it."""
    if op.source is not None:
        return structs.OTHER_LAYER
    assert op.values == "own" or not op.out_gate, "no family has a gate behind such keys"
    return structs.OWN_VALUES if op.values == "own" else structs.KEYS_ALONE


def _head_norms(op: Attention) -> int:
    """What the norms of q and k are over, as `HeadNorms` in step.h numbers it."""
    if op.q_norm is None or op.q_norm.size == op.head_size:
        return structs.EACH_HEAD
    return structs.ALL_HEADS if op.q_norm.parts == 1 else structs.OWN_WEIGHTS


def _latent(op: LatentAttention, model: NativeModel) -> structs.CLatentOp:
    sizes = (1, op.rank + op.rope_size, op.rank)
    return structs.CLatentOp(
        op.layer,
        structs.CHeads(op.heads, *sizes, op.scoring.scale, op.scoring.cap or 0, None),
        model.rotation(op.rotary),
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
    after, gate = _end(op, op.residual_scale, model)
    sparse = op.deviations is not None, op.deviations or 0
    ends = after, *updates, gate, *sparse
    return structs.CMLPOp(activation, op.gated, learned, factors, model.norm(op.norm), up, down, *ends)


def _end(op: MLP | Mixed, scale: float, model: NativeModel) -> tuple[structs.CAfter, structs.CInputGate]:
    """What stands behind an MLP's result; the factor of the residual stream stands behind the last of it."""
    stream = 1.0 if op.stream is None else model.number(f"{op.stream}.weight")
    gate = structs.CInputGate() if op.inputs is None else _input_gate(op.inputs, stream, model)
    return structs.CAfter(model.norm(op.post_norm), scale, stream if op.inputs is None else 1.0), gate


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
        model.norm(op.router_norm),
        op.router_scale,
        None if op.weight_scales is None else model.address(f"{op.weight_scales}.weight"),
    )


def _mixed(op: Mixed, model: NativeModel) -> structs.CMixedOp:
    after, gate = _end(op, 1.0, model)
    return structs.CMixedOp(_mlp(op.mlp, model), _experts(op.experts, model), after, gate)


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


def _spread(op: Spread, model: NativeModel) -> structs.CSpreadOp:
    return structs.CSpreadOp(model.matrix(op.project))


def _stream_router(of: StreamRouter, model: NativeModel) -> structs.CStreamRouter:
    matrices = model.matrix(of.matrix), model.matrix(of.coefficients)
    return structs.CStreamRouter(of.matrix.out, model.norm(of.norm), of.scale, *matrices)


def _predict(op: Predict, model: NativeModel) -> structs.CPredictOp:
    return structs.CPredictOp(_stream_router(op.router, model))


def _laurel(op: Laurel, model: NativeModel) -> structs.CLaurelOp:
    after = structs.CAfter(model.norm(op.post_norm), 1.0, op.factor)
    return structs.CLaurelOp(model.norm(op.norm), model.matrix(op.left), model.matrix(op.right), after)


def _correct(op: Correct, model: NativeModel) -> structs.CCorrectOp:
    scale = None if op.scale is None else model.address(f"{op.scale}.weight")
    return structs.CCorrectOp(_stream_router(op.router, model), scale, _input_gate(op.inputs, 1.0, model))


def _merge(op: Merge, model: NativeModel) -> structs.CMergeOp:
    each = (structs.CMatrix * len(op.each))(*map(model.matrix, op.each))
    return structs.CMergeOp(1 + len(op.each), model.pointed(each))


def _head(op: Head, model: NativeModel) -> structs.CHeadOp:
    return structs.CHeadOp(model.norm(op.norm), model.matrix(op.matrix), op.scale, op.cap or 0)


COMPILERS: Mapping[type[Op], Callable[[Any, NativeModel], ctypes.Structure]] = {
    Embed: _embed,
    Attention: _attention,
    LatentAttention: _latent,
    MLP: _mlp,
    Experts: _experts,
    Mixed: _mixed,
    Parallel: _parallel,
    Recurrent: _recurrent,
    NextInput: _next_input,
    Spread: _spread,
    Predict: _predict,
    Laurel: _laurel,
    Correct: _correct,
    Merge: _merge,
    Head: _head,
}
