"""The bodies of Ollama's API: POST /api/generate, /api/chat, /api/embed, /api/embeddings and /api/show."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.serve.http.fields import (
    MOST_ITEMS,
    MOST_TOOLS,
    Body,
    CallId,
    Name,
    Object,
    Refused,
    Share,
    Stops,
    StopText,
    Text,
    ToolName,
    many,
)
from tokenwright.serve.http.samplers import Samplers

_NO_IMAGES = Refused("models here read text", ([],))
MOST_LOGPROBS = 20  # as in Ollama
MOST_TEXTS = 2_048  # of one request for embeddings

Window = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
KeepAlive = float | Annotated[str, Field(max_length=32)] | None
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class Options(Samplers):
    """How the text is chosen and where it ends. Without an option the checkpoint's own default holds.

    num_ctx: the most tokens of prompt and answer together. num_predict: of the answer; -1 and -2: to the end of the
    context. seed -1: a random one. repeat_last_n -1: the whole text; 0: no repetition penalty. top_k 0 and -1: all.
    """

    refused = {
        "tfs_z": Refused("use min_p or typical_p", (1, 1.0)),
    }
    harmless = (
        *(
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
        ),
        *("num_gpu", "num_gqa", "num_keep", "num_thread", "numa", "penalize_newline", "rope_frequency_base"),
        *("rope_frequency_scale", "use_mlock", "use_mmap", "vocab_only"),
    )
    off = {
        "num_ctx": (0, -1),
        "temperature": (-1,),
        "repeat_penalty": (0, -1),
        **dict.fromkeys(("top_p", "min_p", "typical_p"), (-1,)),
        "stop": ("", []),
    }

    num_ctx: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_k: Window | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_last_n: Window | None = None
    repeat_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopText | Stops | None = None


class Show(Body):
    """POST /api/show. name: what older clients call the model."""

    refused = {
        **{name: Refused("models cannot be changed here") for name in ("system", "template", "options")},
        "verbose": Refused("the card has no longer form", (False,)),
    }

    model: Name | None = None
    name: Name | None = None


class OllamaPrompted(Body):
    """What /api/generate and /api/chat have in common.

    format: "json", or the JSON schema of the answer. keep_alive: seconds, or a duration of Go's such as "1h30m"; the
    model stays loaded as long as the server runs, which is at least as long as was asked; 0, which unloads it, is
    refused. think: whether the model reasons first; it does at any level.
    """

    harmless: ClassVar[tuple[str, ...]] = ("shift", "truncate")  # a text that does not fit is refused
    off: ClassVar[Mapping[str, tuple[object, ...]]] = {"think": ("",), "options": ("", [])}
    without_effect = ("keep_alive",)

    model: Name
    stream: bool = True
    format: Literal["", "json"] | Object = ""
    options: Options = Options()
    keep_alive: KeepAlive = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0


class Generate(OllamaPrompted):
    """POST /api/generate. raw: the prompt is not put into the chat template. An empty prompt only loads the model.

    suffix: what follows the text; a model that was trained for it fills the gap.
    """

    refused = {
        "context": Refused("use /api/chat for conversations", ([],)),
        "images": _NO_IMAGES,
        "template": Refused("the model has its own chat template; use raw for another", ("",)),
        **{name: Refused("models here write text") for name in ("width", "height", "steps")},
    }

    prompt: Text = ""
    suffix: Text = ""
    system: Text = ""
    raw: bool = False


class Called(Body):
    harmless = ("index",)

    name: ToolName
    arguments: Object = {}
    description: Text = ""


class OllamaToolCall(Body):
    id: CallId | None = None
    type: Literal["function"] = "function"
    function: Called


class OllamaMessage(Body):
    """thinking: the reasoning of an earlier answer. tool_name, tool_call_id: the call that a tool's message answers."""

    refused = {"images": _NO_IMAGES}
    harmless = ("name",)

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text = ""
    tool_calls: Annotated[list[OllamaToolCall], many(MOST_TOOLS)] = []
    tool_name: ToolName | None = None
    tool_call_id: CallId | None = None


class OllamaFunction(Body):
    name: ToolName
    description: Text = ""
    parameters: Object = {"type": "object", "properties": {}}


class OllamaTool(Body):
    type: Literal["function"] = "function"
    function: OllamaFunction


class Chat(OllamaPrompted):
    """POST /api/chat. Without messages it only loads the model."""

    messages: Annotated[list[OllamaMessage], many(MOST_ITEMS)] = []
    tools: Annotated[list[OllamaTool], many(MOST_TOOLS)] = []


class Embedded(Body):
    """The fields of /api/embed and /api/embeddings. A text that does not fit is refused, whatever `truncate` says."""

    harmless = ("options", "stream", "truncate")
    without_effect = ("keep_alive",)

    model: Name
    keep_alive: KeepAlive = None


class OllamaEmbed(Embedded):
    """POST /api/embed."""

    refused = {
        "dimensions": Refused("vectors have the width of the model"),
    }

    input: Text | Annotated[list[Text], many(MOST_TEXTS, 1)]


class OllamaEmbeddings(Embedded):
    """POST /api/embeddings, which /api/embed has replaced."""

    prompt: Text
