"""JSON schemas of clients, made such that a grammar can enforce them.

enforcing.py    the schema that a grammar gets, and the places of what it leaves out
references.py   references, and the types and listed values of schemas
one_of.py       compares the alternatives of a oneOf
patterns.py     regular expressions as llguidance reads them
mistakes.py     where a schema is wrong in itself
"""

from tokenwright.decode.schemas.enforcing import LACKING, answered, enforceable
from tokenwright.decode.schemas.mistakes import mistake_in

__all__ = ["LACKING", "answered", "enforceable", "mistake_in"]
