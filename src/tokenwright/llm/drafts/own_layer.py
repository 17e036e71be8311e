"""The layer of a model's own files that predicts one token further (MTP), loaded to draft with.

The native backend shares the model's embedding and head with it; others read these two a second time.
"""

from typing import Any

from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.cache import LayerSpec, layer_specs
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.next_layer import next_layer_of
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.config import EngineConfig
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat
from tokenwright.llm.model import LoadedModel, PreparedModel, make_decoder
from tokenwright.models.graph import Graph


def next_layer_specs(loaded: PreparedModel, options: EngineConfig) -> tuple[LayerSpec, ...]:
    """The cache of the layer that `open_next_layer` loads. Raises RequestError for a model without one."""
    return _specs(_checkpoint(loaded, ends=False).graph, loaded, options)


def open_next_layer(loaded: LoadedModel, options: EngineConfig) -> tuple[Checkpoint, Any, tuple[LayerSpec, ...]]:
    """Load the next layer of a model, in the format of its other layers. Raises RequestError where it cannot draft."""
    own = loaded.decoder
    if loaded.team is not None:
        raise RequestError(
            "speculate mtp needs a model that one process computes; leave it or tensor_parallel out", "speculate"
        )
    form = WeightFormat("native") if loaded.copies else loaded.weights
    checkpoint = _checkpoint(loaded, ends=not isinstance(own, NativeDecoder))
    if isinstance(own, NativeDecoder):
        weights = load_packed(checkpoint, form, loaded.dtype)
        ends = {one.name for op in (own.graph.embed, own.graph.head) for one in op.matrices} | {*own.graph.embed.shapes}
        weights |= {name: own.weights[name] for name in ends if name in own.weights}
        decoder: Any = NativeDecoder(checkpoint.graph, own.kernels, weights)
    else:
        native = find_kernels() if loaded.device.type == "cpu" else None
        decoder = make_decoder(checkpoint, form, loaded.dtype, loaded.device, native)
    return checkpoint, decoder, _specs(checkpoint.graph, loaded, options)


def _checkpoint(loaded: PreparedModel, *, ends: bool) -> Checkpoint:
    return next_layer_of(loaded.checkpoint, ends=ends)


def _specs(graph: Graph, loaded: PreparedModel, options: EngineConfig) -> tuple[LayerSpec, ...]:
    return layer_specs(graph, loaded.dtype, window=options.window, sinks=options.sinks)
