"""Check that a checkpoint has the tensors of its graph, and no others."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.json_keys import shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.second_names import HEAD
from tokenwright.checkpoints.tensor_reader import DTYPES, read_whole
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Graph


def check_fit(
    folder: Path,
    graph: Graph,
    sources: Mapping[str, TensorSource],
    stored: Mapping[str, Stored],
    facts: str = "config.json",  # where the shapes are from
    dtypes: Sequence[str] = tuple(DTYPES),
    writers: Sequence[str] = (),  # programs whose names some tensors have
) -> None:
    """Raises CheckpointError unless the graph has exactly these tensors, with its shapes and a known dtype."""
    expected = {source.name: source.stored(graph.shapes[ours]) for ours, source in sources.items()}
    missing = [name for name in expected if name not in stored]
    if graph.tied_head:
        expected.setdefault(HEAD, (graph.vocab_size, graph.width))
    both = [(name, stored[name], shape) for name, shape in expected.items() if name in stored]
    found = {
        "missing": missing,
        "not of this model": [
            shown(name) for name, one in stored.items() if name not in expected and not _idle(name, one)
        ],
        "of another shape": [
            f"{name} is {list(one.shape)}, but {list(shape)} by {facts}"
            for name, one, shape in both
            if one.shape != shape
        ],
        "neither F32, F16 nor BF16": [
            f"{name} is {one.dtype}"
            for name, one, shape in both
            if one.dtype not in (dtypes if len(shape) > 1 else DTYPES)
        ],
    }
    complaints = [f"{len(names)} {what} ({few(names)})" for what, names in found.items() if names]
    if HEAD in missing:
        complaints.append('the head is absent, though "tie_word_embeddings" is false')
    if complaints:
        remedy = (
            f"If {facts} is that of these weights, another program wrote them"
            f"{f' ({few([*writers])})' if writers else ''}, in a layout that Tokenwright does not read"
        )
        raise CheckpointError(
            f"the tensors in {folder} do not fit {graph.architecture} as {facts} describes it: "
            f"{'; '.join(complaints)}. {remedy}"
        )


def _idle(name: str, one: Stored) -> bool:
    """Whether a tensor is a bias of zeros, as GPTQ's first writers have them everywhere."""
    return name.endswith(".bias") and one.dtype in DTYPES and not read_whole(one).view(np.uint8).any()


def few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
