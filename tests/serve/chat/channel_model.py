"""A tiny model whose template writes harmony's channels, with tokens of their own for the marks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.serve.talking import make_talker
from tokenwright.llm.chat.tool_forms.channels import MARKS

TEMPLATE = """\
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>
{{- m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def make_channels(folder: Path) -> Path:
    """A talker whose tokenizer has the marks."""
    made = make_talker(folder, template=TEMPLATE)
    path = made / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    like, first = tokenizer["added_tokens"][-1], len(tokenizer["model"]["vocab"])
    first = max(first, 1 + max(one["id"] for one in tokenizer["added_tokens"]))
    tokenizer["added_tokens"] += [like | {"id": first + n, "content": mark} for n, mark in enumerate(MARKS)]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return made
