"""What a config.json means: held to transformers, and refused by name where we lack it."""

import contextlib
import copy
import math
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.fixtures import KINDS, VARIANTS, make_config
from tests.models.random_models import plain_model
from tokenwright.checkpoints.families.dense_rows import PHI3
from tokenwright.checkpoints.families.registry import GPT2, LLAMA, TensorSource, parse_config
from tokenwright.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelConfig,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from tokenwright.errors import CheckpointError


def parse(kind: str, **changes: Any) -> ModelConfig:
    """The config of a fixture, changed; None stands for null."""
    return parse_config(make_config(kind) | changes).config


def scaling(config: ModelConfig) -> RopeScaling:
    assert isinstance(config.positions, Rope)
    return config.positions.scaling


def theirs_of(values: dict[str, Any]) -> PreTrainedConfig:
    """transformers' reading of a config; on a copy, because it completes what it is given."""
    return AutoConfig.for_model(**copy.deepcopy(values))


def refusal(kind: str, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse(kind, **changes)
    return str(caught.value)


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_both_spellings_mean_the_same(kind: str) -> None:
    assert parse_config(make_config(kind)) == parse_config(make_config(kind, "new"))


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}),
    ("smollm3", {"use_sliding_window": True, "layer_types": None}),
    ("llama2", {}),
]


@pytest.mark.parametrize(("kind", "changes"), WINDOWS)
def test_windows_are_those_of_transformers(kind: str, changes: dict[str, Any]) -> None:
    values = make_config(kind) | changes
    theirs = theirs_of(values)
    types = getattr(theirs, "layer_types", None)
    if types is None:  # llama has no window, mistral the same one everywhere
        window = getattr(theirs, "sliding_window", None)
        expected = (window,) * theirs.num_hidden_layers
    else:
        expected = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in types)
    assert parse_config(values).config.windows == expected


def test_an_absent_window_of_mistral_is_its_default() -> None:
    values = make_config("mistral")
    del values["sliding_window"]
    assert parse_config(values).config.windows == (4096,) * 3


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_layers_without_positions_are_those_of_transformers(interval: int) -> None:
    values = make_config("smollm3") | {"no_rope_layers": None, "no_rope_layer_interval": interval}
    theirs = theirs_of(values)
    assert parse_config(values).config.rotary == tuple(bool(one) for one in theirs.no_rope_layers)
    assert parse("smollm3").rotary == (True, True, False, True)


@pytest.mark.parametrize("window", [24, None])
@pytest.mark.parametrize("types", ["f", "s", "sf"])
def test_a_window_that_no_layer_has_still_takes_positions_away(window: int | None, types: str) -> None:
    """EXAONE 4 asks whether the config has a window, not whether a layer has."""
    named = {"f": "full_attention", "s": "sliding_attention"}
    listed = [named[types[i % len(types)]] for i in range(3)]
    if window is None and "s" in types:
        assert "no sliding_window is in use" in refusal("exaone4", sliding_window=None, layer_types=listed)
        return
    values = make_config("exaone4") | {"sliding_window": window, "layer_types": listed}
    layers = AutoModelForCausalLM.from_config(theirs_of(values)).model.layers
    expected = tuple(one.self_attn.sliding_window is None or one.self_attn.is_sliding for one in layers)
    assert parse_config(values).config.rotary == expected


@pytest.mark.parametrize("kind", ["cwm", "vaultgemma", "granite_swa", "granitemoe_swa"])
def test_layers_without_listed_types_are_those_of_transformers(kind: str) -> None:
    values = {key: one for key, one in plain_model(kind).items() if key not in ("layer_types", "layer_rope_theta")}
    for given in (values, {key: one for key, one in values.items() if key != "sliding_window"}):
        theirs = theirs_of(given | {"num_hidden_layers": 6})
        expected = tuple(theirs.sliding_window if one == "sliding_attention" else None for one in theirs.layer_types)
        assert parse_config(given | {"num_hidden_layers": 6}).config.windows == expected


YARN: list[dict[str, Any]] = [
    {},
    {"attention_factor": 1.25},
    {"mscale": 0.7, "mscale_all_dim": 1.0},
    {"mscale": 0.7},
    {"mscale": 0.0, "mscale_all_dim": 1.0},
    {"factor": 1.0},
    {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"beta_fast": None, "original_max_position_embeddings": 64, "factor": None},
]


