"""The ops of a graph that no GPU kernel computes; without wgpu, so that a plan can tell."""

from tokenwright.models.combined import Mixed
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Deepstack, Graph
from tokenwright.models.op import Op

_MOST_HEAD, _MOST_EXPERTS = 512, 512


def lacking_on_gpu(graph: Graph) -> list[str]:
    missing = {"LayerInputs"} if graph.embed.inputs is not None else set()
    for op in graph.blocks:
        missing |= {"InputGate"} if isinstance(op, Mixed) and op.inputs is not None else set()
        missing = missing.union(*map(_missing, op.parts))
    return sorted(missing)


def _missing(op: Op) -> set[str]:
    name = type(op).__name__
    if isinstance(op, Attention):
        whole = any(one and one.size != op.head_size for one in (op.q_norm, op.k_norm))
        found = {f"{name}.{one}" for one in ("kept", "out_norm") if getattr(op, one)}
        found |= {f"{name}.norms_last over all heads"} if op.norms_last and whole else set()
        fits = op.head_size <= _MOST_HEAD and not op.head_size % 2
        return found if fits else found | {f"{name} with heads of {op.head_size}"}
    if isinstance(op, MLP):
        return {f"{name}.{one}" for one in ("inputs", "deviations", "down_norm") if getattr(op, one) is not None}
    if isinstance(op, Experts):
        return {f"{name} of more than {_MOST_EXPERTS}"} if op.experts > _MOST_EXPERTS else set()
    return set() if isinstance(op, Deepstack) else {name}  # it adds to pictures, which are refused
