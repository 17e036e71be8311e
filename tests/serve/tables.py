"""The tables of fields in docs/clients.md, made from the schemas: `python -m tests.serve.tables`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenwright.serve.anthropic import bodies as anthropic_schema
from tokenwright.serve.http.fields import Body, Refused, parts, rule
from tokenwright.serve.ollama import bodies as ollama_schema
from tokenwright.serve.openai import bodies as openai_schema
from tokenwright.serve.openai.responses import bodies as responses_bodies

ROW = 24  # names in a row
MANY = 2  # places of a field that are named one by one
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BODIES: dict[str, tuple[type[Body], ...]] = {
    "completions, chats and embeddings": (
        openai_schema.CompletionBody,
        openai_schema.ChatBody,
        openai_schema.EmbeddingBody,
    ),
    "responses": (responses_bodies.Create, responses_bodies.InputTokens),
    "Anthropic": (anthropic_schema.Messages, anthropic_schema.CountTokens),
    "Ollama": (ollama_schema.Generate, ollama_schema.Chat, ollama_schema.OllamaEmbed, ollama_schema.OllamaEmbeddings),
}


def refusals(body: type[Body], before: str = "") -> Iterator[tuple[str, Refused]]:
    for path, part in parts(body, before):
        for name, refusal in rule(part).refused.items():
            yield f"{path}{name}", refusal


def drops(body: type[Body], before: str = "") -> Iterator[tuple[str, str]]:
    for path, part in parts(body, before):
        for name, why in rule(part).harmless.items():
            yield f"{path}{name}", why


def batched(names: list[str], size: int) -> list[list[str]]:
    return [names[at : at + size] for at in range(0, len(names), size)]


def accepted(refusal: Refused) -> str:
    """The values that a refused field may have."""
    return ", ".join(f"`{json.dumps(value)}`" for value in refusal.neutral[:3]) + (", ..." * (len(refusal.neutral) > 3))


def table(bodies: tuple[type[Body], ...]) -> str:
    """The refused fields of an API and the harmless ones, in the order of their names; `*`: in many places."""
    rows = {(name, accepted(why), why.why) for body in bodies for name, why in refusals(body)}
    lines = [f"| `{name}` | {values} | {why} |" for name, values, why in sorted(rows)]
    places: dict[str, set[str]] = {}
    for body in bodies:
        for name, _ in drops(body):
            places.setdefault(name.rpartition(".")[2], set()).add(name)
    harmless = sorted(
        f"`{name}`" for leaf, names in places.items() for name in ([f"*.{leaf}"] if len(names) > MANY else names)
    )
    return "\n".join(
        [
            "| Refused | But accepted | Instead |",
            "|---|---|---|",
            *lines,
            "",
            "| Without effect |",
            "|---|",
            *(f"| {', '.join(row)} |" for row in batched(harmless, ROW)),
        ]
    )


def written(page: str) -> str:
    """The page with its tables as they must be: each stands between two comments with the name of its API."""
    tables = {name: table(bodies) for name, bodies in BODIES.items()}
    for name in tables:
        mark = re.escape(f"<!-- fields: {name} -->")
        found = re.compile(rf"({mark}\n).*?(\n{mark})", re.DOTALL)
        page = found.sub(lambda match: match[1] + tables[name] + match[2], page)  # noqa: B023  (called at once)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
