"""The command line: this file registers the commands, one file each, and turns errors into messages.

No module here imports torch before a command runs, so `--help` is quick. Generated text goes to stdout, everything
else to stderr. docs/commands.md lists the exit codes.
"""

import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tokenwright
from tokenwright.cli.commands.bench import bench
from tokenwright.cli.commands.chat import chat
from tokenwright.cli.commands.explore import explore
from tokenwright.cli.commands.generate import generate
from tokenwright.cli.commands.inspect import inspect
from tokenwright.cli.commands.models import cache, models, pull, rm
from tokenwright.cli.commands.plan import plan
from tokenwright.cli.commands.quantize import quantize
from tokenwright.cli.commands.race import race
from tokenwright.cli.commands.serve import serve
from tokenwright.cli.commands.verify import verify
from tokenwright.cli.options import defaults as settings
from tokenwright.cli.options.foreign import hint_of_command, hint_of_option, options_of, short_foreign, spoken
from tokenwright.cli.terminal import interrupt, output
from tokenwright.environment import Environment
from tokenwright.errors import EngineError, RequestError, TokenwrightError
from tokenwright.llm.web_page import build_notes, why_no_page


def version_text(folders: Iterable[str] = tokenwright.__path__) -> str:
    """The versions of this installation; `folders` are searched for the build's `_build.json`."""
    torch = f"Python {platform.python_version()}, torch {_torch_version()}"
    return "\n".join([f"tokenwright {tokenwright.__version__}", torch, _gpu_line(), *_build_lines(folders)])


def _gpu_line() -> str:
    from tokenwright.backends.device import accelerator_of, resolve_device
    from tokenwright.errors import RequestError

    try:
        return f"GPU: {accelerator_of(resolve_device('gpu')).name}"
    except RequestError as error:
        return f"GPU: {error}"


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return "is not installed (an optional extra)"


def _build_lines(folders: Iterable[str]) -> list[str]:
    notes = build_notes(folders)
    if not notes:
        return ["not installed: running from a folder of sources"]
    lines = []
    if notes["cxx"]:
        lines.append(f"native kernels, built with {notes['cxx']}")
    else:
        lines.append(
            "built without a C++ compiler: no native kernels, the slow reference kernels in torch are used "
            "(install g++ or clang++, then Tokenwright again)"
        )
    web = notes.get("web")
    lines.append(f"the web page: {web}" if web else f"built without the web page: {why_no_page(notes)}")
    return lines


