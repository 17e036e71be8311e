"""Decides how a checkpoint's tensors are held in memory: codes and scales are copied, or numbers are converted."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tokenwright.backends.layout import format_of
from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.tensor_reader import DTYPES, forms_of
from tokenwright.formats import DTYPE_BYTES, WeightFormat
from tokenwright.models.graph import Graph


def as_stored(
    graph: Graph, sources: Mapping[str, TensorSource], stored: Mapping[str, Stored]
) -> dict[str, WeightFormat]:
    """The matrices, and parts of joined ones, whose blocks a packed form holds exactly, with that form.

    Joined parts, such as q, k and v, have the smallest form that holds all; if there is none, all are decoded.
    """
    found: dict[str, WeightFormat] = {}
    turned = {one.name for one in sources.values() if one.transpose or (one.order is not None and one.order.turned)}
    for matrix in graph.matrices.values():
        parts = [name for name, _ in matrix.parts]
        names = dict.fromkeys(sources[f"{part}.weight"].name for part in parts)
        forms, *others = (() if name in turned else forms_of(stored[name]) for name in names)
        if form := next((one for one in forms if all(one in other for other in others)), None):
            found |= dict.fromkeys(parts, form)
    return found


def without(graph: Graph, kept: Mapping[str, WeightFormat], changed: Collection[str]) -> Mapping[str, WeightFormat]:
    touched = [matrix for matrix in graph.matrices.values() if any(part in changed for part, _ in matrix.parts)]
    gone = {part for matrix in touched for part, _ in matrix.parts}
    return {part: form for part, form in kept.items() if part not in gone}


@dataclass(frozen=True, slots=True)
class HeldTensors:
    type: str
    tensors: int
    nbytes: int
    format: str
    copied: bool  # as codes and scales: no weight is rounded again

    @property
    def converted(self) -> bool:
        """Whether blocks are decoded or numbers quantised, and not only a dtype changed."""
        return not self.copied and (self.type not in DTYPES or self.format not in DTYPE_BYTES)

    def __str__(self) -> str:
        how = "copied" if self.copied else "converted" if self.converted else "held"
        found = f"{self.type} {self.nbytes:,} bytes ({self.tensors} tensors), {how} as {self.format}"
        if not self.converted or self.type in DTYPES or self.format in DTYPE_BYTES:
            return found
        return f"{found}: weights that are rounded twice, which costs accuracy; leave weights out to keep the file's"


def held(
    graph: Graph,
    sources: Mapping[str, TensorSource],
    stored: Mapping[str, Stored],
    form: WeightFormat,
    kept: Mapping[str, WeightFormat],
) -> list[HeldTensors]:
    found: dict[tuple[str, str, bool], list[int]] = {}
    for name in {sources[ours].name: ours for ours in reversed(graph.shapes)}.values():  # each stored tensor once
        one, base = stored[sources[name].name], name.rsplit(".", 1)[0]
        matrix = len(one.shape) > 1
        target = (kept.get(base) or format_of(base, form)) if matrix else WeightFormat("float32")
        found.setdefault((one.dtype, str(target), base in kept and matrix), []).append(one.nbytes)
    rows = [HeldTensors(kind, len(sizes), sum(sizes), form, copied) for (kind, form, copied), sizes in found.items()]
    return sorted(rows, key=lambda row: -row.nbytes)
