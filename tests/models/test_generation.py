"""What generation_config.json and config.json suggest, together."""

from typing import Any

import pytest

from tokenwright.config import GenerationDefaults
from tokenwright.errors import CheckpointError
from tokenwright.models.generation import parse_generation


def test_end_tokens_are_the_union_of_both_files() -> None:
    both = parse_generation({"eos_token_id": [7, 5]}, {"eos_token_id": 9, "bos_token_id": 1})
    assert both.eos_ids == (7, 5, 9)
    assert both.bos_id == 1
    assert parse_generation({}, {"eos_token_id": [5, 5]}).eos_ids == (5,)
    assert parse_generation({"bos_token_id": 3}, {"bos_token_id": 1}).bos_id == 3
    assert parse_generation({}, {"eos_token_id": -1}) == GenerationDefaults()


def test_the_sampler_is_taken_over() -> None:
    found = parse_generation({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, {})
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert found.unsupported == ()


def test_do_sample_false_is_greedy() -> None:
    assert parse_generation({"do_sample": False, "temperature": 0.6}, {}).temperature == 0.0
    assert parse_generation({"temperature": 0}, {}).temperature == 0.0
    assert parse_generation({"top_p": 0.9}, {}).temperature is None


def test_samplers_that_we_lack_are_named_unless_they_do_nothing() -> None:
    suggested = {"repetition_penalty": 1.1, "min_p": 0.0, "num_beams": 1, "typical_p": None, "max_length": 99}
    suggested |= {"_from_model_config": True, "transformers_version": "4", "dola_layers": "high"}
    assert parse_generation(suggested, {}).unsupported == ("dola_layers", "repetition_penalty")


WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 2},
    {"top_k": -5},
    {"top_k": 1.5},
    {"eos_token_id": "</s>"},
    {"eos_token_id": [True]},
    {"eos_token_id": -2},
    {"do_sample": 1},
]


@pytest.mark.parametrize("suggested", WRONG)
def test_values_out_of_range_are_refused_by_name(suggested: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(suggested))):
        parse_generation(suggested, {})
