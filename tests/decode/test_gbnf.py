"""GBNF grammars mean in Lark what they mean in llama.cpp."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from tokenwright.decode.grammars.gbnf import is_gbnf, lark_of
from tokenwright.errors import RequestError

BYTES = LLTokenizer("byte")
SUM = """
# sums of numbers
root  ::= term ([-+*/] term)*   # several
term  ::= number | "(" root ")"
number ::= [0-9]+ ("." [0-9]{1,2})?
"""
LETTERS = 'root ::= "a\\x41\\u00e9\\n" Any-Name\nAny-Name ::= [^"\\\\\\]/]{2} . end?\nend ::= "\\"!"'


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, "%llguidance {}\n" + lark_of(grammar))
    assert not matcher.get_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "text", "good"),
    [
        (SUM, "1+2.25", True),
        (SUM, "(1-2)*3", True),
        (SUM, "1.234", False),
        (SUM, "1+", False),
        (LETTERS, "aA\u00e9\nxy.", True),
        (LETTERS, 'aA\u00e9\nxy\u20ac"!', True),
        (LETTERS, "aA\u00e9\nx/.", False),
        ('root ::= "yes" |\n  "no"', "no", True),
        ('root ::= ("a" | "b"){2,}', "aba", True),
        ('root ::= ("a" | "b"){2,}', "a", False),
    ],
)
def test_texts_are_those_of_the_grammar(grammar: str, text: str, good: bool) -> None:
    assert is_gbnf(grammar)
    assert accepts(grammar, text) is good


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('other ::= "a"', "no rule root"),
        ('::= "a"', "without a name"),
        ('root ::= "a', "unknown in line 1"),
        ("root ::= []", "empty class"),
        ('root ::= "a"\nroot2 := "b"', "unknown in line 2"),
    ],
)
def test_what_is_wrong_is_said(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lark_of(grammar)
