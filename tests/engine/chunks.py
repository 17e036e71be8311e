"""Chunks without an engine: what `flatten` reads of one."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenwright.engine import LogitsNeeded
from tokenwright.engine.page_table import Table


@dataclass(frozen=True)
class BareChunk:
    """`tokens` from position `start` on. `tables`: for each group the pages of its sequence."""

    tokens: Sequence[int]
    start: int
    tables: Sequence[Table]
    limit: int
    logits_needed: LogitsNeeded = LogitsNeeded.ALL
