"""Shared by the checks: a small model with random weights, and engines that do the same steps side by side."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import tokenwright
from tokenwright.text import Tokenizer

from .cell import Hint

STORIES = Path(tokenwright.__file__).parent / "stories"
LIMIT = 200  # steps after which an engine that ends nothing is stopped


@cache
def _weights() -> dict[str, np.ndarray]:
    """Two layers, width 16, 4 query heads over 2 KV heads, 32 ids: attention with peaks."""
    draw = np.random.default_rng(1)
    shapes = {"embed_tokens": (32, 16), "norm": (16,)}
    for n in range(2):
        attention = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
        shapes |= {f"layers.{n}.self_attn.{name}": shape for name, shape in attention.items()}
        mlp = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
        shapes |= {f"layers.{n}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"layers.{n}.{name}": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
    weights = {name: draw.normal(0, 0.6, shape).astype("f4") for name, shape in shapes.items()}
    return weights | {"lm_head": weights["embed_tokens"]}


def small(file: Any) -> Any:
    """A model of the file's class."""
    model = file.Llama.__new__(file.Llama)
    model.layers, model.kv_heads, model.head_size = ["layers.0", "layers.1"], 2, 4
    model.context, model.eps, model.end_ids = 256, 1e-5, []
    model.frequencies = file.frequencies({}, 4)
    model.weights = _weights()
    return model


@cache
def _read(folder: Path) -> dict[str, Any]:
    from .one_file import original

    return dict(vars(original().Llama(folder)))


def stories(file: Any) -> Any:
    """The bundled model, of the file's class. Its weights are read once. Raises Hint where it is not there."""
    if not (STORIES / "model.safetensors").exists():
        raise Hint("The course needs the small model: choose “Back to the small model” in the menu Share.")
    model = file.Llama.__new__(file.Llama)
    vars(model).update(_read(STORIES))
    return model


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(STORIES)


def steps(engine: Any) -> Iterator[Any]:
    """Runs an engine to its end; yields it after each step. Raises Hint where it computes nothing, or never ends."""
    for _ in range(LIMIT):
        scheduler = engine.scheduler
        if not (scheduler.running or scheduler.waiting):
            return
        before = [(one, len(one.tokens), one.computed) for one in (*scheduler.running, *scheduler.waiting)]
        engine.step()
        yield engine
        after = [(one, len(one.tokens), one.computed) for one in (*scheduler.running, *scheduler.waiting)]
        if after == before:
            raise Hint("A step changed nothing, so the loop would go on for ever: look at when chunks are left out.")
    raise Hint(f"After {LIMIT} steps the texts have not ended.")


def run(engine: Any) -> None:
    for _ in steps(engine):
        pass
