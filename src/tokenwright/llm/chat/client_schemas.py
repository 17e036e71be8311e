"""A request's schemas as its grammar holds them: its tools', and its answer's.

A client's schema may be more than a grammar can enforce. What cannot be enforced is left out and named, where the
client did not ask for strictness. All work on them is done in grammar workers, within one budget for the request.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenwright.decode.grammars.grammar import Grammars
from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.engine import Grammar
from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_request import Tool
from tokenwright.sampling_params import MOST_GRAMMAR


@dataclass(slots=True)
class _ClientSchema:
    """One schema. given: the client's, in JSON; held: what the grammar holds. owner, part: as errors name it."""

    name: str
    owner: str
    part: str
    strict: bool
    given: str
    held: Grammar
    left_out: bool = False


class ClientSchemas:
    """Raises RequestError for a strict schema of which something would be left out.

    left_out: what the grammar does not hold, such as "tools.search.uniqueItems", or "schema" for a whole one.
    """

    def __init__(self, grammars: Grammars, budget: Budget, tools: Sequence[Tool], answer: Grammar | None) -> None:
        self._grammars, self._budget = grammars, budget
        self._tools, self._answer = tools, answer
        self._losses = 0
        self.left_out: list[str] = []
        self._of_tools = [
            self._held(f"tools.{tool.name}", f"tools: {tool.name}", "parameters", tool.strict, _arguments(tool))
            for tool in tools
        ]
        self._of_answer = None
        if answer is not None and answer.client:
            owner = answer.strict or "the form of the answer"
            self._of_answer = self._held("schema", owner, "schema", bool(answer.strict), answer)

    @property
    def tools(self) -> list[Tool]:
        """The tools with the schemas that are enforced."""
        pairs = zip(self._tools, self._of_tools, strict=True)
        return [replace(tool, parameters=json.loads(schema.held.text)) for tool, schema in pairs]

    @property
    def answer(self) -> Grammar | None:
        return self._answer if self._of_answer is None else self._of_answer.held

    def loosen(self, error: RequestError) -> None:
        """Leave out the schemas of which no grammar can be made; where all can be, or for the second time, all.

        error: why no grammar of the request can be made. Raises RequestError: for a schema that is wrong in itself,
        for a strict one, and the error itself where there is nothing to leave out.
        """
        self._losses += 1
        schemas = [one for one in (*self._of_tools, self._of_answer) if one is not None and not one.left_out]
        failing = []
        if self._losses == 1:
            failing = [one for one in schemas if self._grammars.complaint(one.held, self._budget)]
        for one in failing or schemas:
            if place := self._grammars.mistake(one.given, self._budget):
                raise RequestError(f"{one.owner}: {place} of its {one.part} is wrong: {error}") from None
            if one.strict:
                raise RequestError(f"{one.owner} is strict, and its {one.part} cannot be enforced: {error}") from None
            self._leave_out(one)
        if not schemas:
            raise error

    def _held(self, name: str, owner: str, part: str, strict: bool, given: Grammar) -> _ClientSchema:
        """What can be held of a client's schema. Raises RequestError where it is strict, and that is not all."""
        whole = name if name == part else f"{name}.{part}"
        schema = _ClientSchema(whole, owner, part, strict, given.text, replace(given, client=False))
        found = self._grammars.enforceable(given.text, self._budget)
        if found is not None and len(found[0]) > MOST_GRAMMAR:  # written out it is more than a grammar may have
            found = None
        if strict and (found is None or found[1]):
            place = f"its {part}" if found is None else found[1][0]
            raise RequestError(
                f"{owner} is strict, and {place} cannot be enforced here; leave it out, or set strict to false"
            )
        if found is None:
            self._leave_out(schema)
        else:
            schema.held = replace(schema.held, text=found[0])
            self.left_out += [f"{name}.{place.rpartition('.')[2]}" for place in found[1]]
        return schema

    def _leave_out(self, schema: _ClientSchema) -> None:
        """Hold the type of a schema alone."""
        kind = json.loads(schema.given).get("type")
        loose = {"type": kind} if isinstance(kind, str) else {}
        schema.held, schema.left_out = replace(Grammar.json_schema(loose), whitespace=schema.held.whitespace), True
        self.left_out.append(schema.name)


def _arguments(tool: Tool) -> Grammar:
    """The schema of a tool's arguments. Raises RequestError for one that cannot be written."""
    try:
        return Grammar("json_schema", json.dumps(tool.parameters), client=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tools: the parameters of {tool.name} cannot be written as JSON: {error}") from None
