"""How `--help` looks: paragraphs as wide as the terminal, no type beside a flag, arguments as they are declared."""

import inspect
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand


def help_of(command: Callable[..., Any]) -> str:
    """The docstring of a command, a line to a paragraph: typer keeps the line breaks of all but the first."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class PlainFlags:
    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if one.param_type_name == "option" and one.is_flag:
                one.metavar = ""
        return found


class Command(PlainFlags, TyperCommand):
    """A command whose usage names its arguments as their `metavar` does, in capitals like the text of the help."""

    def collect_usage_pieces(self, _: Any) -> list[str]:
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(one.metavar) for one in arguments)]
