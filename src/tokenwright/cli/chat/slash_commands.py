"""The slash commands of a conversation, such as /undo."""

import re
import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from tokenwright.cli.chat.conversation import counted, load, save
from tokenwright.cli.options.foreign import OPTIONS
from tokenwright.cli.options.sampling import COMMON, chosen_from
from tokenwright.cli.terminal.output import remark, write
from tokenwright.errors import RequestError
from tokenwright.sampling_params import Grammar
from tokenwright.text.messages import text_of

if TYPE_CHECKING:
    from tokenwright.cli.chat.session import Session
    from tokenwright.llm.prompts.report import CacheReport


FORMATS = ("json_schema", "regex", "lark", "choice")  # options that set the field `grammar`


def _names(key: str) -> list[str]:
    option = get_args(COMMON[key])[1]
    words = [str(word) for word in (option.default, *(option.param_decls or ()))]  # typer keeps the first as default
    return [word.removeprefix("--") for word in words if word.startswith("--")] or [key.replace("_", "-")]


NAMES: Mapping[str, str] = {_names(key)[0]: key for key in COMMON}  # as typed -> key of COMMON
OPTION_NAMES: Mapping[str, str] = {name: _names(key)[0] for key in COMMON for name in _names(key)}

SPOKEN: Mapping[str, str] = {key: f"/set {name}" for name, key in NAMES.items()}


def changed(chosen: Mapping[str, Any], text: str) -> tuple[dict[str, Any], str]:
    """The chosen fields of SamplingParams after `/set TEXT`, and a line that confirms the change.

    TEXT is a name and its values, or "default". Raises RequestError for an unknown name or value.
    """
    try:
        name, *values = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"/set {text[:80]} cannot be read: {error}; quote a value that has quotes") from None
    if name == "parameter" and values:  # ollama's word before the name
        name, *values = values
    name = name.lstrip("-").replace("_", "-")
    name = OPTION_NAMES.get(name, name)
    if name not in NAMES:
        raise RequestError(f"there is no option {name[:40]!r}{_meant(name)}; /set shows them")
    key = NAMES[name]
    field = "grammar" if key in FORMATS else key
    if not values:
        return dict(chosen), f"{name} is {_shown(chosen[field]) if field in chosen else 'at its default'}"
    if values == ["default"]:
        return {one: value for one, value in chosen.items() if one != field}, f"{name} is at its default"
    given: dict[str, Any] = {**dict.fromkeys(COMMON), key: _value(key, name, values)}
    value = chosen_from(given)[field]
    return {**chosen, field: value}, f"{name} is {_shown(value)}"


def _meant(name: str) -> str:
    if name == "system":
        return " (/system TEXT sets the system message)"
    ours = OPTIONS.get(f"--{name}", "")
    ours = "max-tokens" if ours == "-n" else ours.removeprefix("--")
    near = [ours] if ours in OPTION_NAMES else get_close_matches(name, OPTION_NAMES, 1)
    return f", but {near[0]}" if near else ""


def listed(chosen: Mapping[str, Any]) -> str:
    set_ = [f"{name} {_shown(chosen[key])}" for name, key in NAMES.items() if key in chosen]
    if "grammar" in chosen:
        set_.append(f"{chosen['grammar'].kind.replace('_', '-')} {_shown(chosen['grammar'])}")
    return f"set: {', '.join(set_) or 'nothing'}\noptions: {', '.join(NAMES)}\n/set NAME default undoes one"


def _value(key: str, name: str, values: list[str]) -> Any:
    kind = next(one for one in (*get_args(get_args(COMMON[key])[0]), get_args(COMMON[key])[0]) if one is not type(None))
    if get_origin(kind) is list:
        [item] = get_args(kind)
        return [_converted(item, name, value) for value in values]
    if len(values) > 1:
        raise RequestError(f"/set {name} takes one value; put quotes around one with spaces")
    return _converted(kind, name, values[0])


def _converted(kind: type, name: str, value: str) -> Any:
    if kind is bool:
        if value not in ("on", "off"):
            raise RequestError(f"/set {name} takes on or off, not {value!r}")
        return value == "on"
    try:
        return kind(value)
    except ValueError:
        words = {int: "a whole number", float: "a number"}[kind]
        raise RequestError(f"/set {name} takes {words}, not {value!r}") from None


def _shown(value: object) -> str:
    if isinstance(value, Grammar):
        return value.text
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


HELP = """\
/help             these lines
/regenerate       answer the last question again
/undo             remove the last question and its answer
/edit [TEXT]      change the last question, and answer it again
/set [NAME VALUE] change a sampling option, as in /set temperature 0.7; without NAME, show them
/system [TEXT]    set the system message; without TEXT, remove it
/image FILE       show the model a picture with the next message
/reset, /clear    drop all messages except the system message
/shift [on|off]   when the context is full, drop the oldest turns
/save [--force] FILE   write the conversation to a file (JSON)
/load FILE        continue a conversation from a file
/cache            show how much of the last prompt was reused, and why not more
/prompt           show the prompt that the model reads, with control tokens
/quit             leave, as do /exit, /bye and the end of input (Ctrl-D)
Ctrl-C stops an answer or drops a half-typed line; twice at an empty line, it leaves.
\"\"\" opens and closes a message of several lines. Write // to begin a message with a slash."""
ALIASES = {"exit": "quit", "bye": "quit", "?": "help", "clear": "reset", "regen": "regenerate"}  # ollama's, llama.cpp's


