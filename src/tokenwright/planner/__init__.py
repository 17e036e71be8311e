"""The memory and the time of a model before it is loaded, from its config.json alone.

    from tokenwright import plan

    found = plan("meta-llama/Llama-3.1-8B", context="128k", kv="int4", memory="24GB")
    print(found.kv_bytes_total, found.fits)

`known.py` has models' published shapes, `find.py` goes from a name to a blueprint, `blueprint.py` says what a model is
as far as sizes go, `resident.py` counts what a sequence keeps of its K and V, `figures.py` has the formulas,
`remarks.py` the words, `bandwidth.py` the one measurement.
"""

from pathlib import Path

from tokenwright.cache.spec import Latent
from tokenwright.config import KVFormat, WeightFormat
from tokenwright.errors import RequestError
from tokenwright.planner.bandwidth import Bandwidth, measure
from tokenwright.planner.blueprint import Blueprint, Layer
from tokenwright.planner.figures import Plan, native_dtype
from tokenwright.planner.find import find
from tokenwright.planner.resident import specs_of
from tokenwright.planner.units import Size, read_bytes, read_count, read_rate, read_tokens

__all__ = ["Bandwidth", "Blueprint", "Layer", "Plan", "plan"]


def plan(
    model: str | Path = "stories",
    *,
    context: Size | None = None,
    batch: int = 1,
    kv: str | KVFormat = "native",
    weights: str | WeightFormat = "native",
    window: Size | None = None,
    sinks: int = 0,
    memory: Size | None = None,
    bandwidth: Size | None = None,
) -> Plan:
    """What a model takes in memory, and what its steps cost, without loading it.

    model: a known name ("llama-3.1-8b"), a folder, a config.json, a hub name, or "stories".
    context: tokens of each sequence, 8192 or "8k"; by default all that the model has. batch: sequences at once.
    kv: how K and V are kept, as LLM takes it: float32, bfloat16, float16, fp8, int8 or int4, or "k=int8,v=int4"; after
        it first=64 keeps the first tokens native, native=0+-1 these layers. native is the dtype of the weights, and of
        quantised weights the checkpoint's. weights: how matrices are kept, as LLM takes it: a dtype, int8 or int4, or
        with its group, such as int8:32; native is the checkpoint's dtype, and of a quantised folder its format.
    window: the most tokens that any layer reaches back, itself included; what is behind is let go. sinks: first tokens
        that stay in reach all the same. memory: bytes, "24GB" (10^9) or "24GiB" (2^30).
    bandwidth: bytes per second, "30GB/s", or "measured" to measure this machine's (a third of a second).

    Raises CheckpointError for a model that cannot be found or understood, RequestError for an option out of range or
    without a meaning for the model, where LLM would raise it too.
    """
    tokens = None if context is None else read_tokens(context, "context")
    limit = None if window is None else read_tokens(window, "window")
    room = None if memory is None else read_bytes(memory, "memory")
    sequences = read_count(batch, "batch")
    form = kv if isinstance(kv, KVFormat) else KVFormat.parse(kv)
    wanted = weights if isinstance(weights, WeightFormat) else WeightFormat.parse(weights)
    given = None if bandwidth in (None, "measured") else Bandwidth(read_rate(bandwidth, "bandwidth"), "given", "")
    name, shape = find(model)
    if shape.packed is not None and wanted not in (shape.packed, WeightFormat("native")):
        raise RequestError(f"the weights of {name} are kept as {shape.packed}; leave weights out")
    stored = (shape.packed or wanted).resolved(shape.dtype)
    specs = specs_of(shape, native_dtype(shape, stored), form, limit, sinks)
    latents = [isinstance(layer.layout, Latent) for layer in shape.layers]
    if any(latent and spec.k != spec.v for latent, spec in zip(latents, specs, strict=True)):
        raise RequestError(f"{name} keeps one latent for K and V together; give one kv format, not {str(form)!r}")
    speed = measure() if bandwidth == "measured" else given
    return Plan(name, shape, tokens or shape.context, sequences, form, stored, specs, limit, sinks, room, speed)
