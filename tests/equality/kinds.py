"""The kinds of models that the equality matrix is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.models.random_models import aria, cohere_compass, lara_mini, mellum, nanochat

WINDOW, SINKS = 20, 3
# What a kind keeps of a text: all of it, a window, layers with and without a window, or states. Ways differ by this.
ALL_OF_IT, WINDOWED, BOTH, STATES = "all", "window", "both", "states"


Maker = Callable[[Random], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A model and its reach. `fixture` and `changes` make the checkpoint; window and sinks are the engine's.

    A fixture is a kind of the small checkpoints, an architecture of `PLAIN`, or a maker of configurations.
    """

    fixture: str | Maker
    changes: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    sinks: int = 0
    keeps: str = ALL_OF_IT


TWO = {"num_hidden_layers": 2}  # where all layers are of one kind: the least that can be mistaken for one another
CUT = {"sliding_window": WINDOW}
# Heads of two sizes, keys and values of one projection, experts beside the MLP.
FULLER: dict[str, Any] = CUT | {
    "attention_k_eq_v": True, "enable_moe_block": True, "hidden_size_per_layer_input": 0, "moe_intermediate_size": 32,
    "num_experts": 6, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "top_k_experts": 2,
}  # fmt: skip
SINKED: dict[str, Any] = {"window": WINDOW, "sinks": SINKS, "keeps": WINDOWED}

KINDS = {
    "MHA": Kind("llama2", TWO),
    "GQA": Kind("qwen2", TWO),
    "MQA": Kind("tinyllama", TWO),
    "window": Kind("mistral", TWO | CUT, keeps=WINDOWED),
    "window + sinks": Kind("qwen2", TWO, **SINKED),
    "hybrid": Kind("qwen2-window", CUT, keeps=BOTH),
    "scales": Kind("granite", TWO),
    "norms after": Kind("olmo2", TWO),
    "experts": Kind("qwen3-moe", TWO),
    "shared expert": Kind("qwen2-moe", TWO),
    "learned logits": Kind("gpt-oss", CUT | {"rope_scaling": {"rope_type": "default"}}, keeps=BOTH),
    "LayerNorm": Kind("starcoder2", TWO | CUT, keeps=WINDOWED),
    "soft caps": Kind("gemma2", CUT, keeps=BOTH),
    "two rotations + sinks": Kind("gemma3", **SINKED),
    "shared keys and values": Kind("gemma4", CUT, keeps=BOTH),
    "values from keys": Kind("gemma4", FULLER, keeps=BOTH),
    "residual streams": Kind("gemma3n", CUT, keeps=BOTH),
    "side by side": Kind("neox", TWO),
    "latent": Kind("deepseek2"),
    "short convolutions": Kind("lfm2", keeps=STATES),
    "delta rules": Kind("qwen3-next", keeps=STATES),
    "state spaces": Kind("granite4", keeps=STATES),
    "states alone": Kind("mamba2", keeps=STATES),
    "state spaces beside": Kind("falcon-h1", keeps=STATES),
    "states by key": Kind("kimi-linear", keeps=STATES),
    "layers of one op": Kind("nemotron-h", keeps=STATES),
    "selective scans": Kind("jamba", keeps=STATES),
    "clipped + sinks": Kind("olmoe", TWO, **SINKED),
    "latent + sinks": Kind("deepseek3", **SINKED),
}
# Whose ops are those above with other facts: each meets every format, and all of them together every way.
NEWEST = {
    "one gate a number": Kind("afmoe", keeps=BOTH),
    "learned activation": Kind("apertus"),
    "norms behind the rotation": Kind(nanochat),
    "clipped projections": Kind("olmo"),
    "sigmoid experts": Kind("hy_v3"),
    "experts beside shared ones": Kind(aria),
    "experts behind windows": Kind(mellum, keeps=BOTH),
    "logits of heads": Kind("granite_swa", keeps=BOTH),
    "rotation by layer": Kind(cohere_compass, keeps=BOTH),
    "states beside windows": Kind(lara_mini, keeps=STATES),
}
ALL_KINDS = KINDS | NEWEST
