"""The cost of a run, as one line and as JSON, in the engine's numbers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.outputs import Completion, Usage


ENDED: Mapping[str, str] = {  # finish reasons in words
    "eos": "the model ended it",
    "stop": "ended at a stop string",
    "stop_id": "ended at a stop token",
    "grammar": "the grammar is complete",
    "length": "ended by -n",
    "time": "ended by --max-seconds",
    "context": "the context is full",
    "aborted": "interrupted",
}


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def facts(llm: "LLM", completion: "Completion") -> dict[str, Any]:
    def named(*names: str) -> dict[str, Any]:
        return {name: getattr(completion.usage, name) for name in names}

    return {
        **named("prompt_tokens"), "generated_tokens": _written(completion),
        **named("ttft_s", "total_s", "tokens_per_second", "kv_bytes", "forward_tokens", "layer_tokens"),
        **named("reused_tokens", "disk_tokens", "drafted_tokens", "accepted_tokens", "preemptions", "seed"),
        "dtype": llm.dtype, "weights": str(llm.weights), "weight_bytes": llm.weight_bytes, "kv": llm.kv_format,
        "device": llm.device, "kernels": llm.kernels,
    }  # fmt: skip


def rate(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def facts_line(llm: "LLM", completion: "Completion") -> str:
    usage = completion.usage
    parts = [f"{usage.prompt_tokens:,} prompt + {_written(completion):,} generated tokens"]
    if usage.ttft_s is not None:
        parts.append(f"first token after {seconds(usage.ttft_s)}")
    if usage.tokens_per_second:
        parts.append(f"{rate(usage.tokens_per_second)} tok/s")
    if usage.reused_tokens:
        parts.append(f"{usage.reused_tokens:,} tokens reused{from_disk(usage)}")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens:,} of {usage.drafted_tokens:,} drafts kept")
    parts += [
        f"weights {binary(llm.weight_bytes)} ({llm.weights})",
        f"KV cache {binary(usage.kv_bytes)}",
        f"{llm.dtype} on {llm.device} ({llm.kernels} kernels)",
    ]
    if usage.seed is not None:
        parts.append(f"seed {usage.seed}")
    return " · ".join([*parts, ENDED[str(completion.finish_reason)]])


def from_disk(usage: "Usage") -> str:
    return f" ({usage.disk_tokens:,} from the disk)" if usage.disk_tokens else ""


def _written(completion: "Completion") -> int:
    return sum(len(one.token_ids) for one in completion.choices)


def memory_line(llm: "LLM") -> str:
    pool = llm.engine.pool
    pages = " + ".join(f"{group.pages:,}" for group in pool.groups)
    return f"KV cache: {pages} pages of {pool.page_size} tokens, {binary(llm.kv_memory)} ({llm.kv_format})"


def phases_line(completion: "Completion", phases: Mapping[str, float]) -> str:
    usage = completion.usage
    names = {"imports": "imports_s", "load": "load_s", "tokenise and submit": "request_s"}
    parts = [f"{name} {seconds(phases[key])}" for name, key in names.items()]
    if usage.ttft_s is not None:
        computed, prefill = usage.prompt_tokens - usage.reused_tokens, usage.ttft_s - usage.queue_s
        speed = f" ({rate(computed / prefill)} tok/s)" if prefill > 0 else ""
        parts += [f"wait {seconds(usage.queue_s)}", f"prefill of {computed:,} tokens {seconds(prefill)}{speed}"]
        parts.append(f"decode of {usage.completion_tokens - 1:,} tokens {seconds(usage.total_s - usage.ttft_s)}")
    return " · ".join(parts)
