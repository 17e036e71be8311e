"""Figures of the cards from shapes: of the loaded model, and of published ones."""

from tokenwright.cache import layer_specs
from tokenwright.config import Heads
from tokenwright.explorer.learn.challenge import Figures
from tokenwright.explorer.panels.learn import CardFacts
from tokenwright.formats import KVFormat
from tokenwright.llm.llm import LLM
from tokenwright.planner import plan
from tokenwright.planner.figures import KVMemory

PUBLISHED = (
    ("Llama-2-7B", 8192, 1), ("Meta-Llama-3-8B", 8192, 1), ("Meta-Llama-3-8B", 8192, 8),
    ("Llama-3.1-8B", 131_072, 1), ("Llama-3.1-70B", 131_072, 1), ("DeepSeek-V3", 131_072, 1),
)  # fmt: skip


def facts(llm: LLM) -> tuple[CardFacts, ...]:
    return (
        CardFacts("qkv", tuple(_qkv(llm).facts)),
        CardFacts("notebook", tuple(_notebook(llm).facts)),
        CardFacts("savings", tuple(_savings(llm).facts)),
        CardFacts("smaller", tuple(_smaller(llm).facts)),
    )


def _qkv(llm: LLM) -> Figures:
    found, config = Figures(), llm.config
    layouts = [layer.layout for layer in llm.loaded.facts.graph.kv]
    keys = sum(one.kv_heads * one.key_size for one in layouts)
    values = sum(one.kv_heads * one.value_size for one in layouts if isinstance(one, Heads))  # a latent is in its key
    queries = config.heads * config.head_size * config.layers
    found.derived("q_numbers", "Q of one token", queries, "numbers", "L x H x D: made, used, thrown away")
    found.derived("k_numbers", "K of one token", keys, "numbers", "L x G x D: kept")
    found.derived("v_numbers", "V of one token", values, "numbers", "L x G x D: kept")
    found.derived("kv_bytes", "kept for each token", llm.costs.bytes_per_token, "B", "K and V of all layers")
    return found


def _notebook(llm: LLM) -> Figures:
    found, own = Figures(), KVMemory(tuple(llm.specs))
    found.derived("per_token", f"{llm.loaded.facts.name}, one token", llm.costs.bytes_per_token, "B", "sum of 2 G D e")
    most = min(llm.context, llm.config.context)
    found.derived("whole", f"{llm.loaded.facts.name}, {most:,} tokens", own.at(most), "B", "its whole context")
    for name, tokens, batch in PUBLISHED:
        size = plan(name, context=tokens, batch=batch).kv_bytes_total
        label = f"{name}, {tokens:,} tokens" + (f", batch {batch}" if batch > 1 else "")
        found.derived(f"{name} {tokens} {batch}", label, size, "B", "from its config.json, in its own format")
    return found


def _savings(llm: LLM) -> Figures:
    found, costs = Figures(), llm.costs
    matmuls = 2 * (costs.block_weights + costs.head_weights)
    slope = costs.attention_flops(1)
    found.derived("matmuls", "matrix products of a row", matmuls, "FLOP", "2 (P_b + P_lm): the same at every length")
    found.derived("attention", "attention, per token read", slope, "FLOP", "4 H D L")
    if slope:  # a model may have no attention
        equal = round(matmuls / slope)
        found.derived("equal", "attention is as much at t =", equal, "tokens", "the first, divided by the second")
    return found


def _smaller(llm: LLM) -> Figures:
    found, tokens = Figures(), min(llm.context, llm.config.context)
    for kv in ("native", "fp8", "int8", "int4"):
        size = KVMemory(layer_specs(llm.graph, llm.dtype, KVFormat.parse(kv))).at(tokens)
        label = f"{kv} ({llm.dtype})" if kv == "native" else kv
        found.derived(kv, f"{label}, {tokens:,} tokens", size, "B", "K and V of the whole context, scales included")
    if llm.costs.attention_flops(1):  # else no layer has a window
        window = max(1, tokens // 8)
        size = KVMemory(layer_specs(llm.graph, llm.dtype, window=window)).at(tokens)
        found.derived("window", f"native, window of {window:,}", size, "B", "only the last W tokens are kept")
    return found
