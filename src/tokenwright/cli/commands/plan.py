"""`tokenwright plan`: a model's memory and the cost of its steps, only from its config.json."""

import shutil
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tokenwright.checkpoints.files.local import local_config
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.cli.terminal.statistics import rate
from tokenwright.config import Heads, Latent
from tokenwright.formats import KVFormat
from tokenwright.llm.prompts.report import PROMPT_MEMORY
from tokenwright.units import binary, decimal, read_bytes, read_count, read_rate, read_tokens, scaled

if TYPE_CHECKING:
    from tokenwright.planner import Plan

Name = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="A known name (llama-3.1-8b), a config.json, a folder, a GGUF file, a Hugging Face name, or stories.",
        show_default=False,
        autocompletion=opt.model_names,
    ),
]


def _option(panel: str, help_: str, kind: Any = str | None, default: Any = None) -> tuple[Any, Any]:
    return Annotated[kind, Option(help=help_, rich_help_panel=panel, show_default=default is not None)], default


_planned, _machine = partial(_option, "What to plan"), partial(_option, "Machine")
OPTIONS = {
    "context": _planned("Tokens of each sequence, 8192 or 8k (k = 1024); by default the model's context."),
    "batch": _planned("Sequences at once.", int, 1),
    "kv": _planned(opt.HOW_KV, str, "native"),
    "weights": _planned(
        "Format of weight matrices: native, float32, bfloat16, float16, int8, int4; int8:32 sets the group.",
        str,
        "native",
    ),
    "window": _planned("Attention window in tokens, for all layers, such as 4k; older pages are freed."),
    "sinks": _planned("Number of first tokens that stay visible outside the window.", int, 0),
    "adapter": _planned(
        "A folder with a LoRA adapter (PEFT), kept beside the weights; may be repeated.", list[Path] | None
    ),
    "memory": _machine("Memory for weights and cache: 24GB, 24GiB (2^30), or here for what is free on this machine."),
    "expert_memory": _machine("Memory for experts, such as 8GB; other experts are read from disk."),
    "gpu_memory": _machine("Memory of a GPU, such as 8GB, to find --gpu-layers."),
    "bandwidth": _machine("Memory bandwidth, such as 30GB/s; by default measured here."),
}


@partial(opt.replaced, name="chosen", options=OPTIONS)
def plan(
    named: Name = None,
    model: opt.Model = None,
    chosen: dict[str, Any] = {},  # noqa: B006  (the OPTIONS)
    json_: opt.Json = False,
) -> None:
    """Calculate the memory that a model needs and the speed that it can reach, without loading it.

    A dozen models are known offline; for others only config.json is read.
    """
    name = opt.the_model(named, model)
    opt.check_engine(weights=chosen["weights"], kv=chosen["kv"], sinks=chosen["sinks"])
    for key in ("context", "window"):
        chosen[key] = None if chosen[key] is None else read_tokens(chosen[key], key)
    if chosen["memory"] not in (None, "here"):
        chosen["memory"] = read_bytes(chosen["memory"], "memory")
    chosen["bandwidth"] = "measured" if chosen["bandwidth"] is None else read_rate(chosen["bandwidth"], "bandwidth")
    chosen["batch"] = read_count(chosen["batch"], "batch")
    local_config(name)  # refuses an unknown model
    from tokenwright import planner

    found = planner.plan(name, adapters=chosen.pop("adapter") or (), **chosen)
    if json_:
        write_json(found.facts(), indent=2)
    else:
        show_anything()
        write(page(found) + "\n")


def page(plan: "Plan") -> str:
    graph = plan.graph
    of = f" of {graph.context:,}" if plan.context < graph.context else ""
    heading = f"{plan.model} ({graph.architecture})\n{plan.context:,}{of} tokens, batch {plan.batch:,}"
    return "\n".join([heading, "", *_memory(plan), "", *_work(plan), "", *_words(plan)])


