"""The calculator: the planner's figures for the loaded model or a known one, and a KV memory that confirms them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI
from pydantic import Field

from tokenwright.config import EngineConfig
from tokenwright.errors import CapacityError, CheckpointError, RequestError
from tokenwright.explorer.messages.calculator import CalculatorCard
from tokenwright.serve.explorer.explorer import HIDDEN, Explorer, Strict
from tokenwright.serve.http.api import reads

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server
    from tokenwright.llm.llm import LLM
    from tokenwright.planner import Bandwidth, Plan

LOADED = "loaded"
MOST_TOKENS = 10**8


class Calculate(Strict):
    """POST /calculate. model: the loaded one, or a known name; weights: "loaded", or a format."""

    model: Annotated[str, Field(max_length=80)] = LOADED
    context: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    batch: Annotated[int, Field(ge=1, le=65536)] = 1
    kv: Annotated[str, Field(max_length=80)] = "native"
    window: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    sinks: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    weights: Annotated[str, Field(max_length=40)] = LOADED
    measure: bool = False  # the memory bandwidth of this machine, once


class Calculator:
    """Plans, and keeps the one measurement that they share."""

    def __init__(self) -> None:
        self._bandwidth: Bandwidth | None = None
        self._lock = threading.Lock()

    def __call__(self, llm: LLM, name: str, wanted: Calculate) -> CalculatorCard:
        """Raises RequestError for a model, a format or a number that cannot be planned."""
        from tokenwright.checkpoints.files.known import KNOWN  # with NumPy

        if wanted.measure:
            self._measure(llm)
        plan = self._plan(llm, name, wanted)
        own = wanted.model == LOADED
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
            loaded_bytes=llm.weight_bytes if own and wanted.weights == LOADED else None,
            total_bytes=plan.total_bytes,
            base_flops=one - slope,
            slope_flops=slope,
            decode_flops=plan.decode_flops,
            decode_bytes=plan.decode_bytes,
            bandwidth=None if plan.bandwidth is None else plan.bandwidth.bytes_per_second,
            tokens_per_s=plan.tokens_per_second,
            exceeds_at=plan.cache_exceeds_weights_at,
        )

    def _measure(self, llm: LLM) -> None:
        from tokenwright.planner.bandwidth import measure  # with NumPy

        with self._lock:
            self._bandwidth = self._bandwidth or measure(llm.device)

    def _plan(self, llm: LLM, name: str, wanted: Calculate) -> Plan:
        from tokenwright.checkpoints.files.known import known_name
        from tokenwright.planner import Blueprint, plan_of  # with NumPy
        from tokenwright.planner.find import find

        weights = "native" if wanted.weights == LOADED else wanted.weights
        if wanted.model == LOADED:
            loaded = llm.loaded
            found = Blueprint(llm.graph, llm.dtype)
            if wanted.weights == LOADED:
                found = replace(found, kept=loaded.copies, main=loaded.weights)
        else:
            known = known_name(wanted.model)
            if known is None:
                raise RequestError(f"model: {wanted.model!r} is not known here; choose one of the list")
            name, found = find(known)
        found_plan = plan_of(name, found, wanted.context, wanted.batch, wanted.kv, weights, wanted.window, wanted.sinks)
        return replace(found_plan, bandwidth=self._bandwidth)


def _allocated(plan: Plan, llm: LLM) -> tuple[int | None, str]:
    """Bytes of a KV memory for the plan, which is allocated and freed at once; or why there is none."""
    from tokenwright.backends.kv_sizing import make_store  # with NumPy

    if plan.hindrances:
        return None, f"this engine {plan.hindrances[0].removeprefix('it ')}"
    options = EngineConfig(pages=plan.engine_pages, max_sequences=plan.batch)
    try:
        store, _ = make_store(plan.specs, options, plan.context, llm.loaded.device)
    except CapacityError as error:
        return None, str(error)
    return sum(array.nbytes for group in range(len(store.groups)) for array in store.arrays(group)), ""


def add(app: FastAPI, explorer: Explorer) -> None:
    """Add the route of the panel Calculator."""
    calculator = Calculator()

    @app.post("/calculate", **HIDDEN)
    def calculate(body: Annotated[Calculate, reads(Calculate)]) -> CalculatorCard:
        try:
            return calculator(explorer.llm, explorer.name, body)
        except CheckpointError as error:
            raise RequestError(str(error)) from error
