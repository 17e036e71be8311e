"""Gemma 4's graph, and the cache of layers that read the K and V of others."""

from typing import Any

import pytest

from tests.models.fixtures import make_config
from tokenwright.cache import KVStore, group_layers, layer_specs
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.config import Heads, Rope
from tokenwright.errors import CheckpointError
from tokenwright.formats import KVFormat
from tokenwright.models.combined import Mixed
from tokenwright.models.cost import CostModel
from tokenwright.models.graph import MLP, Attention, Graph


def graph_of(**changes: Any) -> Graph:
    return parse_config(make_config("gemma4") | changes).graph


def attention_of(graph: Graph) -> list[Attention]:
    return [op for op in graph.attention if isinstance(op, Attention)]


def test_the_last_layers_read_the_last_of_their_kind_before_them() -> None:
    kinds = ["full_attention", "sliding_attention"]
    graph = graph_of(num_hidden_layers=6, layer_types=kinds * 2 + kinds[::-1], num_kv_shared_layers=2)
    layers = attention_of(graph)
    assert [op.source for op in layers] == [None] * 4 + [3, 2]
    assert [op.projected for op in layers] == [(4, 2, 2)] * 4 + [(4, 0, 0)] * 2
    assert [op.head_size for op in layers] == [48, 32, 48, 32, 32, 48]
    assert [op.up.parts[0][1] for op in graph.blocks if isinstance(op, MLP)] == [48] * 4 + [96] * 2
    full = Rope(1e6, rotated=12, spread=48)
    assert graph.rotary_sizes == {full: 48, Rope(1e4): 32}


def test_values_from_keys_have_no_rows_of_their_own() -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    graph = graph_of(attention_k_eq_v=True, num_global_key_value_heads=1, num_kv_shared_layers=0, **experts)
    layers = attention_of(graph)
    assert [op.values for op in layers] == ["keys", "own", "own", "keys"]
    assert [op.projected for op in layers] == [(4, 1, 0), (4, 2, 2), (4, 2, 2), (4, 1, 0)]
    assert [len(op.parts) for op in graph.blocks if isinstance(op, Mixed)] == [2] * 4
    assert graph.active_parameters == graph.parameters - 4 * 2 * 3 * 64 * 32


@pytest.mark.parametrize("kv", ["native", "int8,native=0,first=5"])
def test_layers_that_read_others_keep_nothing(kv: str) -> None:
    graph = graph_of()
    specs = layer_specs(graph, "float32", KVFormat.parse(kv), window=30)
    assert [spec.source for spec in specs] == [None, None, 1, 3], "layers back"
    assert specs[3].parts == specs[0].parts and specs[2].parts == specs[1].parts
    assert {layer for group in group_layers(specs) for layer in group.layers} == {0, 1}
    assert [spec.nbytes(40) > 0 for spec in specs] == [True, True, False, False]
    store = KVStore(specs, 3, 16)
    for layer, source in ((2, 1), (3, 0)):
        view, own = store.view(layer).parts, store.view(source).parts
        assert [one.k.memory[0].ctypes.data for one in view] == [one.k.memory[0].ctypes.data for one in own]
    cost = CostModel(graph, specs).chunk(0, 20)
    assert cost.kv_written == sum(spec.stored_bytes(range(20)) for spec in specs)
    assert cost.kv_read == 2 * cost.kv_written, "each layer reads"


def test_heads_by_layer_are_read_as_transformers_saves_them() -> None:
    values = make_config("gemma4") | {"attention_k_eq_v": True, "num_global_key_value_heads": 4}
    listed = {"0": {"head_dim": 48, "num_key_value_heads": 4}, "3": {"head_dim": 48, "num_key_value_heads": 4}}
    bare = {key: one for key, one in values.items() if not key.startswith(("global", "num_global"))}
    assert parse_config(bare | {"per_layer_config": listed}).graph == parse_config(values).graph
    assert {layer.layout for layer in parse_config(values).graph.kv} == {Heads(4, 48), Heads(2, 32)}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_kv_shared_layers": 4}, "the last 4 layers read K and V of the layer of their kind before them"),
        ({"num_kv_shared_layers": 3, "layer_types": ["full_attention", *["sliding_attention"] * 3]}, "there is none"),
        ({"vocab_size_per_layer_input": 8}, "fewer than the tokens"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"per_layer_config": {"0": {"sliding_window": 8}}}, "unknown key sliding_window"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "heads that differ"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "num_global_key_value_heads": 2,
          "attention_k_eq_v": True}, "cannot share 2"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.01}}},
         "0 pairs of dimensions turn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "a scaling that"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        graph_of(**changes)
    assert why in str(caught.value)
