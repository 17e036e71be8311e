"""Replaces the tokenizer's ids of earlier answers in a prompt by the ids that the model wrote.

A client returns an answer as text, which often tokenises differently, above all after a grammar; then all K and V
from there on would be computed again. So a rendered conversation is compared with its owner's remembered ones of the
same model. As long as both have the same bytes, with control tokens at the same places, the prompt takes the remembered
ids, up to the last place where a token begins in both. Its text and control tokens stay the same. The conversation
with the longest match counts, then the newest; so ids depend only on request and memory.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tokenwright.llm.prompts.memory import Ids, PromptMemory, PromptTerms
    from tokenwright.text import Rendered, Tokenizer

MOST_FOLLOWED = 4  # remembered prompts that are compared by their bytes
_RUN = 256  # tokens compared at once


class EqualTokens(NamedTuple):
    """Tokens with equal bytes in a prompt from `at` on, and in a remembered one from `theirs` on."""

    at: int
    theirs: int
    length: int


def with_written_ids(
    rendered: "Rendered", asked: "PromptTerms", memory: "PromptMemory", tokenizer: "Tokenizer"
) -> "Rendered":
    """The prompt with the ids that the model wrote for its owner's remembered answers."""
    known = [one.ids for one in memory.recent(asked) if one.asked.model == asked.model and one.conversation]
    if not known or not memory.resumes:
        return rendered
    ids = rendered.ids
    mine = np.frombuffer(array("I", ids), np.uint32)  # half the time of np.array
    table = tokenizer.bytes_table(skip_special=False)
    control = frozenset(tokenizer.control.ids.values()) | tokenizer.special_ids
    best = 0
    chosen: tuple[list[EqualTokens], Ids] | None = None
    each = sorted(((_common(mine, theirs), at) for at, theirs in enumerate(known)), key=lambda pair: -pair[0])
    for common, number in each[:MOST_FOLLOWED]:
        found = equal_runs(ids, known[number], common, table, control) if common else []
        if len(found) > 1 and (reached := found[-1].at + found[-1].length) > best:
            best, chosen = reached, (found, known[number])
    if chosen is None:
        return rendered
    runs, earlier = chosen
    last = runs[-1]
    whole = (*earlier[: last.theirs + last.length].tolist(), *ids[last.at + last.length :])
    return replace(rendered, ids=whole, marks=tuple(_moved(rendered.marks, runs)))


def _common(mine: "Ids", theirs: "Ids") -> int:
    most = min(len(mine), len(theirs))
    differ = mine[:most] != theirs[:most]
    return int(differ.argmax()) if differ.any() else most


def equal_runs(
    ids: Sequence[int], earlier: "Ids", start: int, table: Mapping[int, bytes | None], control: Collection[int]
) -> list[EqualTokens]:
    """The runs of tokens with equal bytes, in order, after the first `start` equal ones.

    Each run, even an empty one, begins where a token begins in both. A control token equals only itself.
    """
    runs = [EqualTokens(0, 0, start)]
    other_ids: tuple[int, ...] = tuple(earlier[start:].tolist())
    at, theirs = start, 0
    one = other = b""  # bytes of the last token of each that are still to be compared
    while True:
        if not one and not other and theirs:
            count = _equal(ids, at, other_ids, theirs)
            runs.append(EqualTokens(at, start + theirs, count))
            at, theirs = at + count, theirs + count
        if not one:
            if at == len(ids) or ids[at] in control:
                return runs
            one, at = table[ids[at]] or b"", at + 1
        if not other:
            if theirs == len(other_ids) or other_ids[theirs] in control:
                return runs
            other, theirs = table[other_ids[theirs]] or b"", theirs + 1
        length = min(len(one), len(other))
        if not length or one[:length] != other[:length]:
            return runs
        one, other = one[length:], other[length:]


def _equal(ids: Sequence[int], at: int, others: Sequence[int], place: int) -> int:
    count, most = 0, min(len(ids) - at, len(others) - place)
    while count + _RUN <= most and ids[at + count : at + count + _RUN] == others[place + count : place + count + _RUN]:
        count += _RUN
    while count < most and ids[at + count] == others[place + count]:
        count += 1
    return count


def _moved(marks: Sequence[tuple[int, int]], runs: Sequence[EqualTokens]) -> list[tuple[int, int]]:
    found, number = [], 0
    for token, char in marks:
        while number + 1 < len(runs) and runs[number + 1].at <= token:
            number += 1
        at, theirs, length = runs[number]
        if token <= at + length or number + 1 == len(runs):
            found.append((token - at + theirs, char))
    return found
