"""What generation_config.json and config.json suggest, together."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.fixtures import VOCAB, make_checkpoint
from tokenwright.checkpoints.files.generation_config import GenerationDefaults, parse_generation
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.engine import SamplingParams
from tokenwright.errors import CheckpointError


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


SUGGESTED = {
    "min_p": ("min_p", 0.05, 0.05),
    "typical_p": ("typical_p", 0.9, 0.9),
    "repetition_penalty": ("repetition_penalty", 1.1, 1.1),
    "suppress_tokens": ("banned_ids", [7, 3, 7], (3, 7)),
    "min_new_tokens": ("min_tokens", 4, 4),
}


@pytest.mark.parametrize("key", SUGGESTED)
def test_each_key_is_the_field_of_sampling_params(key: str) -> None:
    field, value, taken = SUGGESTED[key]
    found = parse_generation({key: value}, {})
    assert getattr(found, field) == taken == getattr(SamplingParams(**{field: taken}), field)  # type: ignore[arg-type]
    assert found == replace(GenerationDefaults(), **{field: taken})  # type: ignore[arg-type]  # and nothing else
    assert parse_generation({key: None}, {}) == GenerationDefaults()


def test_the_fields_that_the_two_share_have_one_name() -> None:
    ours = {field.name for field in fields(GenerationDefaults)} - {"bos_id", "eos_ids", "unsupported"}
    assert ours < {field.name for field in fields(SamplingParams)}


def test_no_suppressed_token_is_no_suggestion() -> None:
    assert parse_generation({"suppress_tokens": []}, {}) == GenerationDefaults()
    assert parse_generation({"suppress_tokens": [-1]}, {}) == GenerationDefaults()


def test_samplers_that_we_lack_are_named_unless_they_do_nothing() -> None:
    suggested = {"num_beams": 4, "bad_words_ids": [[3]], "min_p": 0.0, "num_beam_groups": 1, "typical_p": None}
    suggested |= {"_from_model_config": True, "transformers_version": "4", "dola_layers": "high", "max_length": 99}
    assert parse_generation(suggested, {}).unsupported == ("bad_words_ids", "dola_layers", "num_beams")


WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": float("nan")},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 2},
    {"min_p": -0.1},
    {"min_p": 1.5},
    {"typical_p": 0},
    {"typical_p": 1.5},
    {"repetition_penalty": 0},
    {"repetition_penalty": 101},
    {"temperature": 1e7},
    {"suppress_tokens": [1.5]},
    {"min_new_tokens": -1},
    {"top_k": -5},
    {"top_k": 1.5},
    {"eos_token_id": "</s>"},
    {"eos_token_id": [True]},
    {"eos_token_id": -2},
    {"do_sample": 1},
]


@pytest.mark.parametrize("key", ["temperature", "min_p"])
def test_a_bound_is_told_in_plain_numbers(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} must be a finite number of at least 0, not -1"):
        parse_generation({key: -1}, {})
    assert getattr(parse_generation({key: 0}, {}), key) == 0.0


def test_ids_beyond_the_vocabulary_are_warned_of_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = make_checkpoint(tmp_path / "model", "llama2", changes={"eos_token_id": [2, VOCAB]})
    (path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [9, 10**6], "eos_token_id": VOCAB - 1}))
    with caplog.at_level("WARNING"):
        found = Checkpoint.open(path).generation
    assert (found.eos_ids, found.banned_ids) == ((VOCAB - 1, 2), (9,))
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        f"eos_token_id has {VOCAB}, beyond the model's {VOCAB} ids; left out",
        f"suppress_tokens has {10**6}, beyond the model's {VOCAB} ids; left out",
    ]


@pytest.mark.parametrize("suggested", WRONG)
def test_values_out_of_range_are_refused_by_name(suggested: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(suggested))):
        parse_generation(suggested, {})


def test_minus_one_as_top_k_keeps_all_tokens() -> None:
    assert parse_generation({"top_k": -1}, {}).top_k is None
    with pytest.raises(CheckpointError, match="top_k must be from 0"):
        parse_generation({"top_k": -2}, {})