class ChatCommands:
    """Runs slash commands. One that raises RequestError has changed nothing."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.report: CacheReport | None = None
        self.pictures: list[Path] = []
        self._acts: dict[str, Callable[[str], None]] = {"help": lambda _: remark(HELP)}
        self._acts |= {
            name: getattr(self, f"_{name}") for name in re.findall(r"^/(\w+)", HELP, re.MULTILINE) if name != "help"
        }

    def run(self, line: str) -> None:
        name, _, text = line[1:].partition(" ")
        act = self._acts.get(ALIASES.get(name, name))
        if act is None:
            near = get_close_matches(name, [*self._acts, *ALIASES], 1)
            hint = f", but /{near[0]}" if near else ""
            raise RequestError(f"there is no command /{name[:40]}{hint}; /help shows all")
        act(text.strip())

    def _regenerate(self, _: str) -> None:
        session = self._session
        question = session.talk.last_question
        if question is None:
            raise RequestError("there is no question yet to answer again")
        if session.params.greedy:
            remark("the temperature is 0, so the answer is the same; /set temperature 0.8 lets it differ")
        session.ask(question, session.talk.without_last_turn(), again=True)

    def _undo(self, _: str) -> None:
        session = self._session
        question = session.talk.last_question
        session.talk = session.talk.without_last_turn()
        remark(f"removed {_short(text_of(question))} and its answer; {counted(session.talk)} left")

    def _edit(self, text: str) -> None:
        session = self._session
        shorter, question = session.talk.without_last_turn(), text_of(session.talk.last_question)
        if not text:
            if not session.reader.terminal:
                raise RequestError("/edit needs the new question: /edit TEXT")
            typed = session.reader.read(question)
            text = "" if typed is None else typed.text
        if text.strip():
            session.ask(text, shorter)

    def _set(self, text: str) -> None:
        session = self._session
        if not text:
            remark(listed(session.chosen))
            return
        chosen, confirmed = changed(session.chosen, text)
        session.params = session.llm.sampling(**chosen)
        session.chosen = chosen
        remark(confirmed)

    def _image(self, text: str) -> None:
        if not Path(text).expanduser().is_file():
            raise RequestError(f"/image needs the file of a picture, and {text[:80]!r} is none")
        self.pictures.append(Path(text).expanduser())
        remark("the picture goes with the next message")

    def _system(self, text: str) -> None:
        session = self._session
        had = bool(session.talk.system)
        session.talk = session.talk.with_system(text)
        removed = "the system message is removed" if had else "there is no system message"
        remark("the system message is set" if text else removed)

    def _reset(self, _: str) -> None:
        session = self._session
        gone = len(session.talk.messages) - len(session.talk.system)
        session.talk = session.talk.cleared()
        kept = "; the system message stays" if session.talk.system else ""
        remark(f"{gone} message{'s' if gone != 1 else ''} dropped{kept}")

    def _shift(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise RequestError(f"/shift takes on or off, not {text[:40]!r}")
        self._session.options.shift = text == "on" if text else not self._session.options.shift
        does = "drops the oldest turns" if self._session.options.shift else "ends the answer"
        remark(f"a full context {does}")

    def _save(self, text: str) -> None:
        session = self._session
        force, name = text.startswith("--force "), text.removeprefix("--force ").strip()
        path = _path(name, "save")
        known = path.resolve() in session.files
        if not (known or force or not path.exists() or session.reader.agrees(f"{name} exists; overwrite it?")):
            raise RequestError(f"{name} exists and is not overwritten; give another name, or /save --force {name}")
        save(session.talk, path)
        session.files.add(path.resolve())
        remark(f"{counted(session.talk)} saved to {name}")

    def _load(self, name: str) -> None:
        path = _path(name, "load")
        self._session.talk = load(path)
        self._session.files.add(path.resolve())
        remark(f"{counted(self._session.talk)} loaded from {name}")

    def _prompt(self, _: str) -> None:
        talk = self._session.talk
        if not talk.messages:
            raise RequestError("there is no message yet, and so no prompt to show")
        write(self._session.render(talk).text + "\n")

    def _cache(self, _: str) -> None:
        report = self.report
        if report is None:
            raise RequestError("there is no prompt yet to look for in the cache")
        remark(str(report))
        if report.before or report.now:
            remark(f"  then: {_short(report.before)}\n   now: {_short(report.now)}")

    def _quit(self, _: str) -> None:
        self._session.ended = True


def _path(name: str, command: str) -> Path:
    if not name or "\0" in name:
        raise RequestError(f"/{command} needs the name of a file: /{command} FILE")
    return Path(name).expanduser()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line[:40]}..."' if len(line) > 40 else f'"{line}"'
