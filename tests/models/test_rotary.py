"""Rotary positions against transformers' own functions."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.fixtures import make_config
from tests.profiles import examples
from tests.tensors import TensorTable
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

PLACES = (0, 1, 2, 3, 17, 100, 999, 4095, 100_000)


def theirs(rope: dict[str, Any], size: int, context: int, limit: int) -> tuple[torch.Tensor, float]:
    """transformers' inverse frequencies [D / 2] and its factor on cos and sin."""
    config = LlamaConfig(
        hidden_size=size, num_attention_heads=1, head_dim=size, max_position_embeddings=context, rope_parameters=rope
    )
    if rope["rope_type"] == "default":
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        return rope["rope_theta"] ** -steps, 1.0
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=limit)


def agree(ours: Rope, rope: dict[str, Any], size: int, context: int, limit: int) -> None:
    inverse, factor = theirs(rope, size, context, limit)
    rotation = TensorTable(ours, size).rows(torch.tensor(PLACES), limit)
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    for row, place in enumerate(PLACES):
        angles = torch.cat((inverse, inverse)).double() * place
        close = 1e-6 + 4e-7 * place  # their frequencies are fp32
        torch.testing.assert_close(rotation.cos[row].double(), angles.cos() * factor, rtol=0, atol=close)
        torch.testing.assert_close(rotation.sin[row].double(), angles.sin() * factor, rtol=0, atol=close)


SCALINGS: list[RopeScaling] = [
    NoScaling(), LinearScaling(4.0), DynamicScaling(3.0, 256), Llama3Scaling(8.0, 1.0, 4.0, 128), YarnScaling(4.0, 256),
]  # fmt: skip
FACTORS = st.floats(1.0, 64.0)


@examples(100)
@given(
    rope=st.one_of(
        st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS}),
        st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": FACTORS}),
        st.fixed_dictionaries(
            {"rope_type": st.just("llama3"), "factor": FACTORS, "low_freq_factor": st.floats(0.5, 2.0)}
            | {"high_freq_factor": st.floats(2.5, 8.0), "original_max_position_embeddings": st.integers(32, 8192)}
        ),
        st.fixed_dictionaries(
            {"rope_type": st.just("yarn"), "factor": FACTORS, "original_max_position_embeddings": st.just(512)},
            optional={"beta_fast": st.floats(16.0, 64.0), "beta_slow": st.floats(0.5, 4.0)}
            | {"truncate": st.booleans(), "attention_factor": st.floats(0.5, 2.0)},
        ),
    ),
    theta=st.floats(100.0, 1e7),
    limit=st.integers(1, 20_000),
)
def test_a_config_that_is_read_gives_the_tables_of_transformers(rope: dict[str, Any], theta: float, limit: int) -> None:
    changes = {"rope_scaling": rope, "rope_theta": theta, "max_position_embeddings": 512}
    ours = parse_config(make_config("llama2", changes=changes)).config.positions
    assert isinstance(ours, Rope)
    agree(ours, rope | {"rope_theta": theta}, 16, 512, limit)


def test_angles_far_out_are_exact() -> None:
    """At position 2^24 + 1 fp32 can no longer count; the angles are fp64."""
    place = 2**24 + 1
    rotation = TensorTable(Rope(), 4).rows(torch.tensor([place]), place)
    assert float(rotation.cos[0, 0]) == pytest.approx(math.cos(place), abs=1e-6)
    assert float(rotation.sin[0, 1]) == pytest.approx(math.sin(place / 100), abs=1e-6)


def test_longrope_has_factors_for_limits_up_to_the_original_context_and_others_beyond() -> None:
    table = TensorTable(Rope(scaling=LongScaling(100, (2.0, 1.0), (8.0, 4.0), 1.5)), 4)
    places = torch.tensor([50])
    for limit, factors in ((100, (2, 1)), (101, (8, 4)), (5000, (8, 4))):
        angles = torch.tensor([50 / factors[0], 50 / 100 / factors[1]])
        torch.testing.assert_close(table.rows(places, limit).cos[0], 1.5 * torch.cat((angles, angles)).cos())


def test_only_dynamic_scaling_heeds_the_limit() -> None:
    places = torch.tensor([50])
    for scaling in SCALINGS:
        table = TensorTable(Rope(scaling=scaling), 16)
        heeds = not torch.equal(table.rows(places, 100).cos, table.rows(places, 5000).cos)
        assert heeds is isinstance(scaling, DynamicScaling)
