"""Rewrite clients' JSON schemas so that a grammar can enforce them."""

from tokenwright.decode.schemas.enforcing import LACKING, answered, enforceable
from tokenwright.decode.schemas.mistakes import mistake_in

__all__ = ["LACKING", "answered", "enforceable", "mistake_in"]
