"""Options that several commands share, and helpers that read a prompt and open a model."""

import codecs
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tokenwright.checkpoints.files.local import local_folder
from tokenwright.checks import check_device
from tokenwright.cli.options import defaults as settings
from tokenwright.cli.terminal.output import loading, on_terminal, remark
from tokenwright.config import EngineConfig
from tokenwright.errors import RequestError
from tokenwright.formats import DTYPE_BYTES, KVFormat, WeightFormat
from tokenwright.units import read_bytes

if TYPE_CHECKING:
    from tokenwright.llm.llm import LLM

STORIES = "stories"
MOST_PROMPT = 256 << 20  # bytes
MODEL, SAMPLING, ENGINE, OUTPUT, SERVER = "Model", "Sampling", "Engine", "Output", "Server"


def model_names(incomplete: str) -> list[str]:
    from tokenwright.checkpoints.files.suggest import beginning_with

    return beginning_with(incomplete)


Prompt = Annotated[
    str | None,
    Argument(
        metavar="[PROMPT]", help="The text to continue; - reads it from standard input, as a pipe without it does."
    ),
]
PromptFile = Annotated[
    Path | None, Option("--file", "-f", help="Read the prompt from a file, without its final newline.")
]
ModelName = Annotated[
    str | None,
    Argument(
        metavar="[MODEL]",
        help="A Hugging Face name, a folder, a GGUF file, or stories, the model inside.",
        show_default=False,
        autocompletion=model_names,
    ),
]

