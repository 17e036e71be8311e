"""JSON schemas of clients, made such that a grammar can enforce them.

enforcing.py       the schema that a grammar gets, and the places of what it leaves out
mistakes.py        where a schema is wrong in itself
schema_logic.py    references, the types and values of schemas, and complements
schema_pairs.py    whether two schemas have values in common
schema_values.py   whether a value follows a schema
pattern_reader.py  reads a pattern as a tree
patterns.py        regular expressions: without look-ahead, complements, disjoint ones
"""

from tokenwright.decode.schemas.enforcing import LACKING, enforceable
from tokenwright.decode.schemas.mistakes import mistake_in

__all__ = ["LACKING", "enforceable", "mistake_in"]