@pytest.mark.parametrize("changes", YARN)
def test_yarn_means_what_it_means_to_transformers(changes: dict[str, Any]) -> None:
    values = make_config("yarn")
    values["rope_scaling"] |= changes
    theirs = theirs_of(values)
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = scaling(parse_config(values).config)
    assert isinstance(ours, YarnScaling)
    assert math.isclose(ours.attention_factor, attention_factor)
    assert ours.original_context == theirs.rope_parameters["original_max_position_embeddings"]
    assert ours.factor == changes.get("factor", 4.0) or ours.factor == 2.0  # null: 128 / 64
    assert (ours.beta_fast, ours.beta_slow) == (changes.get("beta_fast") or 32, changes.get("beta_slow") or 1)
    assert ours.truncate is changes.get("truncate", True)


def test_scalings_give_their_contexts() -> None:
    assert parse("llama2").context == 512
    assert parse("llama3").context == 512
    assert parse("linear").context == parse("dynamic").context == 4 * 128
    assert parse("yarn", max_position_embeddings=256).context == 4 * 128
    assert scaling(parse("linear")) == LinearScaling(4.0)
    assert scaling(parse("dynamic")) == DynamicScaling(4.0, 128)
    assert scaling(parse("llama3")) == Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert scaling(parse("llama3", rope_scaling={})) == NoScaling()


def test_an_original_context_beside_the_scaling_overrules_the_one_inside() -> None:
    values = make_config("yarn") | {"original_max_position_embeddings": 32}
    theirs = theirs_of(values)
    ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    ours = scaling(parse_config(values).config)
    assert isinstance(ours, YarnScaling)
    assert ours.original_context == theirs.rope_parameters["original_max_position_embeddings"] == 32


def test_longrope_means_what_it_means_to_transformers() -> None:
    values = make_config("phi3-long")
    theirs = theirs_of(values)
    for limit, name in ((128, "short"), (129, "long")):
        inverse, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=limit)
        ours = scaling(parse_config(values).config)
        assert isinstance(ours, LongScaling)
        assert ours.original_context == 128
        assert math.isclose(ours.attention_factor, attention_factor)
        plain = [10000.0 ** -(2 * i / 16) for i in range(8)]
        expected = [one / factor for one, factor in zip(plain, getattr(ours, name), strict=True)]
        assert inverse.tolist() == pytest.approx(expected)
    assert scaling(parse("phi3-long", rope_scaling=values["rope_scaling"] | {"type": "su"})) == ours


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"long_factor": [1.0] * 7}, "short_factor and long_factor must have 8 numbers"),
        ({"short_factor": [1.0] * 7 + [0]}, "short_factor must be a list of numbers above 0"),
        ({"long_factor": None}, "long_factor must be a list"),
        ({"short_mscale": 1.1}, "unknown key short_mscale"),
    ],
)
def test_a_longrope_that_does_not_fit_is_refused(changes: dict[str, Any], told: str) -> None:
    assert told in refusal("phi3-long", rope_scaling=make_config("phi3-long")["rope_scaling"] | changes)


def test_what_the_new_families_lack_is_refused_by_name() -> None:
    assert "rotation of a part of each head" in refusal("llama2", partial_rotary_factor=0.75)
    assert "partial_rotary_factor must be at most 1" in refusal("phi3", partial_rotary_factor=1.5)
    assert "a head has 5 of them" in refusal("glm4", partial_rotary_factor=5.2 / 16)
    assert "embedding_multiplier" in refusal("llama2", embedding_multiplier=12.0)
    assert "residual_multiplier must be a finite number above 0" in refusal("granite", residual_multiplier=-1)
    assert "another MLP in this architecture" in refusal("starcoder2", mlp_type="gated")
    assert parse("starcoder2", use_bias=False).mlp_bias is False


def test_gemmas_scales_and_caps_are_those_of_transformers() -> None:
    config = parse("gemma2", hidden_size=3584, num_attention_heads=16, torch_dtype="bfloat16")
    assert config.scales.embedding == 59.75  # 3584 ** 0.5 is 59.8665
    assert parse("gemma2", hidden_size=3584, torch_dtype="float16").scales.embedding == 59.875
    assert parse("gemma2", hidden_size=3584).scales.embedding == pytest.approx(3584**0.5, rel=1e-7)
    assert (config.score_scale, config.score_cap, config.logit_cap) == (16**-0.5, 10.0, 5.0)
    assert parse("gemma2", attn_logit_softcapping=None).score_cap is None
    values = make_config("gemma2")
    del values["attn_logit_softcapping"], values["final_logit_softcapping"]
    config = parse_config(values).config
    assert (config.score_cap, config.logit_cap) == (50.0, 30.0)
    assert "a soft cap in this architecture" in refusal("gemma3", attn_logit_softcapping=50.0)


