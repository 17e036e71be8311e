"""Compile a graph for the native kernels: each op becomes a struct that points into the weights.

`cpp/step/step.h` declares an op's struct: `LaurelOp` for `Laurel`. `NativeModel.value` reads each field from the op's
field of that name, or `FACTS` has a function. Models with other ops run op by op.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from tokenwright.arrays import Array, address
from tokenwright.backends.adapters import Beside
from tokenwright.backends.device import torch_is_there
from tokenwright.backends.layout import Weights, xielu_of
from tokenwright.backends.native import structs
from tokenwright.backends.native.expert_pool import ExpertPool
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.native.struct_builders import matrix, recurrence_of, routing_of, turned
from tokenwright.backends.packed import Packed
from tokenwright.config import Rope
from tokenwright.models.combined import Mixed
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Embed, Graph
from tokenwright.models.latent import LatentAttention
from tokenwright.models.op import InputGate, LayerInputs, Matrix, Norm
from tokenwright.models.recurrent import MOST_NORMS, Inner, Recurrence, Recurrent
from tokenwright.models.residual_streams import Laurel, Merge, StreamRouter
from tokenwright.models.split import Cuts


class NativeModel:
    """A graph, its weights and its adapters as structs, whose arrays it keeps alive.

    cuts, ranks: of a rank's part of a model. pool: for experts in a file.
    """

    def __init__(
        self,
        graph: Graph,
        kernels: NativeKernels,
        weights: Weights,
        adapters: Beside,
        cuts: Cuts = MappingProxyType({}),
        ranks: structs.CRanks | None = None,
        pool: ExpertPool | None = None,
    ) -> None:
        self.graph = graph
        self.pool = pool
        self.kernels = kernels
        self._weights = dict(weights)
        self._adapters = adapters
        self._cuts = cuts
        self._updates: list[object] = []
        self._count = max((number for each in adapters.values() for number in each), default=0)
        self._zeros = np.zeros(graph.width, np.float32)  # the bias of a LayerNorm without one
        self._ops = [self.filled(op) for op in graph.ops]
        self._chain_mixtures()
        self._list = (structs.COp * len(self._ops))()
        for place, op, made in zip(self._list, graph.ops, self._ops, strict=True):
            place.kind, place.op = structs.OPS.index(type(op).__name__), ctypes.addressof(made)
        self._updates.append(ranks)
        self.struct = structs.CModel(
            graph.width,
            sum(graph.rotary_sizes.values()),
            len(self._ops),
            ctypes.addressof(self._list),
            None if ranks is None else ctypes.addressof(ranks),
        )

    def _chain_mixtures(self) -> None:
        pairs = zip(self.graph.ops, self._ops, strict=True)
        made = [one.experts if isinstance(op, Mixed) else one for op, one in pairs if isinstance(op, Mixed | Experts)]
        for one, following in pairwise(made):
            one.next = ctypes.addressof(following)

    def filled(self, part: object) -> Any:
        name, given = type(part).__name__, FACTS[type(part)](part, self) if type(part) in FACTS else {}
        struct = structs.STRUCTS[f"{name}Op" if name in structs.OPS else name]
        fields = struct._fields_
        return struct(*(given[field] if field in given else self.value(part, field, kind) for field, kind in fields))

    def value(self, part: Any, name: str, kind: type) -> Any:
        if name == "after":
            return structs.CAfter(self.norm(part.post_norm), part.residual_scale, 1.0)
        if name == "rotation":
            return self.rotation(part.rotary)
        if name.endswith("_updates"):
            of = getattr(part, name.removesuffix("_updates"))
            return None if of is None else self.updates(of)
        found = getattr(part, name)
        if name in _CODES:
            return _CODES[name][found]
        if kind is structs.CNorm:
            return self.norm(found)
        if issubclass(kind, ctypes.Structure):
            return kind() if found is None else self.matrix(found) if isinstance(found, Matrix) else self.filled(found)
        if kind is ctypes.c_void_p:
            return None if found is None else self.address(f"{found}.weight")
        return 0 if found is None else found

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
        """The address of the adapters' updates of a matrix, in an array by adapter number less one."""
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
        """The struct of a norm. None gets one without weights, which the kernels skip."""
        if of is None:
            return structs.CNorm()
        if not of.weighted:  # a null bias means RMSNorm
            zeros = None if of.kind == "rms" else address(self._zeros)
            return structs.CNorm(self.keep(np.ones(of.size, np.float32)), zeros, of.eps)
        bias = self.address(f"{of.name}.bias")
        if of.kind == "layer" and not of.bias:
            bias = address(self._zeros)
        return structs.CNorm(self.address(f"{of.name}.weight"), bias, of.eps)

    def rotation(self, of: Rope | None) -> int:
        """Where a rotation begins in a row of all rotations; -1: there is none."""
        sizes = self.graph.rotary_sizes
        return -1 if of is None else sum(sizes[one] for one in self.graph.ropes[: self.graph.ropes.index(of)])

    def recurrence(self, of: Recurrence) -> structs.CRecurrence:
        tensors = {name.removeprefix(f"{of.name}."): np.asarray(self._weights[name]) for name in of.shapes}
        taps = np.concatenate([tensors[f"{part}.weight"] for part, _ in of.parts])
        tensors = turned(of, tensors | {"conv.weight": taps})
        self._updates.append(tensors)
        places = {name: address(one) for name, one in tensors.items()}
        return recurrence_of(of, places, self.norm(of.norm))

    def pointed(self, structs: "ctypes.Array[Any]") -> int | None:
        self._updates.append(structs)
        return ctypes.addressof(structs) if len(structs) else None

    def keep(self, numbers: Array) -> int | None:
        self._updates.append(numbers)
        return address(numbers)

    def xielu(self, name: str) -> int | None:
        return self.keep(np.array(xielu_of(name, self._weights), np.float32))

    def factors(self, of: Matrix, sizes: Sequence[int], each: Sequence[float]) -> int | None:
        """The address of the factors of a matrix's outputs; `sizes` are the numbers of outputs with one factor."""
        if not each:
            return None
        every, cut = np.repeat(np.array(each, np.float32), sizes), self._cuts.get(of.name)
        return self.keep(every if cut is None or cut.whole else every[cut.rows])

    def number(self, name: str) -> float:
        return float(np.asarray(self._weights[name])[0])

    def address(self, name: str) -> int | None:
        """The address of a dense tensor, if the model has it."""
        dense = self._weights.get(name)
        assert not isinstance(dense, Packed), "norms and positions are not packed"
        return address(dense)


