"""The memory and the time of a model before it is loaded, from its config.json alone.

    from tokenwright import plan

    found = plan("meta-llama/Llama-3.1-8B", context="128k", kv="int4", memory="24GB")
    print(found.kv_bytes_total, found.fits)

`known.py` has models' published shapes, `find.py` goes from a name to a blueprint, `blueprint.py` says what a model is
as far as sizes go, `figures.py` has the formulas, `bandwidth.py` the one measurement.
"""

from collections.abc import Mapping
from pathlib import Path

from tokenwright.cache.codec import CODECS, NATIVE, Codec
from tokenwright.cache.spec import Latent
from tokenwright.errors import RequestError
from tokenwright.planner.bandwidth import Bandwidth, measure
from tokenwright.planner.blueprint import Blueprint, Layer
from tokenwright.planner.figures import Plan
from tokenwright.planner.find import find
from tokenwright.planner.units import Size, read_bytes, read_count, read_kv, read_rate, read_tokens

__all__ = ["Bandwidth", "Blueprint", "Layer", "Plan", "plan"]

WEIGHTS = {name: codec for name, codec in CODECS.items() if name != "fp8"}  # fp8 files scale by blocks of their own


def plan(
    model: str | Path = "stories",
    *,
    context: Size | None = None,
    batch: int = 1,
    kv: str = "native",
    weights: str = "native",
    window: Size | None = None,
    memory: Size | None = None,
    bandwidth: Size | None = None,
) -> Plan:
    """What a model takes in memory, and what its steps cost, without loading it.

    model: a known name ("llama-3.1-8b"), a folder, a config.json, a hub name, or "stories".
    context: tokens of each sequence, 8192 or "8k"; by default all that the model has. batch: sequences at once.
    kv: float32, bfloat16, float16, fp8, int8 or int4, or "k=int8,v=int4"; native is the dtype of the weights, and of
        quantised weights the checkpoint's. weights: a dtype, int8 or int4; native is the checkpoint's dtype.
    window: the most tokens that any layer reaches back. memory: bytes, "24GB" (10^9) or "24GiB" (2^30).
    bandwidth: bytes per second, "30GB/s", or "measured" to measure this machine's (a third of a second).

    Raises CheckpointError for a model that cannot be found or understood, RequestError for an option out of range.
    """
    tokens = None if context is None else read_tokens(context, "context")
    reach = None if window is None else read_tokens(window, "window")
    room = None if memory is None else read_bytes(memory, "memory")
    sequences = read_count(batch, "batch")
    sides = {side: _known(name, CODECS, "kv") for side, name in read_kv(kv).items()}
    chosen = _known(weights, WEIGHTS, "weights")
    given = None if bandwidth in (None, "measured") else Bandwidth(read_rate(bandwidth, "bandwidth"), "given", "")
    name, blueprint = find(model)
    stored = CODECS[blueprint.dtype]
    native = chosen if chosen and chosen.name in NATIVE else stored
    k, v = (sides[side] or native for side in ("k", "v"))
    if k != v and any(isinstance(layer.layout, Latent) for layer in blueprint.layers):
        raise RequestError(f"{name} keeps one latent for K and V together; give one kv format, not {kv!r}")
    speed = measure() if bandwidth == "measured" else given
    return Plan(name, blueprint, tokens or blueprint.context, sequences, k, v, chosen or stored, reach, room, speed)


def _known(name: str, codecs: Mapping[str, Codec], option: str) -> Codec | None:
    """The codec of that name; None for native, which depends on the model."""
    if name not in codecs and name != "native":
        raise RequestError(f"{option} {name!r} is not known; use native, {', '.join(codecs)}")
    return codecs.get(name)
