"""A config.json that transformers has saved anew describes the same graph, and neutral keys never refuse a model."""

import copy
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.checkpoints.test_published_configs import CONFIGS
from tests.models.fixtures import KINDS, VARIANTS, make_config
from tests.models.random_models import MAKERS, PLAIN, plain_model, random_hybrid
from tests.profiles import some
from tokenwright.checkpoints.families.registry import FAMILIES, Parsed, parse_config
from tokenwright.checkpoints.quantised.published import read_scheme
from tokenwright.errors import CheckpointError

CASES: dict[str, dict[str, Any]] = (
    {name: config for name, config in CONFIGS.items() if name != "moonshotai/Kimi-K2-Instruct"}
    | {kind: make_config(kind) for kind in (*KINDS, *VARIANTS)}
    | {kind: plain_model(kind) for kind in PLAIN}
    | {f"random {i}": random_hybrid(i) for i in range(3 * len(MAKERS))}
)
# Of the config classes' defaults, what no file has: no number of experts for a token, and an odd width of experts.
MENDED: dict[str, dict[str, int]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "nemotron_h": {"moe_intermediate_size": 1856},
    "glm4_moe": {"head_dim": 128},  # 96 heads do not divide its width
}


def parsed(config: dict[str, Any]) -> Parsed:
    settings = copy.deepcopy(config)
    read_scheme(settings, "config.json")
    return parse_config(settings)


def resaved(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json that transformers writes after it has read this one."""
    AutoConfig.for_model(**copy.deepcopy(config)).save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_config_that_transformers_saved_anew_gives_the_same_graph(name: str, tmp_path: Path) -> None:
    assert parsed(resaved(CASES[name], tmp_path)).graph == parsed(CASES[name]).graph


@pytest.mark.parametrize("kind", [kind for one in FAMILIES for kind in one.architectures.values()])
def test_the_defaults_of_every_config_class_run(kind: str, tmp_path: Path) -> None:
    try:
        config = resaved({"model_type": kind}, tmp_path)
    except ValueError:
        pytest.skip("transformers has no such class")
    assert parsed(config | MENDED.get(kind, {})).graph.parameters > 0


# Keys without which the tensors would have other shapes or names, so that their files are refused; and the rotations of
# two classes, which are always written.
FIXED = {"n_routed_experts", "num_experts", "num_key_value_heads", "v_head_dim", "vision_config"}
WRITTEN = {("cwm", "rope_parameters"), ("ministral3", "rope_parameters")}


def test_a_key_that_is_left_out_means_what_its_class_says(tmp_path: Path) -> None:
    """Or it is refused as missing: for each key of each class, in CI of its part of the classes."""
    differ = []
    names = {kind: name for one in FAMILIES for name, kind in one.architectures.items()}
    for kind, name in some(list(names.items())):
        try:
            config = resaved({"model_type": kind, "architectures": [name]}, tmp_path) | MENDED.get(kind, {})
        except ValueError:
            continue
        graph, still = parsed(config).graph, {"model_type", "architectures", *FIXED, *MENDED.get(kind, {})}
        for key in config.keys() - still:
            with suppress(CheckpointError):
                if parsed({one: value for one, value in config.items() if one != key}).graph != graph:
                    differ.append((kind, key))
    assert set(differ) <= WRITTEN


def test_causal_models_of_transformers_run_or_lack_an_operation(tmp_path: Path) -> None:
    """By the defaults of their config classes, of which one has none that are valid."""
    said: dict[str, str] = {}  # of those that are refused
    for kind, named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind == "gemma4_assistant":
            continue
        config = {"model_type": kind, "architectures": [named if isinstance(named, str) else named[0]]}
        try:
            parsed(resaved(config, tmp_path) | MENDED.get(kind, {}))
        except CheckpointError as error:
            said[kind] = str(error)
    assert [kind for kind, why in said.items() if "correct config.json" in why] == []
    assert [kind for kind, why in said.items() if not re.search("it needs .+, which Tokenwright lacks", why)] == []
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - 1 - len(said) >= 125


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_a_neutral_value_of_any_key_passes(value: object) -> None:
    plain = parsed(make_config("qwen3-moe"))
    for key in ("some_new_operation", "lm_head_bias", "use_mrope", "qkv_bias", "attention_bias"):
        if key != "attention_bias" or type(value) is bool:
            assert parsed(make_config("qwen3-moe") | {key: value}).graph == plain.graph


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("logits_scaling", 1, 2.0),
        ("embedding_multiplier", 1.0, 12.0),
        ("use_qk_norm", False, True),
        ("use_rope", True, False),
        ("is_causal", True, False),
        ("some_new_operation", False, True),
    ],
)
def test_a_key_that_a_family_does_not_read_passes_at_its_neutral_value_alone(
    key: str, neutral: object, other: object
) -> None:
    plain = make_config("llama3")
    assert parsed(plain | {key: neutral}) == parsed(plain)
    with pytest.raises(CheckpointError, match=key):
        parsed(plain | {key: other})
