"""Parts of Gemma 3n and 4: inputs of each layer beside the residual stream, and last layers that share K and V."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from tokenwright.checkpoints.families.family import MOST_VOCAB, named
from tokenwright.checkpoints.families.gemma import rounded
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import ModelConfig
from tokenwright.models.graph import Attention, Graph
from tokenwright.models.layer_inputs import InputGate, LayerInputs
from tokenwright.models.op import Matrix, Norm

INPUT_NAMES = named(
    {
        "layers.{i}.inputs.gate": "layers.{i}.per_layer_input_gate",
        "layers.{i}.inputs.out": "layers.{i}.per_layer_projection",
        "layers.{i}.inputs.post_norm": "layers.{i}.post_per_layer_input_norm",
        "layer_inputs.table": "embed_tokens_per_layer",
        "layer_inputs.project": "per_layer_model_projection",
        "layer_inputs.norm": "per_layer_projection_norm",
    }
)


def read_shared(keys: JsonKeys, windows: Sequence[int | None], default: int) -> int:
    """The number of the last layers that read K and V of layers before. Raises CheckpointError."""
    layers, shared = len(windows), keys.whole("num_kv_shared_layers", default, least=0)
    first = layers - shared
    if shared and (first < 1 or {one is None for one in windows[:first]} < {one is None for one in windows[first:]}):
        raise keys.error(
            f"the last {shared} layers read K and V of the layer of their kind before them, but there is none"
        )
    return shared


def read_inputs_vocab(keys: JsonKeys) -> int:
    return keys.whole("vocab_size_per_layer_input", 262144, most=MOST_VOCAB)


def with_inputs(config: ModelConfig, graph: Graph, size: int, vocab: int) -> Graph:
    """A graph whose embedding makes the inputs of the layers, `size` numbers for each."""
    inputs = LayerInputs(
        Matrix.single("layer_inputs.table", vocab, config.layers * size),
        rounded(sqrt(size), config.dtype),
        Matrix.single("layer_inputs.project", config.layers * size, config.width),
        config.width**-0.5,
        Norm("layer_inputs.norm", "rms", size, config.norm_eps),
        0.5**0.5,
    )
    return replace(graph, embed=replace(graph.embed, inputs=inputs))


def input_gate(config: ModelConfig, size: int, layer: int) -> InputGate:
    at = f"layers.{layer}.inputs"
    return InputGate(
        layer * size,
        Matrix.single(f"{at}.gate", size, config.width),
        config.activation,
        Matrix.single(f"{at}.out", config.width, size),
        Norm(f"{at}.post_norm", "rms", config.width, config.norm_eps),
    )


def own_or_shared(config: ModelConfig, op: Attention) -> Attention:
    """The attention of a layer: with a norm of its own values, or with the K and V of another layer."""
    first = config.layers - config.kv_shared
    if op.layer >= first:
        source = max(i for i in range(first) if config.windows[i] == op.window)
        return replace(op, qkv=replace(op.qkv, parts=op.qkv.parts[:1]), k_norm=None, source=source)
    name = f"layers.{op.layer}.attention.v_norm"
    return replace(op, v_norm=Norm(name, "rms", op.head_size, config.norm_eps, weighted=False))
