"""Gemma 3n's graph: what each layer has, and what is refused."""

from typing import Any

import pytest

from tests.models.fixtures import VOCAB, make_config
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.residual_streams import Correct, Laurel, Merge, Predict, Spread


def graph_of(**changes: Any) -> Graph:
    return parse_config(make_config("gemma3n", changes=changes)).graph


def test_the_ops_of_each_layer() -> None:
    graph = graph_of()
    spread, *layers, merge = graph.blocks
    assert isinstance(spread, Spread) and isinstance(merge, Merge)
    assert [type(op) for op in layers] == [Predict, Attention, Laurel, MLP, Correct] * 5
    assert [op.source for op in layers if isinstance(op, Attention)] == [None, None, None, 1, 2]
    assert [op.up.parts[0][1] for op in layers if isinstance(op, MLP)] == [96, 48, 64, 96, 96]
    some, few, *none = (op.deviations for op in layers if isinstance(op, MLP))
    assert (round(some or 0, 4), round(few or 0, 4), none) == (0.2533, -0.5244, [None] * 3)
    assert [op.router.coefficients.out for op in layers if isinstance(op, Predict | Correct)] == [9, 3] * 5
    assert graph.shapes["layer_inputs.table.weight"] == (VOCAB - 8, 5 * 24)


def test_absent_keys_have_transformers_defaults() -> None:
    bare = {"architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 11, "num_kv_shared_layers": 1}
    graph = parse_config(bare).graph
    sparse = [op.deviations for op in graph.blocks if isinstance(op, MLP)]
    assert [None if one is None else round(one, 4) for one in sparse] == [1.6449] * 10 + [None]
    assert [i for i, layer in enumerate(graph.kv) if layer.window is None] == [4, 9]
    assert (graph.kv[0].window, graph.vocab_size, graph.head.cap) == (512, 262400, 30.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"altup_active_idx": 1}, "another residual stream than the first"),
        ({"altup_correct_scale": False}, "without factors"),
        ({"altup_num_inputs": 1}, "altup_num_inputs must be from 2 to 8"),
        ({"intermediate_size": [96, 48]}, "a number for each of the 5 layers, not 2"),
        ({"intermediate_size": [96, 48, 64, 96, 0]}, "intermediate_size must be whole numbers from 1"),
        ({"activation_sparsity_pattern": [0.5] * 4}, "a number for each of the 5 layers, not 4"),
        ({"activation_sparsity_pattern": [1.0] * 5}, "from 0 to less than 1"),
        ({"num_kv_shared_layers": 4}, "the last 4 layers read K and V of the layer of their kind before them"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input must be from 1"),
        ({"laurel_rank": 0}, "laurel_rank must be from 1"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        graph_of(**changes)
    assert why in str(caught.value)