NewTokens = Annotated[
    int, Option("-n", "--max-tokens", "--new-tokens", help="The most tokens to write.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None,
    Option(
        help="0 takes the most probable token; higher values randomise more.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, Option(help="The seed of random draws; without it one is chosen and printed.", rich_help_panel=SAMPLING)
]

Model = Annotated[
    str | None,
    Option(
        "--model",
        "-m",
        help="A Hugging Face name, a folder, a GGUF file, or stories, the model inside, which is the default.",
        rich_help_panel=MODEL,
        show_default=False,
        autocompletion=model_names,
    ),
]
Revision = Annotated[str | None, Option(help="A branch, tag or commit of a Hugging Face model.", rich_help_panel=MODEL)]
Lora = Annotated[
    list[Path] | None,
    Option(
        "--lora",
        help="A folder with a LoRA adapter (PEFT), merged into the weights as they are read; may be repeated.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]

NoCache = Annotated[bool, Option("--no-cache", help="Recompute every token at every step.", rich_help_panel=ENGINE)]
Weights = Annotated[
    str,
    Option(
        help="Format of weight matrices: native (see --dtype), float32, bfloat16, float16, int8, int4; int8:32 sets "
        "the group. Quantised weights are kept in the cache folder for the next run.",
        rich_help_panel=ENGINE,
    ),
]
HOW_KV = (
    "Format of the KV cache: native, float32, bfloat16, float16, fp8, int8, int4, or k=int8,v=int4. Add ,first=64 to "
    "keep the first 64 tokens native, ,native=0+-1 to keep the first and last layer native."
)

Json = Annotated[bool, Option("--json", help="Write one JSON object instead.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Write the text only, no remarks.", rich_help_panel=OUTPUT)]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Also show how long each phase took.", rich_help_panel=OUTPUT)]


def _engine(kind: Any, help_: str, *names: str, panel: str = ENGINE, **more: Any) -> Any:
    return Annotated[kind, Option(*names, help=help_, rich_help_panel=panel, **more)]


_THREADS = "Compute threads; by default one per core"
_TEXT = str | None
ENGINE_OPTIONS: dict[str, tuple[Any, Any]] = {  # of commands that open a model: how each is typed, and its default
    "revision": (Revision, None),
    "device": (_engine(str, "auto, cpu, gpu, gpu:N, cuda, cuda:N or mps.", panel=MODEL), "auto"),
    "dtype": (_engine(str, "Type of weights and KV cache where --weights and --kv are native: auto (the checkpoint's; "
                      "float32 on a CPU without native kernels), float32, bfloat16 or float16.",
                      "--dtype", panel=MODEL), "auto"),
    "weights": (Weights, "native"),
    "lora": (Lora, None),
    "mmproj": (_engine(_TEXT, "The GGUF file of the vision tower; by default the one in the model's folder.",
                       panel=MODEL, show_default=False), None),
    "threads": (_engine(int | None, f"{_THREADS}.", min=1, max=4096), None),
    "tensor_parallel": (_engine(int, "Processes that compute the model together: 1, 2, 4 or 8. They divide weights, KV "
                                "cache and threads; the text stays the same."), 1),
    "expert_memory": (_engine(_TEXT, "Memory for a mixture's experts, such as 8GB; other experts are read from "
                              "disk on demand. By default all are in memory, if they fit."), None),
    "gpu_layers": (_engine(_TEXT, "With --device gpu: how many last layers the GPU computes, or the size of their "
                           "weights, such as 8GB. The CPU computes the others. By default all."), None),
    "kv": (_engine(str, HOW_KV, "--kv"), "native"),
    "kv_memory": (_engine(_TEXT, "Memory for the KV cache, such as 2GB or 512MiB; by default an eighth of the free "
                          "memory, at most 4 GiB."), None),
    "kv_disk": (_engine(_TEXT, "A folder in which cached prefixes outlive the process; several processes may share it. "
                        "auto: files that end with the process; off: none.", show_default=False), None),
    "kv_disk_size": (_engine(_TEXT, "The most bytes that --kv-disk uses; by default 20GB."), None),
    "pinned": (_engine(float, "The fraction of the cache that clients may pin."), 0.5),
    "window": (_engine(int | None, "Attention window in tokens, for all layers; older pages are freed."), None),
    "sinks": (_engine(int, "Number of first tokens that stay visible outside the window."), 0),
    "page_size": (_engine(int, "Tokens in a page of the KV cache."), 16),
    "token_budget": (_engine(int, "The most tokens that a step computes; a longer prompt takes several steps."), 512),
    "speculate": (_engine(str, "Draft tokens from suffix (earlier text and the grammar), mtp (also the model's own "
                          "layers for further tokens), or off. The text stays the same."), "suffix"),
    "draft": (_engine(_TEXT, "A smaller model with the same tokenizer that drafts tokens. The text stays the same.",
                      show_default=False), None),
    "draft_weights": (_engine(str, "Format of the draft model's matrices, as for --weights."), "native"),
}  # fmt: skip
_FEWER = f"{_THREADS}; one fewer in explore, for small models, and without native kernels."
SERVER_THREADS = _engine(int | None, _FEWER, min=1, max=4096)


Command = Callable[..., None]


def replaced(
    command: Command,
    name: str,
    options: Mapping[str, tuple[Any, Any]],
    collect: Callable[[dict[str, Any]], Any] = dict,
) -> Command:
    """Replace a command's parameter `name` by options, each a type and a default; `collect` makes its value."""
    signature, kind = inspect.signature(command, eval_str=True), inspect.Parameter.POSITIONAL_OR_KEYWORD
    more = [inspect.Parameter(one, kind, default=default, annotation=of) for one, (of, default) in options.items()]
    each = [more if one.name == name else [one] for one in signature.parameters.values()]

    @functools.wraps(command)
    def wrapped(*arguments: Any, **given: Any) -> None:
        command(*arguments, **{name: collect({one: given.pop(one) for one in options})}, **given)

    parameters = [one for part in each for one in part]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapped


def with_engine(*, server: bool = False, but: Sequence[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Replace a command's parameter `engine` by the options that open a model, without `but`. defaults: for some."""
    kinds = {name: kind for name, (kind, _) in ENGINE_OPTIONS.items() if name not in but}
    if not server:
        kinds.pop("pinned", None)
    else:
        kinds["threads"] = SERVER_THREADS
    options = {name: (kind, defaults.get(name, ENGINE_OPTIONS[name][1])) for name, kind in kinds.items()}
    return lambda command: replaced(command, "engine", options)


def of_engine(options: Mapping[str, Any], *, but: Sequence[str] = ()) -> dict[str, Any]:
    """Convert the options of `with_engine` for `opened` and LLM, without `but`. Raises RequestError."""
    found = {name: value for name, value in options.items() if name not in but}
    if found.get("kv_disk") == "off":
        found["kv_disk"] = None
    for name in ("kv_memory", "kv_disk_size", "expert_memory"):
        if found.get(name) is not None:
            found[name] = read_bytes(found[name], name)
    if found.get("kv_disk_size") is not None and found.get("kv_disk") is None:
        raise RequestError("kv_disk_size limits kv_disk; give that as well", "kv_disk", "kv_disk_size")
    if found.get("tensor_parallel") == 1:
        del found["tensor_parallel"]
    absent = ("lora", "mmproj", "kv_disk", "kv_disk_size", "draft", "expert_memory", "gpu_layers")
    return {name: value for name, value in found.items() if not (name in absent and value is None)}


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def the_model(named: str | None, option: str | None) -> str:
    """The chosen model or the default. Raises RequestError if two models are given."""
    if named is not None and option is not None and named != option:
        raise RequestError(f"two models are given, {named[:200]} and -m {option[:200]}; leave one of them out")
    chosen = option if named is None else named
    return str(settings.read().get("model", STORIES)) if chosen is None else chosen


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt from the argument or a file, or from stdin for `-` or a pipe.

    Drops a byte order mark and one final newline. Raises RequestError; two prompts, or none, are an error.
    """
    if prompt is not None and file is not None:
        raise RequestError("two prompts are given; leave out PROMPT or --file")
    if prompt is not None and prompt != "-":
        return _decoded(prompt.encode("utf-8", "surrogateescape"), "the prompt on the command line")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise RequestError('give a prompt: "TEXT" in quotes, or --file PATH, or pipe a text in')
    where = "standard input" if file is None else str(file)
    try:
        data = _limited(sys.stdin.buffer, where) if file is None else _of_file(file)
    except OSError as error:
        raise RequestError(f"the prompt cannot be read from {where}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the file's name, or a closed stream
        raise RequestError(f"the prompt cannot be read from {where!r}: {error}") from error
    if file is None and not data:
        raise RequestError('standard input is empty: no prompt came; give one as "TEXT" or with --file PATH')
    text = _decoded(data.removeprefix(codecs.BOM_UTF8), f"the prompt in {where}")
    return text.removesuffix("\n").removesuffix("\r")


def _of_file(file: Path) -> bytes:
    with file.open("rb") as stream:
        return _limited(stream, str(file))


def _limited(stream: IO[bytes], where: str) -> bytes:
    data = stream.read(MOST_PROMPT + 1)
    if len(data) > MOST_PROMPT:
        raise RequestError(f"the prompt in {where} has more than {MOST_PROMPT >> 20} MiB; give a shorter one")
    return data


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{what} is not UTF-8 text (byte {error.start} is wrong)") from error


def check_engine(
    *, device: str = "auto", dtype: str = "auto", weights: str = "native", kv: str = "native", **options: Any
) -> None:
    """Check options that need neither a model nor torch. Raises RequestError as `LLM` would."""
    WeightFormat.parse(weights)
    if dtype not in ("auto", *DTYPE_BYTES):
        raise RequestError(f"dtype {dtype!r} is not known; use auto, {', '.join(DTYPE_BYTES)}", "dtype")
    check_device(device)
    names = {field.name for field in fields(EngineConfig)}
    EngineConfig(kv=KVFormat.parse(kv), **{name: value for name, value in options.items() if name in names})


def beyond_processors(threads: int) -> str:
    """A warning if there are more threads than processors, else ''."""
    from tokenwright.backends.device import processors

    count = len(processors())
    many = f"note: --threads {threads} on {count} processor{'s' if count > 1 else ''}: threads wait for each other"
    return f"{many}, which is slower; leave --threads out" if threads > count else ""


@contextmanager
def opened(
    model: str | None, *, quiet: bool = False, phases: dict[str, float] | None = None, **options: Any
) -> "Iterator[LLM]":
    """Open the model with a progress bar. options: LLM's, and `threads`. phases: receives the times of the phases."""
    model, threads = the_model(None, model), options.pop("threads", None)
    check_engine(**options)
    local_folder(model, options.get("revision"))
    with loading(model) if on_terminal() and not quiet else nullcontext() as report:
        start = time.perf_counter()
        from tokenwright.backends.device import compute_with
        from tokenwright.llm.llm import LLM

        imported = time.perf_counter()
        if threads is not None:
            compute_with(threads)
            if not quiet and (more := beyond_processors(threads)):
                remark(more)

        llm = LLM(model, report=report, **options)
    if phases is not None:
        phases |= {"imports_s": imported - start, "load_s": time.perf_counter() - imported}
    if llm.generation.unsupported and not quiet:
        names = ", ".join(llm.generation.unsupported)
        remark(f"note: the model's generation_config.json also asks for {names}, which Tokenwright does not have yet")
    with llm:
        yield llm


def loader(
    model: str, *, threads: int | None = None, browser: bool = False, **options: Any
) -> "Callable[[Callable[[int, int], None]], LLM]":
    """Returns the function that loads a server's model in a thread.

    threads: by default one per core, one fewer beside a browser, for torch, and for a model with fast steps.
    """

    def load(report: Callable[[int, int], None]) -> "LLM":
        from tokenwright.backends.device import compute_with, leave_a_core, leave_a_core_if_quick
        from tokenwright.backends.native.native_kernels import find_kernels
        from tokenwright.llm.llm import LLM

        if threads is not None:
            compute_with(threads)
            if more := beyond_processors(threads):
                remark(more)
        elif browser or find_kernels() is None:
            leave_a_core()
        llm = LLM(model, report=report, **options)
        if threads is None and not browser:
            leave_a_core_if_quick(llm.kernels, llm.weight_bytes)
        return llm

    return load
