"""`tokenwright plan`: a model's memory and the cost of its steps, only from its config.json."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tokenwright.checkpoints.files.local import local_config
from tokenwright.cli.options import shared as opt
from tokenwright.cli.reports.plan_page import page
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.units import read_bytes, read_count, read_rate, read_tokens

PLANNED, MACHINE = "What to plan", "Machine"

Name = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="A known name (llama-3.1-8b), a config.json, a folder, a GGUF file, a Hugging Face name, or stories.",
        show_default=False,
        autocompletion=opt.model_names,
    ),
]
Context = Annotated[
    str | None,
    Option(
        help="Tokens of each sequence, 8192 or 8k (k = 1024); by default the model's context.", rich_help_panel=PLANNED
    ),
]
Batch = Annotated[int, Option(help="Sequences at once.", rich_help_panel=PLANNED)]
Kv = Annotated[str, Option("--kv", help=opt.HOW_KV, rich_help_panel=PLANNED)]
Weights = Annotated[
    str,
    Option(
        help="Format of weight matrices: native, float32, bfloat16, float16, int8, int4; int8:32 sets the group.",
        rich_help_panel=PLANNED,
    ),
]
Window = Annotated[
    str | None,
    Option(
        help="Attention window in tokens, for all layers, such as 4k; older pages are freed.",
        rich_help_panel=PLANNED,
        show_default=False,
    ),
]
Sinks = Annotated[
    int, Option(help="Number of first tokens that stay visible outside the window.", rich_help_panel=PLANNED)
]
Adapter = Annotated[
    list[Path] | None,
    Option(
        "--adapter",
        help="A folder with a LoRA adapter (PEFT), kept beside the weights; may be repeated.",
        rich_help_panel=PLANNED,
        show_default=False,
    ),
]
Memory = Annotated[
    str | None,
    Option(
        help="Memory for weights and cache: 24GB, 24GiB (2^30), or here for what is free on this machine.",
        rich_help_panel=MACHINE,
    ),
]
ExpertMemory = Annotated[
    str | None,
    Option(help="Memory for experts, such as 8GB; other experts are read from disk.", rich_help_panel=MACHINE),
]
GpuMemory = Annotated[
    str | None,
    Option(help="Memory of a GPU, such as 8GB, to find --gpu-layers.", rich_help_panel=MACHINE),
]
Speed = Annotated[
    str | None, Option(help="Memory bandwidth, such as 30GB/s; by default measured here.", rich_help_panel=MACHINE)
]


def plan(
    named: Name = None,
    model: opt.Model = None,
    context: Context = None,
    batch: Batch = 1,
    kv: Kv = "native",
    weights: Weights = "native",
    window: Window = None,
    sinks: Sinks = 0,
    adapter: Adapter = None,
    memory: Memory = None,
    expert_memory: ExpertMemory = None,
    gpu_memory: GpuMemory = None,
    bandwidth: Speed = None,
    json_: opt.Json = False,
) -> None:
    """Calculate the memory that a model needs and the speed that it can reach, without loading it.

    A dozen models are known offline; for others only config.json is read.
    """
    chosen = opt.the_model(named, model)
    opt.check_engine(weights=weights, kv=kv, sinks=sinks)
    tokens = None if context is None else read_tokens(context, "context")
    limit = None if window is None else read_tokens(window, "window")
    room = memory if memory in (None, "here") else read_bytes(memory, "memory")
    rate = "measured" if bandwidth is None else read_rate(bandwidth, "bandwidth")
    sequences = read_count(batch, "batch")
    local_config(chosen)  # refuses an unknown model
    from tokenwright import planner

    found = planner.plan(
        chosen,
        context=tokens,
        batch=sequences,
        kv=kv,
        weights=weights,
        window=limit,
        sinks=sinks,
        memory=room,
        bandwidth=rate,
        adapters=adapter or (),
        expert_memory=expert_memory,
        gpu_memory=gpu_memory,
    )
    if json_:
        write_json(found.facts(), indent=2)
    else:
        show_anything()
        write(page(found) + "\n")