def test_gemma3_rotates_by_the_kind_of_a_layer() -> None:
    _, config, graph = parse_config(make_config("gemma3"))
    full, local = Rope(1e6, LinearScaling(8.0)), Rope(1e4)
    assert graph.ropes == (full, local) and graph.positions == full
    assert [op.rope for op in graph.attention] == [local, local, full, local]
    assert config.windows == (48, 48, None, 48)
    assert config.context == 512, "max_position_embeddings includes the scaling"
    both = make_config("gemma3", "new")["rope_parameters"]
    assert "are both there" in refusal("gemma3", rope_parameters=both)


def test_a_text_model_beside_encoders_is_read_from_its_own_keys() -> None:
    values = make_config("gemma3-vision")
    inner = values["text_config"]
    theirs = theirs_of(values).get_text_config()
    config = parse_config(values).config
    assert (config.heads, config.kv_heads, config.head_size) == (4, 2, 32)
    assert (config.width, config.mlp_width, config.vocab_size) == (64, 96, 320)
    assert config.norm_eps == theirs.rms_norm_eps
    assert "text_config must be an object" in refusal("gemma3-vision", text_config=[])
    assert "use_bidirectional" in refusal("gemma3-vision", text_config=inner | {"use_bidirectional_attention": True})


def test_what_an_unknown_architecture_needs_is_named() -> None:
    def said(**keys: Any) -> str:
        return refusal("llama2", architectures=["OtherForCausalLM"], **keys)

    told = said(n_routed_experts=8, kv_lora_rank=512, index_topk=2048, attention_chunk_size=64)
    needs = "attention to the 2,048 tokens that an indexer chooses, chunked attention, 64 tokens at a time"
    assert f"it needs {needs}, which Tokenwright lacks" in told
    assert "sliding chunked attention" in said(layer_types=["chunked_attention", "full_attention"])
    assert "it needs gated linear recurrences (RG-LRU), which" in said(lru_width=16, attention_hidden_size=16)
    assert "Tokenwright has no family that maps its keys and tensors" in said(n_routed_experts=0)
    assert "chunked" not in said(attention_chunk_size=128, sliding_window=128)
    inner = {"text_config": {"attention_chunk_size": 64}}
    assert "chunked attention, 64 tokens at a time" in refusal("gemma3-vision", architectures=["X"], **inner)


@pytest.mark.parametrize(
    ("architecture", "needs"),
    [
        ("BloomForCausalLM", "biases of scores by the distance (ALiBi)"),
        ("MPTForCausalLM", "biases of scores by the distance (ALiBi)"),
        ("MptForCausalLM", "biases of scores by the distance (ALiBi)"),
        ("Zamba2ForCausalLM", "blocks of attention and an MLP that several layers share"),
        ("DbrxForCausalLM", "the keys and tensor names of DBRX"),
    ],
)
def test_an_architecture_whose_operations_are_gone_is_refused_by_their_names(architecture: str, needs: str) -> None:
    told = refusal("llama2", architectures=[architecture])
    assert f"unknown architecture {architecture}; it needs {needs}, which Tokenwright lacks" in told


def test_neox_has_q_k_and_v_of_each_head_in_turn() -> None:
    config = make_config("neox", changes={"num_attention_heads": 2, "rotary_pct": 0.125})
    family, _, graph = parse_config(config)
    order = family.sources(graph)["layers.0.attention.k.weight"].order
    assert order is not None and order.block == 3 * 32
    assert order.rows[:3] == (32, 33, 36) and order.rows[16:19] == (34, 35, 50)  # 4 dimensions turn: 0 with 2, 1 with 3
    assert family.sources(graph)["layers.0.attention.v.bias"].stored((64,)) == (192,)


def test_phi3_has_fused_projections_and_its_v_the_last_rows() -> None:
    sources = PHI3.sources(parse_config(make_config("phi3")).graph)
    assert sources["layers.1.attention.v.weight"].rows == (96, 128, 128)  # after 4 heads of q and 2 of k
    assert sources["layers.1.attention.v.weight"].name == "layers.1.self_attn.qkv_proj.weight"
    assert sources["layers.1.mlp.up.weight"].rows == (96, 192, 192)
    assert sources["layers.1.attention.v.weight"].stored((32, 64)) == (128, 64)