def _memory(plan: "Plan") -> list[str]:
    adapters = f"{len(plan.adapters)} kept beside the weights, in float32"
    rows = {
        "weights": (plan.weight_bytes, _parameters(plan)),
        **({"in memory": (plan.held_bytes, ["with the experts that fit"])} if plan.expert_memory else {}),
        **({"adapters": (sum(plan.adapters), [adapters])} if plan.adapters else {}),
        "KV of a token": (plan.kv_bytes_per_token, _kept(plan)),
        **({"state of a text": (plan.kv_memory.states, [_states(plan)])} if plan.states else {}),
        "KV of a sequence": (plan.kv_bytes_per_sequence, [_kept_tokens(plan)]),
        "KV in all": (plan.kv_bytes_total, [f"batch {plan.batch:,}"]),
        "together": (plan.total_bytes, ["without activations and torch itself"]),
        **({} if (on_gpu := plan.gpu_layers) is None else {"on the GPU": _on_gpu(plan, on_gpu)}),
        "decode reads": (plan.decode_bytes, [f"{decimal(plan.weight_bytes_read)} of weights, and the KV"]),
        **({"from disk": (plan.disk_bytes, ["a step, if all experts are as likely"])} if plan.expert_memory else {}),
        "prompt memory": (PROMPT_MEMORY, ["of a server, at most", "(--prompt-memory)"]),
    }
    lines = [f"{'memory (derived)':<16} {'2^n':>12}  {'10^n':>11}"]
    for name, (count, words) in rows.items():
        lines.append(f"{name:<16} {binary(count, 2):>12}  {decimal(count):>11}  {words[0]}")
        lines += [" " * 44 + more for more in words[1:]]
    return lines


def _on_gpu(plan: "Plan", layers: int) -> tuple[int, list[str]]:
    if not layers:
        return 0, ["no kernel computes a layer, or none fits beside the head; use device cpu"]
    left = plan.graph.layers - layers
    words = [f"the last {_layers(layers)} and the head: --gpu-layers {layers}" if left else "all of it: --device gpu"]
    return plan.gpu_bytes(layers), words


def _parameters(plan: "Plan") -> list[str]:
    graph = plan.graph
    met = [f"a token meets {graph.active_parameters:,}"] if graph.active_parameters < graph.parameters else []
    return [f"{graph.parameters:,} parameters, {plan.weights}", *met]


def _kept(plan: "Plan") -> list[str]:
    parts = []
    cached = [spec for spec in plan.specs if not spec.state_bytes]
    for (layout, k, v), count in Counter((spec.layout, spec.k, spec.v) for spec in cached).items():
        if isinstance(layout, Heads):
            rows, heads = [k.nbytes(layout.head_size), v.nbytes(layout.head_size)], f"{layout.kv_heads} heads x "
        else:
            assert isinstance(layout, Latent), "states are not of a token"
            rows, heads = [k.nbytes(layout.rank), k.nbytes(layout.rope)], ""
        parts.append(f"{_layers(count)} x {heads}({rows[0]:,} + {rows[1]:,} B)")
    return parts or ["no layer has attention"]


def _states(plan: "Plan") -> str:
    states = plan.states or {}
    return f"{_layers(len(states['layers']))}, of any length; one is kept every {states['every']:,} tokens"


def _kept_tokens(plan: "Plan") -> str:
    windows = Counter(
        window for window in plan.attention_windows if window.tokens_read(plan.context - 1, plan.context) < plan.context
    )
    fewer = []
    for window, count in windows.items():
        some = f"{_layers(count)} keep{'s' if count == 1 else ''}"
        who = "all layers keep" if count == len(plan.attention_windows) else some
        sinks = f" and {window.sinks:,} sink{'s' if window.sinks > 1 else ''}" if window.sinks else ""
        fewer.append(f"{who} {window.size:,}{sinks}")
    return ", ".join([f"{plan.context:,} tokens", *fewer])


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _work(plan: "Plan") -> list[str]:
    whole, each = ("one sequence", "its") if plan.batch == 1 else (f"{plan.batch:,} sequences", "each one's")
    lines = [
        f"{'work (derived)':<16} {'10^n':>12}",
        f"{'prefill':<16} {flop(plan.prefill_flops):>12}  {whole} of {plan.context:,} tokens",
        f"{'decode step':<16} {flop(plan.decode_flops):>12}  {each} next token",
    ]
    speed, most = plan.bandwidth, plan.tokens_per_second
    if speed is not None and most is not None:
        shared = "" if plan.batch == 1 else f"in all, {rate(most / plan.batch)} each, "
        where = f" of this machine ({speed.place})" if speed.kind == "measured" else ""
        reads, writes = f"{rate(speed.bytes_per_second / 1e9)} GB/s", f"{rate(most)} tok/s"
        if plan.disk is not None:
            lines += [
                "",
                f"{'disk (measured)':<16} {rate(plan.disk.bytes_per_second / 1e9):>7} GB/s  reading experts",
            ]
        lines += [
            "",
            f"{f'speed ({speed.kind})':<16} {reads:>12}  reading memory{where}",
            f"{'at most':<16} {writes:>12}  {shared}if reading alone limits",
        ]
    return lines


