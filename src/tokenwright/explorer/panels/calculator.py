"""The calculator: the planner's figures for the loaded model or a known one, and a KV memory that confirms them."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from tokenwright.backends.kv_sizing import make_store
from tokenwright.checkpoints.files.known import KNOWN, known_name
from tokenwright.config import EngineConfig
from tokenwright.errors import CapacityError, CheckpointError, RequestError
from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.explorer import Explorer
from tokenwright.llm.llm import LLM
from tokenwright.trace.wire import COUNTED, DERIVED, MEASURED

if TYPE_CHECKING:
    from tokenwright.planner import Plan

LOADED = "loaded"
MOST_TOKENS = 10**8


@dataclass(frozen=True, slots=True)
class CalculatorCard:
    model: str
    models: tuple[str, ...]  # known ones besides the loaded one
    layers: int
    model_context: int
    context: int
    batch: int
    kv: str  # the planned format of K and V
    weights: str
    kv_per_token: Annotated[int, DERIVED("B", "a token", "sum over layers of 2 G D e")]
    kv_per_sequence: Annotated[int, DERIVED("B", "a sequence", "sum over layers of c min(t, s + W): at this context")]
    kv_total: Annotated[int, DERIVED("B", "the batch", "batch times that of a sequence")]
    kv_allocated: Annotated[
        int | None, COUNTED("B", "allocated", "bytes of a KV memory that was allocated just now, and freed")
    ]
    kv_planned: Annotated[
        int | None, DERIVED("B", "in whole pages", "pages x page size x bytes, and a scratch page in each group")
    ]
    refused: str  # why nothing was allocated
    weight_bytes: Annotated[int, DERIVED("B", "weights", "of all tensors, in this format")]
    loaded_bytes: Annotated[int | None, COUNTED("B", "weights in memory", "of the loaded model as it lies in memory")]
    total_bytes: Annotated[int, DERIVED("B", "together", "weights and the K and V of the batch")]
    base_flops: Annotated[int, DERIVED("FLOP", "without attention", "2 (P_b + P_lm)")]
    slope_flops: Annotated[
        int, DERIVED("FLOP", "for each token read", "4 H D over all layers: A(t) grows by it until windows are full")
    ]
    decode_flops: Annotated[int, DERIVED("FLOP", "a decode step", "2 (P_b + P_lm) + A(t), for the batch")]
    decode_bytes: Annotated[
        int, DERIVED("B", "read by a decode step", "the weights once, and K and V of every sequence")
    ]
    bandwidth: Annotated[
        float | None, MEASURED("B/s", "memory bandwidth", "of this machine: reading a buffer beyond its caches")
    ]
    tokens_per_s: Annotated[
        float | None,
        DERIVED("tok/s", "at most", "batch x bandwidth / bytes read: a model inside the caches can be faster"),
    ]
    exceeds_at: Annotated[
        int | None,
        DERIVED(
            "tokens",
            "exceeds the weights at",
            "the context from which K and V of this batch take more than the weights",
        ),
    ]


MESSAGES = (CalculatorCard,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculate:
    model: Annotated[str, Length(0, 80)] = LOADED  # or a known name
    context: Annotated[int, Between(1, MOST_TOKENS)] | None = None
    batch: Annotated[int, Between(1, 65536)] = 1
    kv: Annotated[str, Length(0, 80)] = "native"
    window: Annotated[int, Between(1, MOST_TOKENS)] | None = None
    sinks: Annotated[int, Between(0, MOST_TOKENS)] = 0
    weights: Annotated[str, Length(0, 40)] = LOADED  # or a format
    measure: bool = False  # memory bandwidth, once


def calculate(explorer: Explorer, body: Calculate) -> CalculatorCard:
    llm = explorer.llm
    try:
        plan = _plan(explorer, body)
    except CheckpointError as error:
        raise RequestError(str(error)) from error
    own = body.model == LOADED
    allocated, refused = _allocated(plan, llm)
    one = plan.costs.chunk(0, 1).flops  # 2 (P_b + P_lm) + A(1)
    slope = plan.costs.attention_flops(1)
    return CalculatorCard(
        model=plan.model,
        models=tuple(key.split("/")[1] for key in KNOWN),
        layers=plan.graph.layers,
        model_context=plan.graph.context,
        context=plan.context,
        batch=plan.batch,
        kv=str(plan.kv),
        weights=str(plan.weights),
        kv_per_token=plan.kv_bytes_per_token,
        kv_per_sequence=plan.kv_bytes_per_sequence,
        kv_total=plan.kv_bytes_total,
        kv_allocated=allocated,
        kv_planned=plan.engine_kv_bytes,
        refused=refused,
        weight_bytes=plan.weight_bytes,
        loaded_bytes=llm.weight_bytes if own and body.weights == LOADED else None,
        total_bytes=plan.total_bytes,
        base_flops=one - slope,
        slope_flops=slope,
        decode_flops=plan.decode_flops,
        decode_bytes=plan.decode_bytes,
        bandwidth=None if plan.bandwidth is None else plan.bandwidth.bytes_per_second,
        tokens_per_s=plan.tokens_per_second,
        exceeds_at=plan.cache_exceeds_weights_at,
    )


def _plan(explorer: Explorer, wanted: Calculate) -> "Plan":
    from tokenwright.planner import Blueprint, plan_of  # a page loads it only if someone plans
    from tokenwright.planner.find import find

    llm, name = explorer.llm, explorer.name
    bandwidth = explorer.bandwidth if wanted.measure else explorer.measured
    weights = "native" if wanted.weights == LOADED else wanted.weights
    if wanted.model == LOADED:
        loaded = llm.loaded
        found = Blueprint(llm.graph, llm.dtype)
        if wanted.weights == LOADED:
            found = replace(found, kept=loaded.copies, main=loaded.facts.weights)
    else:
        known = known_name(wanted.model)
        if known is None:
            raise RequestError(f"model: {wanted.model!r} is not known here; choose one of the list")
        name, found = find(known)
    found_plan = plan_of(name, found, wanted.context, wanted.batch, wanted.kv, weights, wanted.window, wanted.sinks)
    return replace(found_plan, bandwidth=bandwidth)


def _allocated(plan: "Plan", llm: LLM) -> tuple[int | None, str]:
    """Bytes of a KV memory, allocated for the plan and freed at once; or why there is none."""
    if plan.hindrances:
        return None, f"this engine {plan.hindrances[0].removeprefix('it ')}"
    options = EngineConfig(pages=plan.engine_pages, max_sequences=plan.batch)
    try:
        store, _ = make_store(plan.specs, options, plan.context, llm.loaded.facts.device)
    except CapacityError as error:
        return None, str(error)
    return sum(array.nbytes for group in range(len(store.groups)) for array in store.arrays(group)), ""
