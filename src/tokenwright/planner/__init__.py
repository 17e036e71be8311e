"""Plans the memory and time of a model before it is loaded, from its config.json.

from tokenwright import plan

found = plan("meta-llama/Llama-3.1-8B", context="128k", kv="int4", memory="24GB")
print(found.kv_bytes_total, found.fits)
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenwright.backends.device import free_memory, resolve_device
from tokenwright.cache import layer_specs
from tokenwright.checks import folders
from tokenwright.environment import Environment
from tokenwright.errors import RequestError
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.models.combined import mixtures
from tokenwright.planner.bandwidth import Bandwidth, measure, measure_disk
from tokenwright.planner.figures import Plan, native_dtype
from tokenwright.planner.find import Blueprint, adapter_bytes, find
from tokenwright.units import Size, read_bytes, read_count, read_rate, read_tokens

__all__ = ["Bandwidth", "Blueprint", "Plan", "plan", "plan_of"]


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
    adapters: str | Path | Sequence[str | Path] = (),
    expert_memory: Size | None = None,
    gpu_memory: Size | None = None,
) -> Plan:
    """Plan the memory of a model and the cost of its steps, without loading it.

    model: a known name ("llama-3.1-8b"), a folder, a config.json, a hub name, or "stories".
    context: tokens of each sequence, 8192 or "8k"; default: the model's. batch: sequences at once.
    kv, weights: formats as in LLM; native: as the checkpoint has them. adapters: folders of LoRA adapters, or one.
    window: most tokens of every attention window, the row included. sinks: first tokens that stay visible.
    memory: bytes, "24GB" (10^9), "24GiB" (2^30), or "here": free on the device that LLM would take.
    expert_memory: bytes for the experts of a mixture, as in LLM; the disk's rate is measured.
    gpu_memory: bytes of a card; the plan says how many layers fit, for `gpu_layers` in LLM.
    bandwidth: bytes per second, "30GB/s", or "measured" on this machine (a third of a second).

    Raises CheckpointError for a model that it cannot find or read, RequestError for an option as LLM does.
    """
    room = _here() if memory == "here" else None if memory is None else read_bytes(memory, "memory")
    given = None if bandwidth in (None, "measured") else Bandwidth(read_rate(bandwidth, "bandwidth"), "given", "")
    folders_of_adapters = folders("adapters", adapters)
    found = plan_of(*find(model), context, batch, kv, weights, window, sinks)
    if expert_memory is not None:
        held, ops = read_bytes(expert_memory, "expert_memory"), mixtures(found.graph)
        if not ops:
            raise RequestError(f"expert_memory is for mixtures of experts, which {found.model} is not", "expert_memory")
        folder = Environment.read().cache_folder("weights")
        folder.mkdir(parents=True, exist_ok=True)
        disk = measure_disk(folder, found.expert_bytes // sum(op.experts for op in ops))
        found = replace(found, expert_memory=held, disk=disk)
    sizes = tuple(adapter_bytes(found.graph, Path(folder)) for folder in folders_of_adapters)
    if gpu_memory is not None:
        found = replace(found, gpu_memory=read_bytes(gpu_memory, "gpu_memory"))
    return replace(found, memory=room, bandwidth=measure() if bandwidth == "measured" else given, adapters=sizes)


def plan_of(
    name: str,
    found: Blueprint,
    context: Size | None = None,
    batch: int = 1,
    kv: str | KVFormat = "native",
    weights: str | WeightFormat = "native",
    window: Size | None = None,
    sinks: int = 0,
) -> Plan:
    tokens = None if context is None else read_tokens(context, "context")
    limit = None if window is None else read_tokens(window, "window")
    sequences = read_count(batch, "batch")
    form = kv if isinstance(kv, KVFormat) else KVFormat.parse(kv)
    wanted = weights if isinstance(weights, WeightFormat) else WeightFormat.parse(weights)
    if found.packed is not None and wanted not in (found.packed, WeightFormat("native")):
        raise RequestError(f"{name} is kept as {found.packed}; leave weights out", "weights")
    if found.main is not None and wanted == WeightFormat("native"):
        stored = found.main
    else:
        found, stored = replace(found, kept={}), (found.packed or wanted).resolved(found.dtype)
    specs = layer_specs(found.graph, native_dtype(found, stored), form, limit, sinks)
    return Plan(name, found, tokens or found.graph.context, sequences, form, stored, specs, limit, sinks)


def _here() -> int:
    free = free_memory(resolve_device("auto"))
    if free is None:
        raise RequestError("this system does not report its free memory; give memory in bytes, such as 24GB", "memory")
    return free