def _words(plan: "Plan") -> list[str]:
    said = [("cache > weights", _crossing(plan))]
    if plan.memory is not None:
        said.append((f"in {decimal(plan.memory)}", _fit(plan, plan.memory)))
    said.append(("this engine", _engine(plan)))
    said += [("note", remark) for remark in plan.remarks]
    if plan.bandwidth is not None and plan.bandwidth.busy:
        from tokenwright.planner.machine_load import busy_warning

        said.append(("note", busy_warning(plan.bandwidth.busy)))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    return [
        textwrap.fill(f"{name:<16} {words}", max(40, width), subsequent_indent=" " * 17, break_on_hyphens=False)
        for name, words in said
    ]


def _crossing(plan: "Plan") -> str:
    at, batch = plan.cache_exceeds_weights_at, f" each, at batch {plan.batch:,}" if plan.batch > 1 else ""
    if at is None:
        return "never: every layer's window is limited"
    beyond = f", beyond the model's {plan.graph.context:,}" if at > plan.graph.context else ""
    return f"from {at:,} tokens{batch}{beyond}"


def _fit(plan: "Plan", memory: int) -> str:
    spare = memory - plan.total_bytes
    if memory < plan.held_bytes:
        return f"does not fit: the weights alone are {decimal(plan.held_bytes - memory)} too much"
    verdict = f"fits, with {decimal(spare)} to spare" if plan.fits else f"does not fit: {decimal(-spare)} too much"
    longest, own = plan.most_context, plan.graph.context
    if plan.endless and longest is None:
        tokens = "texts without end"
    elif not plan.endless and (longest is None or longest >= own):
        tokens = f"all {own:,} tokens of the model's context"
    else:
        tokens = f"{longest:,} tokens"
    widest = f"batch {plan.most_batch:,}" if plan.most_batch else "not even one sequence"
    return f"{verdict}. The most at batch {plan.batch:,}: {tokens}; at {plan.context:,} tokens: {widest}"


def _engine(plan: "Plan") -> str:
    if plan.hindrances or plan.engine_kv_bytes is None:
        return f"cannot run this yet: {'; '.join(plan.hindrances)}"
    pages = " + ".join(f"{group.pages:,}" for group in plan.engine_groups)
    one = "one more" if len(plan.engine_groups) == 1 else "one more of each"
    options = [f"pages={plan.engine_pages}", f"max_sequences={plan.batch}"]
    if plan.weights.quantised and plan.blueprint.packed is None and not plan.blueprint.kept:
        options.append(f'weights="{plan.weights}"')
    native = f"; without native kernels give --dtype {plan.native}, else it is float32"
    wide = "" if plan.native == "float32" else native
    if plan.kv != KVFormat():
        options.append(f'kv="{plan.kv}"')
    if plan.window is not None:
        options.append(f"window={plan.window}")
    if plan.sinks:
        options.append(f"sinks={plan.sinks}")
    size = binary(plan.engine_kv_bytes, 2)
    return f"takes {size} for the KV with LLM({', '.join(options)}): {pages} pages and {one}{wide}"


def flop(count: int) -> str:
    return scaled(count / 1e6, 1000, ("MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))
