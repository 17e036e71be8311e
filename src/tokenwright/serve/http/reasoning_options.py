"""How a request asks a model to reason, in any API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenwright.serve.http.api import RefusedRequest
from tokenwright.serve.service.types import Problem

# What the server itself says to a template.
_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token")


@dataclass(frozen=True, slots=True)
class Thinking:
    """on: whether the model shall reason first; None: as its template says. budget: tokens of reasoning at most.

    variables: of the chat template.
    """

    on: bool | None = None
    budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, on: bool | None, budget: int | None, effort: str | None, variables: Mapping[str, Any] | None = None
    ) -> Thinking:
        """effort: for templates that know levels. Raises RefusedRequest for a variable that is the server's own."""
        given = dict(variables or {})
        if taken := next((name for name in _OWN if name in given), None):
            place = f"chat_template_kwargs.{taken}"
            raise RefusedRequest(Problem(400, "invalid", f"{place} is a field of the request, not a variable", place))
        if effort not in (None, "none", "default", "auto"):
            given.setdefault("reasoning_effort", effort)
        return cls(on, None if budget is None or budget < 0 else budget, given)
