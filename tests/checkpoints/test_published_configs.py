"""Published config.json files: which run, with the size that their cards give, and which operation the others need."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenwright.backends.native.compile import compiles
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.checkpoints.quantised.published import read_scheme
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Graph
from tokenwright.models.rotary import RotaryTable
from tokenwright.planner import plan

# One line a model, as the hub has it. parameters: by its card, whole or in billions of the text model; needs: the
# operations that we lack.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "models/files/published_configs.json").read_text(encoding="utf-8")
)
CONFIGS: dict[str, dict[str, Any]] = {name: one["config"] for name, one in PUBLISHED.items() if "parameters" in one}


def graph_of(name: str) -> Graph:
    settings = dict(CONFIGS[name])
    read_scheme(settings, name)  # takes the quantisation of the weights out
    return parse_config(settings).graph


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_runs_or_the_missing_operation_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    if name not in CONFIGS:
        with pytest.raises(CheckpointError) as caught:
            plan(tmp_path)
        assert f"it needs {PUBLISHED[name]['needs']}" in str(caught.value)
        return
    graph, parameters = graph_of(name), PUBLISHED[name]["parameters"]
    assert parameters in (graph.parameters, round(graph.parameters / 1e9, 2))
    assert compiles(graph)
    assert plan(tmp_path).hindrances == ()


def test_ministrals_context_ends_where_queries_would_be_scaled() -> None:
    assert graph_of("mistralai/Ministral-3-3B-Instruct-2512").context == 16384


def test_a_text_has_one_position_in_each_section() -> None:
    [rope] = graph_of("Qwen/Qwen2.5-VL-3B-Instruct").ropes
    alone = parse_config(CONFIGS["Qwen/Qwen2.5-VL-3B-Instruct"] | {"rope_scaling": None}).graph.ropes[0]
    assert replace(rope, sections=()) == alone
    at = np.arange(9)
    rows = [RotaryTable(one, 128).rows(where, 0).cos for one, where in ((rope, np.stack([at] * 3)), (alone, at))]
    assert (rows[0] == rows[1]).all()


@pytest.mark.parametrize("kind", [("DeepseekV32ForCausalLM", "deepseek_v32"), ("GlmMoeDsaForCausalLM", "glm_moe_dsa")])
def test_an_indexers_keys_change_nothing_for_as_many_tokens_as_it_chooses(kind: tuple[str, str]) -> None:
    settings = dict(CONFIGS["deepseek-ai/DeepSeek-V3"])
    read_scheme(settings, kind[1])
    own = {"index_topk": 1024, "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True}
    settings |= {"architectures": [kind[0]], "model_type": kind[1], **own}
    assert parse_config(settings).config.context == 1024
