"""Remarks on a plan: its context and windows, and the formats of weights and cache."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenwright.backends.layout import format_of
from tokenwright.cache.codec import GROUP
from tokenwright.models.experts import Experts

if TYPE_CHECKING:
    from tokenwright.planner.figures import Plan


def remarks_on(plan: "Plan") -> Iterator[str]:
    yield from plan.blueprint.remarks
    yield from _lengths(plan)
    if plan.weights.quantised and not plan.blueprint.kept:
        finer = format_of("embed", plan.weights)
        embeddings = "" if finer == plan.weights else f", but embeddings and head as {finer}"
        mixed = any(isinstance(op, Experts) for one in plan.graph.blocks for op in one.parts)
        routers = ", routers in float32" if mixed else ""
        yield (
            f"{plan.weights} weights: matrices along their input {_grouped(plan.weights.group)}{embeddings}; norms, "
            f"biases and positions in float32{routers}"
        )
    yield from _formats(plan)
    mixtures = [op for one in plan.graph.blocks for op in one.parts if isinstance(op, Experts)]
    for op in mixtures[:1]:
        yield (
            f"a token meets {op.chosen} of {op.experts} experts in a layer; a step of {plan.batch:,} is "
            f"taken to read {op.experts_met(plan.batch)}, as if each were as likely"
        )


def _lengths(plan: "Plan") -> Iterator[str]:
    own = plan.graph.context
    if plan.endless:
        yield "a text may go on without end: with a window on every layer its cache stops growing, whatever the context"
        if plan.window is not None and plan.window > own:
            yield f"a window of {plan.window:,} tokens is more than the model's context of {own:,}"
    elif plan.context > own:
        yield f"{plan.context:,} tokens are more than the model's context of {own:,}"
    if any(window.tokens_read(plan.context - 1, plan.context) < plan.context for window in plan.attention_windows):
        yield "pages outside the window are freed and reused while the text is generated"
    if plan.sinks:
        stay = "token stays" if plan.sinks == 1 else f"{plan.sinks:,} tokens stay"
        yield f"sinks: the first {stay} visible to every layer with a window, in addition to it"


def _grouped(group: int) -> str:
    return f"in groups of {group}, each with a float16 scale"


def _formats(plan: "Plan") -> Iterator[str]:
    scaled = [codec for codec in (plan.k, plan.v) if codec.group]
    if scaled:
        names = " and ".join(dict.fromkeys(codec.name for codec in scaled))
        yield f"{names} cache: each token and head {_grouped(GROUP)}"
    if plan.kept_native:
        yield f"in {plan.native} all the same: {', and '.join(plan.kept_native)}"
    if plan.kv_bytes(plan.context) < plan.kv_bytes_per_sequence:
        yield (
            f"at {plan.context:,} tokens a sequence keeps {plan.kv_bytes(plan.context):,} bytes; the memory counts the "
            "most on the way there, before the first pages expire"
        )
