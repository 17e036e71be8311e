"""The command line: one file per command; this file registers them and turns errors into messages.

No module here imports torch before a command runs, so `--help` is quick. Generated text goes to stdout, everything
else to stderr. Exit codes: 0 success, 1 the engine failed or a comparison failed, 2 the request or the model was
refused, 130 interrupted.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tokenwright.cli.bench import bench
from tokenwright.cli.cache import cache
from tokenwright.cli.chat import chat
from tokenwright.cli.explore import explore
from tokenwright.cli.generate import generate
from tokenwright.cli.inspect import inspect
from tokenwright.cli.models import models, pull, rm
from tokenwright.cli.plan import plan
from tokenwright.cli.quantize import quantize
from tokenwright.cli.race import race
from tokenwright.cli.version import version_text
from tokenwright.config import Environment
from tokenwright.errors import EngineError, TokenwrightError

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """Run a command; turn a TokenwrightError into one message on stderr and an exit code, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        debug = False
        try:
            debug = Environment.read().debug
            return super().invoke(ctx)
        except TokenwrightError as error:
            if debug:
                raise
            print(f"tokenwright: {error}", file=sys.stderr)
            raise typer.Exit(1 if isinstance(error, EngineError) else 2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    name="tokenwright",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show versions and what this build lacks."),
    ] = False,
) -> None:
    """Run a language model one token at a time and inspect every step."""


app.command()(generate)
app.command()(chat)
app.command()(explore)
app.command()(inspect)
app.command()(plan)
app.command()(quantize)
app.command()(race)
app.command()(bench)
app.command()(models)
app.command()(pull)
app.command()(rm)
app.command()(cache)


def main() -> None:
    """The entry point of the command `tokenwright`."""
    app()
