"""The settings of a server: one table for flags, TOML files, variables and the documentation.

A flag wins over a variable, a variable over the file of --config, and that over [serve] in the user's settings file.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tokenwright.checks import check_whole, shown
from tokenwright.errors import RequestError
from tokenwright.llm.prompts.report import PROMPT_MEMORY
from tokenwright.regular_file import read_regular_text

PREFIX = "TOKENWRIGHT_"
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _setting(default: Any, help: str, **more: str) -> Any:  # noqa: A002  (the word of command lines)
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `tokenwright serve`. Raises RequestError for values out of range or in conflict.

    A field's name is its key in a file; the flag has dashes, the variable capitals and the prefix TOKENWRIGHT_.
    """

    host: str = _setting("127.0.0.1", "The address to listen on; any but this machine's own needs a key.")
    port: int = _setting(8000, "The port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = _setting(
        (), "A key that clients must send; several are possible. Other users of the machine see a flag's."
    )
    api_key_file: str = _setting("", "A file of such keys, one a line.")
    no_key: bool = _setting(
        False, "Listen on another address without a key; on all addresses (0.0.0.0) it needs --allowed-host."
    )
    allowed_host: tuple[str, ...] = _setting(
        (), "A name under which clients call the server; may be given several times."
    )
    cors_origin: tuple[str, ...] = _setting(
        (), "The origin of a web page that may call it, such as https://chat.example."
    )
    served_model_name: tuple[str, ...] = _setting((), "What clients may call the model; several are possible.")
    memory: str = _setting(
        "", "Memory for all models together, such as 16GB; the longest unused one leaves when another needs it."
    )
    revision: str = _setting("", "A branch, tag or commit of a Hugging Face model.")
    lora: tuple[str, ...] = _setting((), "A folder with a LoRA adapter, merged into the weights; several are possible.")
    adapter: tuple[str, ...] = _setting(
        (),
        "NAME=FOLDER: a LoRA adapter beside the model, served as a model of this name; several are possible.",
        metavar="NAME=FOLDER",
    )
    max_queue: int = _setting(1024, "Requests that may wait; later ones are answered by 429.")
    max_body: int = _setting(16 * 2**20, "Bytes of a request's body at most.")
    request_timeout: float = _setting(0.0, "Seconds that a request may take, waiting included; 0: no limit.")
    reader_timeout: float = _setting(
        300.0, "Seconds in all that a request may be paused because its client reads too slowly; 0: no limit."
    )
    drain_timeout: float = _setting(30.0, "Seconds that running requests have to finish when the server is stopped.")
    timings: bool = _setting(False, "Say in every reply where the time went.")
    stored_responses: int = _setting(
        64 * 2**20, "Bytes of OpenAI's responses that are kept in memory for later requests; 0: none."
    )
    prompt_memory: int = _setting(
        PROMPT_MEMORY, "Bytes in which answered prompts are remembered, to say why one is computed again; 0: none."
    )
    retokenise: bool = _setting(
        False, "Tokenise earlier answers in a prompt anew, instead of taking the ids that they were written with."
    )
    warm: str = _setting(
        "auto",
        "Whether next turns of conversations are computed ahead while there is no request: off, on, or auto: while the "
        "machine is free.",
        metavar="off|auto|on",
    )
    strict_fields: bool = _setting(False, "Refuse requests that have fields which are unknown here.")
    access_log: bool = _setting(False, "Write a line of JSON to standard error for every request.")
    replicas: int = _setting(
        0, "Processes that write the texts and are replaced when they die; 0: the server itself writes them."
    )
    ray_address: str = _setting(
        "", "A Ray cluster for the replicas, such as auto or HOST:PORT; local starts one.", metavar="ADDRESS"
    )
    retries: int = _setting(3, "How many replicas may die with a text before its request fails.")
    heartbeat: float = _setting(
        10.0, "Seconds without a sign of life after which a replica is ended and its texts go on elsewhere."
    )
    kv_events: str = _setting(
        "",
        "The address, such as tcp://*:5557, of vLLM's KV events for routers; replays are at the next port.",
        metavar="ADDRESS",
    )
    kv_events_topic: str = _setting("", "The topic of these events, such as kv@pod@model.")
    apis: tuple[str, ...] = _setting((), "The APIs to serve: openai, anthropic, ollama, llama_cpp, explorer.")
    explorer: bool = _setting(False, "Let the page trace runs; every step is then timed.")

    def __post_init__(self) -> None:
        check_whole("port", self.port, 0, 65_535)
        check_whole("max_queue", self.max_queue, 0, 1_000_000)
        check_whole("replicas", self.replicas, 0, 64)
        check_whole("retries", self.retries, 0, 100)
        if not 2 <= self.heartbeat <= 3600:  # replicas are pinged each second
            raise RequestError(f"heartbeat must be from 2 to 3,600 seconds, not {self.heartbeat!r}")
        if self.ray_address and not self.replicas:
            raise RequestError("ray_address needs replicas; give --replicas as well")
        alone = {"explorer": self.explorer, "kv_events": self.kv_events}
        if self.replicas and (name := next((name for name, given in alone.items() if given), None)):
            raise RequestError(f"{name} cannot be used with --replicas; leave one of them out")
        check_whole("max_body", self.max_body, 1024, 1 << 30)
        if self.warm not in ("off", "auto", "on"):
            raise RequestError(f"warm must be off, auto or on, not {self.warm!r}")
        for name in ("stored_responses", "prompt_memory"):
            check_whole(name, getattr(self, name), 0, 1 << 40)
        for name in ("request_timeout", "reader_timeout", "drain_timeout"):
            if not 0 <= getattr(self, name) <= 86_400:
                raise RequestError(f"{name} must be from 0 to 86,400 seconds, not {getattr(self, name)!r}")
        if self.no_key and (self.api_key or self.api_key_file):
            raise RequestError("no_key contradicts the API key that is given; leave one of them out")
        if not self.local and not (self.no_key or self.api_key or self.api_key_file):
            raise RequestError(
                f"on {self.host} others can reach this server: give --api-key-file (or --api-key), or say --no-key"
            )

        if self.no_key and self.everywhere and not self.allowed_host:
            raise RequestError(
                f"on {self.host} without a key, any web page could call this server by a name of its own (DNS "
                "rebinding): give --allowed-host the names by which clients call it, or --host one address"
            )

    @property
    def local(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")

    @property
    def everywhere(self) -> bool:
        try:
            return not self.host or ip_address(self.host).is_unspecified
        except ValueError:
            return False


def read_settings(
    file: Path | None, variables: Mapping[str, str], flags: Mapping[str, Any], table: Mapping[str, Any] | None = None
) -> Settings:
    """Merge a file, variables without prefix, flags that are not None and the user's [serve]. Raises RequestError."""
    found = _named(table or {}, "[serve] of the settings file")
    if file is not None:
        found |= _of_file(file)
    known = {one.name: one for one in fields(Settings)}
    found |= {name: _parsed(name, variables[name.upper()]) for name in known if name.upper() in variables}
    found |= {name: value for name, value in flags.items() if value not in (None, (), [])}
    made = replace(Settings(), **{name: _typed(name, value) for name, value in found.items()})
    for name in ("retries", "heartbeat"):
        if name in found and not made.replicas:
            raise RequestError(f"{name} needs replicas; give --replicas as well")
    return made


def _of_file(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(read_regular_text(file))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(f"--config {file} cannot be read: {reason}") from error
    return _named(content, f"--config {file}")


def _named(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {key.replace("-", "_"): value for key, value in content.items()}
    if unknown := found.keys() - {one.name for one in fields(Settings)}:
        first = min(unknown)
        near = get_close_matches(first, [one.name for one in fields(Settings)], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"{where} has {first}, which is no setting of serve{hint}")
    return found


def _default(name: str) -> Any:
    default = next(one.default for one in fields(Settings) if one.name == name)
    assert default is not MISSING, "every setting has a default"
    return default


def _parsed(name: str, text: str) -> Any:
    default = _default(name)
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, bool):
        if text not in ("0", "1"):
            raise RequestError(f"{PREFIX}{name.upper()} must be 0 or 1, not {text!r}")
        return text == "1"
    try:
        return type(default)(text)
    except ValueError:
        raise RequestError(f"{PREFIX}{name.upper()} must be a number, not {text!r}") from None


def _typed(name: str, value: Any) -> Any:
    """Check a value's type. Raises RequestError."""
    default = _default(name)
    if isinstance(default, tuple):
        values = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
        if values is None or not all(isinstance(one, str) for one in values):
            raise RequestError(f"{name} must be a list of strings, not {shown(value)}")
        return values
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise RequestError(f"{name} must be {_WORDS[type(default)]}, not {shown(value)}")
    return value