def test_attn_factor_multiplies_the_usual_factor() -> None:
    """As vLLM and llama.cpp do; transformers does not read it. DeepSeek-R1-0528-Qwen3-8B has one, which makes it 1."""
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    found = scaling(parse("yarn", rope_scaling=values | {"attn_factor": 0.8782488562869419}))
    assert isinstance(found, YarnScaling) and math.isclose(found.attention_factor, 1.0)


def test_the_old_spelling_wins_as_in_transformers() -> None:
    both = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
    values = make_config("dynamic") | both
    assert theirs_of(values).rope_parameters["rope_type"] == "dynamic"
    assert scaling(parse_config(values).config) == DynamicScaling(4.0, 128)


def test_the_base_inside_the_scaling_overrules_the_one_beside_it() -> None:
    inside = parse("llama2", rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0, "factor": 1})
    assert inside.positions == Rope(7.0)
    assert parse("smollm3", rope_theta=None).positions == Rope(2000000.0)  # transformers' default_theta


def test_biases_follow_the_architecture() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.out_bias, config.mlp_bias

    assert biases(parse("gpt2")) == (True, True, True)
    assert biases(parse("llama2")) == (False, False, False)
    assert biases(parse("llama2", attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(parse("qwen2")) == (True, False, False)
    assert biases(parse("qwen3", attention_bias=True)) == (True, True, False)


def test_silent_configs_take_the_defaults_of_their_architecture() -> None:
    assert parse("gpt2").tied_head
    assert parse("gpt2").mlp_width == 4 * 64
    assert parse("smollm3", tie_word_embeddings=None).tied_head
    assert not parse("llama2", tie_word_embeddings=None).tied_head
    assert parse("qwen3", head_dim=None).head_size == 128
    assert parse("llama2", head_dim=None).head_size == 16
    assert parse("llama2", num_key_value_heads=None).kv_heads == 4
    assert parse("llama2", rms_norm_eps=None).norm_eps == 1e-6
    assert parse("llama2", torch_dtype="torch.bfloat16").dtype == "bfloat16"


def test_a_config_without_architectures_goes_by_its_model_type() -> None:
    assert parse("gpt2", architectures=None).architecture == "GPT2LMHeadModel"
    assert parse("qwen3", architectures=[]).architecture == "Qwen3ForCausalLM"


def test_heads_share_evenly() -> None:
    assert parse("llama2", num_key_value_heads=2).group == 2
    assert "64 cannot be divided into 5 heads" in refusal("llama2", num_attention_heads=5, num_key_value_heads=5)
    assert "64 cannot be divided into 5 heads" in refusal("gpt2", n_head=5)
    assert "4 query heads cannot share 3" in refusal("llama2", num_key_value_heads=3)
    assert "4 query heads cannot share 8" in refusal("llama2", num_key_value_heads=8)


# Values out of range, and arithmetic that we lack.
REFUSED: dict[str, dict[str, list[object]]] = {
    "llama2": {
        "num_key_value_heads": [0], "num_hidden_layers": [10**9, 0, True, 2.0], "hidden_size": ["64", None],
        "vocab_size": [-1], "head_dim": [-2], "rms_norm_eps": [0, float("nan"), 10**400], "num_experts": [8],
        "rope_theta": [0, float("inf"), False], "tie_word_embeddings": [1], "hidden_act": [["silu"], "gelu_10"],
        "sliding_window": [4096], "partial_rotary_factor": [0.5], "rope_interleaved": [True], "logits_scaling": [8.0],
        "quantization_config": [{"quant_method": "gptq"}], "rope_scaling": [{"type": "longrope", "factor": 4.0}],
    },
    "mistral": {"sliding_window": [0, -1], "attention_bias": [True], "layer_types": [["full_attention"] * 3]},
    "smollm3": {"no_rope_layer_interval": [0], "no_rope_layers": [[1, 1, 2, 1], [1]]},
    "qwen2": {
        "layer_types": [["full_attention"], ["chunked_attention"] * 4, ["sliding_attention"] * 4],
        "mlp_bias": [True], "attention_bias": [False], "use_mrope": [True],
    },
    "qwen3": {"no_rope_layers": [[1, 1, 1, 0]]},
    "gpt2": {
        "n_layer": [1 << 40], "n_embd": [1 << 60], "scale_attn_by_inverse_layer_idx": [True],
        "scale_attn_weights": [False], "add_cross_attention": [True], "activation_function": ["mish"],
        "is_encoder_decoder": [True], "pruned_heads": [{"0": [1]}],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_cannot_be_had_is_refused_by_name(kind: str) -> None:
    for key, values in REFUSED[kind].items():
        for value in values:
            assert key in refusal(kind, **{key: value}), value


ROPE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "linear"}, "factor is missing"),
    ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
    ({"rope_type": "linear", "factor": 1e300}, "context of"),
    ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}, "make them equal"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "keep the right one"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
    ({"rope_type": "default", "factor": 2.0}, "factor"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast"),
    ({"rope_type": "yarn", "factor": True}, "factor must be a number"),
    ({"rope_type": ["yarn"]}, "rope_type must be a text"),
    ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ({"full_attention": {"rope_type": "default"}}, "full_attention"),
]


@pytest.mark.parametrize(("values", "words"), ROPE_ERRORS)
def test_damaged_scalings_are_refused(values: dict[str, Any], words: str) -> None:
    assert words in refusal("llama2", rope_scaling=values)


def test_a_scaling_that_is_no_object_and_heads_that_cannot_turn_are_refused() -> None:
    assert "must be an object" in refusal("llama2", rope_scaling="linear")
    assert "a head has 15" in refusal("llama2", head_dim=15)
    assert "a head has 2" in refusal("dynamic", head_dim=2)


def test_unknown_architectures_are_refused_with_those_that_run() -> None:
    message = refusal("llama2", architectures=["DeepseekV4ForCausalLM"])
    assert "DeepseekV4ForCausalLM" in message
    assert "LlamaForCausalLM" in message
    assert "model_type 'rwkv'" in refusal("llama2", architectures=None, model_type="rwkv")
    assert "does not belong" in refusal("llama2", model_type="phi3")
    assert parse("deepseek3", model_type="kimi_k2").architecture == "DeepseekV3ForCausalLM"
    for several in (["LlamaModel", "LlamaForCausalLM"], ["LLaMAForCausalLM"], ["LlamaModel"]):
        assert parse("llama2", architectures=several).architecture == "LlamaForCausalLM"
    assert "a list of names" in refusal("llama2", architectures="LlamaForCausalLM")
    assert "a list of names" in refusal("llama2", architectures=[3])


def test_unknown_keys_are_refused_and_harmless_ones_pass() -> None:
    message = refusal("llama2", embedding_gain=12.0)
    assert "embedding_gain = 12.0" in message
    assert "remove it" in message
    assert "3 more" in refusal("llama2", **{f"new_key_{i}": i + 1 for i in range(8)})
    harmless = {
        "license": "apache-2.0",
        "model_name": "x",
        "auto_map": {"AutoModel": "evil.py"},
        "_private": 1,
        "attention_dropout": 0.1,
        "future": None,
    }
    assert parse("llama2", **harmless) == parse("llama2")


@pytest.mark.parametrize("key", ["max_sequence_length", "model_max_length", "seq_length", "max_seq_len"])
def test_a_key_that_repeats_the_context_must_agree_with_it(key: str) -> None:
    for kind, contexts in (("llama2", [512]), ("gpt2", [512]), ("linear", [128, 512]), ("qwen2", [512])):
        for context in contexts:  # under a scaling, with it or without
            assert parse(kind, **{key: context}) == parse(kind)
        message = refusal(kind, **{key: 256})
        assert f"{key} is 256" in message
        assert f"context is {contexts[0]}" in message
    assert f"{key} must be a whole number" in refusal("llama2", **{key: "512"})


def test_a_config_that_names_no_architecture_says_so() -> None:
    message = refusal("llama2", architectures=None, model_type=None)
    assert "it names no architecture" in message


def test_messages_stay_short_and_printable() -> None:
    message = refusal("llama2", bad="\x1b[2J" + "x" * 10_000)
    assert "\x1b" not in message
    assert len(message) < 400
    assert "num_hidden_layers" in refusal("llama2", num_hidden_layers=10**4000)


def test_gpt2_keeps_q_k_and_v_in_one_transposed_tensor() -> None:
    sources = GPT2.sources(parse_config(make_config("gpt2")).graph)
    assert sources["layers.2.attention.v.weight"] == TensorSource("h.2.attn.c_attn.weight", True, True, (128, 192, 192))
    assert sources["layers.2.attention.v.bias"] == TensorSource("h.2.attn.c_attn.bias", False, True, (128, 192, 192))
    assert sources["layers.2.attention.v.weight"].stored((64, 64)) == (64, 192)
    assert sources["layers.2.attention.v.bias"].stored((64,)) == (192,)
    assert sources["layers.0.mlp.up.weight"].stored((256, 64)) == (64, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_a_place(kind: str) -> None:
    family, _, graph = parse_config(make_config(kind, changes={"tie_word_embeddings": False}))
    sources = family.sources(graph)
    assert sources.keys() == graph.shapes.keys()
    assert sources["head.weight"] == TensorSource("embed_out.weight" if "neox" in kind else "lm_head.weight")


def test_buffers_are_inert_and_weights_are_not() -> None:
    assert GPT2.inert.fullmatch("h.11.attn.bias")
    assert GPT2.inert.fullmatch("h.0.attn.masked_bias")
    assert not GPT2.inert.fullmatch("h.0.attn.c_attn.bias")
    for name in ("layers.3.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached"):
        assert LLAMA.inert_in(name, parse("llama2"))
    assert not LLAMA.inert.fullmatch("layers.3.self_attn.q_proj.bias")


ODD: list[Any] = [0, -1, True, None, "x", "", [], {}, [None], {"a": 1}, 1e308, float("nan"), 10**30, 0.5, [[]]]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "yarn", "dynamic", "qwen2-window", "smollm3"])
def test_an_odd_value_anywhere_is_read_or_refused_but_never_a_crash(kind: str) -> None:
    for key in make_config(kind):
        for value in ODD:
            with contextlib.suppress(CheckpointError):
                assert parse_config(make_config(kind) | {key: value}).graph.parameters > 0
    scaled = make_config(kind).get("rope_scaling") or {}
    for key in [*scaled, "mscale", "mscale_all_dim", "attention_factor", "truncate", "beta_fast", "beta_slow"]:
        for value in ODD:
            with contextlib.suppress(CheckpointError):
                changed = make_config(kind) | {"rope_scaling": {**scaled, key: value}}
                assert parse_config(changed).graph.parameters > 0