def compiles(graph: Graph) -> bool:
    return all(type(op).__name__ in structs.OPS for op in graph.ops)


def lacking(graph: Graph) -> list[str]:
    """The sorted names of block ops that no backend has. Imports torch only for ops that are missing here."""
    missing = [op for op in graph.blocks if type(op).__name__ not in structs.OPS]
    if missing and torch_is_there():
        from tokenwright.backends.torch.ops import OPS

        missing = [op for op in missing if type(op) not in OPS]
    return sorted({type(op).__name__ for op in missing})


Facts = dict[str, Any]
_CODES = {"activation": structs.ACTIVATIONS, "scores": structs.SCORES}


def _attention(op: Attention, model: NativeModel) -> Facts:
    assert op.clip is None or not (op.norms_last or op.source is not None), "no family has both"
    learned = None if op.sink_logits is None else model.address(f"{op.sink_logits}.weight")
    sizes = (op.kv_heads, op.head_size, op.head_size)
    bias = None
    if op.kv.biased and (all_biases := model.packed(op.qkv).bias) is not None:
        first, size = op.heads * op.head_size, op.kv_heads * op.head_size
        bias = model.keep(np.ascontiguousarray(all_biases[first : first + size]))
    heads = structs.CHeads(op.heads, *sizes, op.scoring.scale, op.scoring.cap or 0, learned, bias)
    return {"heads": heads, "sources": _sources(op), "head_norms": _head_norms(op)}


