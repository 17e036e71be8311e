"""The tables of refused fields in docs/clients.md, made from the schemas: `python -m tests.serve.tables`."""

import json
import re
import textwrap
from pathlib import Path

from tokenwright.serve.anthropic import bodies as anthropic_schema
from tokenwright.serve.http.fields import Body, Refused, accepted, refusals
from tokenwright.serve.ollama import bodies as ollama_schema
from tokenwright.serve.openai import bodies as openai_schema
from tokenwright.serve.openai import responses_bodies

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BODIES: dict[str, tuple[type[Body], ...]] = {
    "completions, chats and embeddings": (
        openai_schema.CompletionBody,
        openai_schema.ChatBody,
        openai_schema.EmbeddingBody,
    ),
    "responses": (responses_bodies.Create,),
    "Anthropic": (anthropic_schema.Messages, anthropic_schema.CountTokens),
    "Ollama": (ollama_schema.Generate, ollama_schema.Chat, ollama_schema.OllamaEmbed, ollama_schema.OllamaEmbeddings),
}


def neutral(refusal: Refused) -> str:
    """The values that a refused field may have besides those that ask for nothing in any API."""
    return ", ".join(f"`{json.dumps(value)}`" for value in refusal.neutral[:3]) + (", ..." * (len(refusal.neutral) > 3))


def table(bodies: tuple[type[Body], ...]) -> str:
    """The refused fields of an API, in the order of their names; the fields without effect below."""
    rows = {(name, neutral(why), why.why) for body in bodies for name, why in refusals(body)}
    lines = [f"| `{name}` | {values} | {why} |" for name, values, why in sorted(rows)]
    inert = sorted({name for body in bodies for name in (*body.without_effect, *accepted(body))})
    last = "\n\nAccepted, without effect:\n\n```\n" + textwrap.fill(" ".join(inert), 118) + "\n```" if inert else ""
    return "\n".join(["| Field | But accepted | Why |", "|---|---|---|", *lines]) + last


def written(page: str) -> str:
    """The page with its tables as they must be: each stands between two comments with the name of its API."""
    tables = {name: table(bodies) for name, bodies in BODIES.items()}
    for name in tables:
        mark = re.escape(f"<!-- refused: {name} -->")
        found = re.compile(rf"({mark}\n).*?(\n{mark})", re.DOTALL)
        page = found.sub(lambda match: match[1] + tables[name] + match[2], page)  # noqa: B023  (called at once)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