def help_of(command: Callable[..., Any]) -> str:
    """A command's docstring with one line for each paragraph, since typer keeps line breaks."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class PlainFlags:
    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if one.param_type_name == "option" and one.is_flag:
                one.metavar = ""
        return found


class Command(PlainFlags, TyperCommand):
    def collect_usage_pieces(self, _: Any) -> list[str]:
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(one.metavar) for one in arguments)]


FAILED, REFUSED = 1, 2  # exit codes
POSITIONAL = "named"  # the parameter of a model given as an argument
USAGE: type[Exception] = typer.BadParameter.__mro__[1]  # click's UsageError, wherever typer keeps click


# typer's messages, and what replaces them.
_OURS = (
    (r"\. Did you mean", "; did you mean"),
    (r" \(Possible options: (.*)\)$", r"; did you mean \1?"),
    (r"(?<=: )'.*' is not a valid float", "it must be a number"),
    (r"(?<=: )'.*' is not a valid int", "it must be a whole number"),
    (r"[Gg]ot unexpected extra arguments? ?(?:\(s\) )?\((.*)\)", r"unexpected: \1; a text with spaces needs quotes"),
)


_OPTION, _COMMAND = re.compile(r"No such option: (\S+?)(?: |\.|$)"), re.compile(r"No such command '(.*?)'")


class CommandGroup(PlainFlags, TyperGroup):
    """Turns a command's error into a message on stderr and an exit code, without a traceback."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        extra["standalone_mode"] = False  # errors come back as exceptions
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == ["help"]:
            words = [*words[1:2], "--help"]
        try:
            self._refuse_letters(words)
            code = super().main(words, **extra)
        except KeyboardInterrupt:
            code = interrupt.INTERRUPTED
        except USAGE as error:
            code = self._report(error, words) if words else self._help(error)
        except Exception as error:
            if _debugging():
                raise
            code = self._report(error, words)
        sys.exit(code if isinstance(code, int) else 0)

    def _refuse_letters(self, words: Sequence[str]) -> None:
        found = short_foreign(words)
        if found is not None:
            flags = self._flags(self.commands.get(words[0]))
            raise RequestError(f"no such option: {found}{hint_of_option(found, flags)}")

    def _flags(self, command: Any) -> list[str]:
        return [] if command is None else [flag for one in command.params for flag in one.opts if flag[0] == "-"]

    def invoke(self, ctx: Any) -> Any:
        Environment.read()  # refuses malformed variables
        ctx.default_map = self._defaults()
        return super().invoke(ctx)

    def _defaults(self) -> dict[str, dict[str, Any]]:
        chosen = {key.replace("-", "_"): value for key, value in settings.read().items() if key in settings.DEFAULTS}
        maps = {}
        for name, command in self.commands.items():
            own = {parameter.name for parameter in command.params}
            if POSITIONAL in own:  # `the_model` reads the setting
                own -= {"model"}
            if name == "quantize":  # its --weights is a format to write
                own -= {"weights"}
            maps[name] = {key: value for key, value in chosen.items() if key in own}
        return maps

    def _help(self, error: Any) -> int:
        error.show()
        return REFUSED

    def _report(self, error: Exception, words: Sequence[str]) -> int:
        code = REFUSED if isinstance(error, (TokenwrightError, USAGE, OSError)) else FAILED
        code = FAILED if isinstance(error, EngineError) else code
        message = self._message(error, words)
        output.complain(f"tokenwright: {message}")
        if "--json" in words:
            kind = "UsageError" if isinstance(error, USAGE) else type(error).__name__
            output.write_json({"error": {"type": kind, "message": message, "exit_code": code}})
        return code

    def _message(self, error: Exception, words: Sequence[str]) -> str:
        command = next((self.commands[word] for word in words[:1] if word in self.commands), None)
        if isinstance(error, TokenwrightError):
            return spoken(error, {} if command is None else options_of(command.params, words))
        if isinstance(error, USAGE):
            asked = "tokenwright" if command is None else f"tokenwright {command.name}"
            said = error.format_message().strip().rstrip(".").replace("\n", " ")  # type: ignore[attr-defined]
            if (option := _OPTION.match(said)) is not None:
                said = f"no such option: {option[1]}{hint_of_option(option[1], self._flags(command))}"
            if (named := _COMMAND.match(said)) is not None:
                said = f"no such command {named[1]!r}{hint_of_command(named[1], list(self.commands))}"
            for theirs, ours in _OURS:
                said = re.sub(theirs, ours, said)
            return f"{said[:1].lower()}{said[1:]}{'' if said.endswith('?') else ';'} {asked} --help shows what there is"
        if isinstance(error, OSError) and error.filename is not None:  # a name that the system refuses, a full disk
            return f"{str(error.filename)[:200]} cannot be used: {error.strerror}"
        if isinstance(error, MemoryError):
            return "there is not enough memory for this; make the request smaller, or free some memory"
        defect = f"this is a defect of Tokenwright ({type(error).__name__}: {error})"
        return f"{defect}; please report it with what TOKENWRIGHT_DEBUG=1 shows"


def _debugging() -> bool:
    try:
        return Environment.read().debug
    except TokenwrightError:  # the error is about the environment
        return False


app = typer.Typer(
    cls=CommandGroup,
    name="tokenwright",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(version_text())
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions and what this build lacks.")
]


@app.callback()
def _options(version: Version = False) -> None:
    """Run a language model one token at a time and inspect every step."""


for _command in (
    *(generate, chat, serve, explore, inspect, plan, quantize, race, bench),
    *(models, pull, rm, cache, verify),
):
    app.command(cls=Command, help=help_of(_command))(_command)


def main() -> None:
    output.guard()
    try:
        app()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    lost = output.lost_output()
    if lost is not None and code in (0, None):
        print(f"tokenwright: standard output cannot be written ({lost.strerror}); text was lost", file=sys.stderr)
        code = output.LOST
    if code == interrupt.INTERRUPTED:
        interrupt.die()
    sys.exit(code)