def _sources(op: Attention) -> int:
    if op.source is not None:
        return structs.OTHER_LAYER
    assert op.values == "own" or not op.out_gate, "no family has a gate behind such keys"
    return structs.OWN_VALUES if op.values == "own" else structs.KEYS_ALONE


def _head_norms(op: Attention) -> int:
    if op.q_norm is None or op.q_norm.size == op.head_size:
        return structs.EACH_HEAD
    return structs.ALL_HEADS if op.q_norm.parts == 1 else structs.OWN_WEIGHTS


def _latent(op: LatentAttention, model: NativeModel) -> Facts:  # noqa: ARG001
    sizes = (1, op.rank + op.rope_size, op.rank)
    heads = structs.CHeads(op.heads, *sizes, op.scoring.scale, op.scoring.cap or 0, None)
    return {"heads": heads, "still": op.nope_size}


def _mlp(op: MLP, model: NativeModel) -> Facts:
    return _end(op, op.residual_scale, model) | {
        "xielu": None if op.learned is None else model.xielu(op.learned),
        "factors": model.factors(op.up, [out for _, out in op.up.parts], op.factors),
        "sparse": op.deviations is not None,
    }


def _end(op: MLP | Mixed, scale: float, model: NativeModel) -> Facts:
    """The struct of the end of an MLP or of experts. The factor of the residual stream comes last."""
    stream = 1.0 if op.stream is None else model.number(f"{op.stream}.weight")
    if op.inputs is None:
        return {"after": structs.CAfter(model.norm(op.post_norm), scale, stream)}
    gate = model.filled(op.inputs)
    gate.after.stream = stream
    return {"after": structs.CAfter(model.norm(op.post_norm), scale, 1.0), "inputs": gate}


def _experts(op: Experts, model: NativeModel) -> Facts:
    correction = None if op.correction is None else model.address(f"{op.correction}.weight")
    up, down = map(model.matrix, op.shared) if op.shared else (structs.CMatrix(), structs.CMatrix())
    paged = None if model.pool is None else model.pool.layer(op)
    shared = {"shared_up": up, "shared_down": down}
    return {"routing": routing_of(op.routing, correction), "paged": paged, "next": None} | shared


def _inner(one: Inner, model: NativeModel) -> Facts:
    assert len(one.norms) <= MOST_NORMS
    sizes = (ctypes.c_int64 * MOST_NORMS)(*(norm.size for norm in one.norms))
    return {"sizes": sizes, "norms": (structs.CNorm * MOST_NORMS)(*map(model.norm, one.norms))}


def _recurrent(op: Recurrent, model: NativeModel) -> Facts:
    assert not (op.factors and op.inner), "no family has both"
    inner = (structs.CInner * len(op.inner))(*map(model.filled, op.inner))
    return {
        "factors": model.factors(op.project, [rows for rows, _ in op.factors], [one for _, one in op.factors]),
        "recurrence": model.recurrence(op.recurrence),
        "inners": len(op.inner),
        "inner": model.pointed(inner),
    }


def _merge(op: Merge, model: NativeModel) -> Facts:
    each = (structs.CMatrix * len(op.each))(*map(model.matrix, op.each))
    return {"streams": 1 + len(op.each), "matrix": model.pointed(each)}


FACTS: Mapping[type[Any], Callable[[Any, NativeModel], Facts]] = {
    Embed: lambda _, model: {"positions": model.address("positions.weight")},
    LayerInputs: lambda of, _: {"layers": of.project.out // of.norm.size, "size": of.norm.size},
    InputGate: lambda of, model: {"after": structs.CAfter(model.norm(of.post_norm), 1.0, 1.0)},
    Attention: _attention,
    LatentAttention: _latent,
    MLP: _mlp,
    Mixed: lambda op, model: _end(op, 1.0, model),
    Experts: _experts,
    Inner: _inner,
    Recurrent: _recurrent,
    StreamRouter: lambda of, _: {"streams": of.matrix.out},
    Laurel: lambda op, model: {"after": structs.CAfter(model.norm(op.post_norm), 1.0, op.factor)},
    Merge: _merge,
}
