"""Bodies of Ollama's API: /api/generate, /api/chat, /api/embed, /api/embeddings and /api/show."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tokenwright.checks import MAX_TOKENS, shown
from tokenwright.errors import RequestError
from tokenwright.pictures.opening import MOST_PICTURES
from tokenwright.serve.http import fields
from tokenwright.serve.http.request_parts import PictureText, Samplers

_LOADED = "the server's command line says how the model is loaded"
_OTHER = "it was made for the program of the client"
Images = Annotated[list[PictureText], fields.many(MOST_PICTURES)]
MOST_LOGPROBS = 20
MOST_TEXTS = 2_048

Window = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]

MOST_DURATION = 64  # characters
FOREVER_S = 1e9
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|[µμ]s|ms|s|m|h)")
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_PART.pattern})+)")


def keep_alive(value: object) -> float | None:
    """The seconds that a model stays in memory, or None if not given. Raises RequestError.

    >>> keep_alive("1h30m")
    5400.0
    """
    if isinstance(value, str) and len(value) <= MOST_DURATION:
        if not _DURATION.fullmatch(value):
            return None
        seconds = math.fsum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
        seconds = -seconds if value.startswith("-") else seconds
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SECONDS:
        seconds = float(value)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        raise RequestError(f"keep_alive must be seconds, or a duration such as 5m, not {shown(value)}")
    else:
        return None
    return seconds if 0 <= seconds <= FOREVER_S else math.inf


MAX_SECONDS = 2**63  # the most that Ollama's clients can write
KeepAlive = Annotated[Any, AfterValidator(keep_alive)]


class Options(Samplers):
    """Sampling and stop options, by default the checkpoint's.

    num_ctx: the most tokens of prompt and answer. num_predict: of the answer; -1, -2: to the end of the context.
    seed -1: random. repeat_last_n -1: the whole text; 0: no repetition penalty. top_k 0, -1: all.
    """

    refused = {"tfs_z": fields.Refused("use min_p or typical_p", (1, 1.0))}
    harmless = {
        **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "logits_all"), _LOADED),
        **dict.fromkeys(("vocab_only", "use_mlock", "use_mmap", "embedding_only", "f16_kv"), _LOADED),
        "num_keep": "a text is never cut in the middle",
        "penalize_newline": "penalties treat all tokens alike",
    }

    num_ctx: Annotated[fields.Tokens | None, fields.absent(0)] = None
    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    repeat_last_n: Window | None = None
    repeat_penalty: fields.Repetition = None


class Show(fields.Body):
    """POST /api/show. name: what older clients call the model."""

    refused = {name: fields.Refused("models cannot be changed here") for name in ("system", "template", "options")}
    harmless = {"verbose": "the card has no longer form"}

    model: fields.GivenName = None
    name: fields.GivenName = None


class OllamaPrompted(fields.Body):
    """Fields that /api/generate and /api/chat share. keep_alive: used by a server of several models.

    format: "json", or the answer's JSON schema. think: whether the model reasons first, or the template's level.
    truncate: drop the oldest messages of too long a conversation.
    """

    refused = {"template": fields.Refused("the model has its own chat template; use raw for another")}
    harmless = {"shift": "a text is never cut"}

    model: fields.ModelName = ""
    truncate: bool = True
    stream: bool = True
    keep_alive: KeepAlive = None
    format: Literal["", "json"] | fields.Object = ""
    options: Options = Options()
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0


class Generate(OllamaPrompted):
    """POST /api/generate. raw: without the chat template. suffix: text after the gap. No prompt: load the model."""

    refused = {
        "context": fields.Refused("use /api/chat for conversations"),
        **{name: fields.Refused("models here write text") for name in ("width", "height", "steps")},
    }

    prompt: fields.Text = ""
    suffix: fields.Text = ""
    system: fields.Text = ""
    raw: bool = False
    images: Images = []


class Called(fields.Body):
    harmless = {"index": "calls are in the order of the list", "description": "its tool has one"}

    name: fields.Text = ""
    arguments: fields.Object | fields.Text = {}


class OllamaToolCall(fields.Body):
    harmless = {"index": "calls are in the order of the list"}

    id: fields.GivenId = None
    type: fields.Text = "function"
    function: Called


class OllamaMessage(fields.Body):
    """thinking: earlier reasoning. tool_name, tool_call_id: the answered call. name: the speaker, for templates."""

    harmless = {"cache_control": "every prefix is cached, marked or not", "provider_specific_fields": _OTHER}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: fields.Text = ""
    images: Images = []
    name: fields.Text = ""
    thinking: fields.Text = ""
    tool_calls: Annotated[list[OllamaToolCall], fields.many(fields.MOST_TOOLS)] = []
    tool_name: Annotated[fields.Text | None, fields.absent("")] = None
    tool_call_id: fields.GivenId = None


class OllamaFunction(fields.Body):
    harmless = {"strict": "arguments always follow their schema"}

    name: fields.ToolName
    description: fields.Text = ""
    parameters: fields.Object = {"type": "object", "properties": {}}


class OllamaTool(fields.Body):
    type: fields.Text = "function"
    function: OllamaFunction | None = None


class Chat(OllamaPrompted):
    """POST /api/chat. Without messages, it only loads the model."""

    messages: Annotated[list[OllamaMessage], fields.many(fields.MOST_ITEMS)] = []
    tools: Annotated[list[Annotated[OllamaTool, fields.others("function")]], fields.many(fields.MOST_TOOLS)] = []


class Embedded(fields.Body):
    harmless = {
        "options": "an embedding draws nothing, and the command line says how the model is loaded",
        "stream": "vectors come at once",
    }

    model: fields.ModelName = ""
    keep_alive: KeepAlive = None


class OllamaEmbed(Embedded):
    """POST /api/embed. truncate: read only the last tokens of too long a text."""

    truncate: bool = True
    dimensions: fields.Dimensions = None
    input: fields.Text | Annotated[list[fields.Text], fields.many(MOST_TEXTS)]


class OllamaEmbeddings(Embedded):
    """POST /api/embeddings, the predecessor of /api/embed. An empty prompt only loads the model."""

    prompt: fields.Text
