"""A client's schema whose alternatives, written out, are more than a grammar may have."""

import pytest

from tokenwright.decode.grammars.grammar_trials import Budget
from tokenwright.engine import Grammar
from tokenwright.errors import RequestError
from tokenwright.llm.chat.chat_processor import ClientSchemas
from tokenwright.sampling_params import MOST_GRAMMAR

GIVEN = '{"type": "object"}'


class Growing:
    """Rewrites every schema as one that is too long."""

    def enforceable(self, schema: str, budget: Budget) -> tuple[str, list[str]]:
        return " " * MOST_GRAMMAR + schema, []


def test_a_schema_that_grows_too_long_is_left_out() -> None:
    schemas = ClientSchemas(Growing, Budget(), (), Grammar("json_schema", GIVEN, client=True))
    assert schemas.left_out == ["schema"]
    assert schemas.answer is not None and schemas.answer.text == GIVEN


def test_a_strict_one_is_refused_by_its_name() -> None:
    with pytest.raises(RequestError, match="response_format is strict, and its schema cannot be enforced"):
        ClientSchemas(Growing, Budget(), (), Grammar("json_schema", GIVEN, client=True, strict="response_format"))