def test_minicpm_has_the_arithmetic_of_granite() -> None:
    minicpm = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "max_position_embeddings": 4096}
    sizes = {"hidden_size": 2304, "num_attention_heads": 36, "num_key_value_heads": 36, "num_hidden_layers": 40}
    granite = {
        "attention_multiplier": 64**-0.5,
        "embedding_multiplier": 12.0,
        "logits_scaling": 9.0,
        "max_position_embeddings": 4096,
        "residual_multiplier": 1.4 / 40**0.5,
    }
    plain = {key: value for key, value in make_config("llama2").items() if key != "tie_word_embeddings"}
    names = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
    ours = parse_config(plain | names | minicpm | sizes).graph
    theirs = parse_config(make_config("granite") | granite | sizes | {"rope_theta": 10000.0}).graph
    assert (ours.embed, ours.head) == (theirs.embed, theirs.head)
    assert ours.blocks == theirs.blocks
    with pytest.raises(CheckpointError, match="attention to chosen blocks"):
        parse_config(plain | names | minicpm | sizes | {"sparse_config": {"topk": 64}})


_FACTORS = ("scale_emb", "scale_depth", "dim_model_base")


def test_older_families_mean_what_they_mean_to_transformers() -> None:
    neo = {**plain_model("gpt_neo"), "attention_layers": None, "num_layers": 4, "attention_types": None}
    assert parse_config(neo | {"attention_types": [[["global", "local"], 2]]}) == parse_config(neo)
    for other in ([[["global"], 4]], [["global", 3]], [[["global"], "3"]], "global"):
        with pytest.raises(CheckpointError, match="attention_types"):
            parse_config(neo | {"attention_types": other})
    wide = {**plain_model("gptj"), "n_embd": 1024, "n_head": 8, "rotary_dim": None}
    positions = parse_config(wide).config.positions
    assert isinstance(positions, Rope) and positions.rotated == theirs_of(wide | {"rotary_dim": 64}).rotary_dim
    small = {key: one for key, one in plain_model("minicpm3").items() if key not in _FACTORS}
    for given in ({}, dict.fromkeys(_FACTORS[1:])):
        scales, theirs = parse_config(small | given).config.scales, theirs_of(small | given)
        assert scales.embedding == theirs.scale_emb
        assert scales.residual == pytest.approx(theirs.scale_depth / theirs.num_hidden_layers**0.5)
        assert scales.logits == pytest.approx(1 / theirs.logits_scaling)


def test_no_model_without_its_last_norm_is_run() -> None:
    with pytest.raises(CheckpointError, match="_remove_final_layer_norm"):
        parse_config(plain_model("opt") | {"_remove_final_layer_norm": True})
