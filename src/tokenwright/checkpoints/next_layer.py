"""Opens the MTP layer (multi-token prediction) as a model; copies of embedding and head in its files are not read."""

from collections.abc import Mapping
from dataclasses import replace

from tokenwright.checkpoints.families.family import Family, NextNames, TensorSource
from tokenwright.checkpoints.families.graph_builder import next_graph
from tokenwright.checkpoints.families.registry import family_of
from tokenwright.checkpoints.fit import check_fit
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.gguf.header import BLOCKS
from tokenwright.checkpoints.memory_form import as_stored
from tokenwright.checkpoints.quantised.codecs import Compound
from tokenwright.checkpoints.tensor_reader import DTYPES
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.models.graph import Graph


def next_layer_of(checkpoint: Checkpoint, *, ends: bool) -> Checkpoint:
    """The MTP layer as a checkpoint with its own graph. ends: `sources` have the embedding and the head too.

    Raises RequestError for a checkpoint without such a layer, CheckpointError for a layer that does not fit.
    """
    family = checkpoint.layout or family_of(checkpoint.config.architecture)
    names, layers = family.following, checkpoint.config.layers
    at = "" if names is None else f"{names.at.format(i=layers)}."
    if names is None or not any(name.startswith(at) for name in checkpoint.following):
        read = " that Tokenwright reads" if checkpoint.following else ""
        raise RequestError(
            f"speculate mtp drafts with a layer that predicts further tokens (MTP), and {checkpoint.path.name} has "
            f"none{read}; give suffix, or a draft model",
            "speculate",
        )
    graph = next_graph(checkpoint.config, checkpoint.graph, names.hidden_first)
    apart = any(".experts.0." in name for name in checkpoint.following)
    sources = _sources(family, names, graph, layers, names.apart if apart else {})
    own = {ours: source for ours, source in sources.items() if ours not in checkpoint.sources}
    stored = {one.name: checkpoint.following[one.name] for one in own.values() if one.name in checkpoint.following}
    joined = {one.dtype for one in stored.values() if isinstance(one, Compound)}
    try:
        check_fit(checkpoint.path, graph, own, stored, dtypes=(*DTYPES, *BLOCKS, *joined))
    except CheckpointError as error:
        raise CheckpointError(f"the layer that predicts further tokens (MTP) cannot be read: {error}") from error
    every = {**checkpoint.stored, **stored}
    forms = as_stored(graph, sources, every) if checkpoint.as_stored else {}
    kept = sources if ends else own
    stored = {source.name: every[source.name] for source in kept.values()}
    forms = {part: form for part, form in forms.items() if f"{part}.weight" in kept}
    return replace(checkpoint, graph=graph, sources=kept, stored=stored, as_stored=forms, adapters=())


def _sources(
    family: Family, names: NextNames, graph: Graph, layers: int, experts: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    norms = {"token_norm": names.token_norm, "hidden_norm": names.hidden_norm, "norm": names.norm}
    more = {"project": TensorSource(f"{names.at}.{names.project}")}
    more |= {ours: TensorSource(f"{names.at}.{theirs}", plus=names.plus) for ours, theirs in norms.items()}
    own = {f"layers.{{i}}.next.{ours}": source for ours, source in more.items()}
    found = replace(family, names={**family.names, **own, **experts}).sources(graph)
    usual, at = f"layers.{layers}.", f"{names.at.format(i=layers)}."
    return {
        ours: replace(one, name=at + one.name.removeprefix(usual)) if one.name.startswith(usual) else one
        for ours, one in found.items()
    }
