"""Finds why tokens of a prompt were computed although an earlier prompt had the same or similar ones.

The first token that differs from an earlier prompt and its answer shows what the client, template or tokenizer did; if
the cache found less than the texts share, the cache is the cause. Hashes of pages keep the work proportional to the
difference.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenwright.engine.pictures import Spans
from tokenwright.llm.prompts.memory import SHORT, Ids, PromptRecord, PromptTerms
from tokenwright.llm.prompts.provenance import PromptPart, part_at
from tokenwright.llm.prompts.report import CacheReport, Cause, Change

if TYPE_CHECKING:
    from tokenwright.text import Tokenizer

SHOWN = 24  # tokens that a report shows of a differing text
MOST_READ = 65_536  # tokens of an answer that are compared
COMPACTED = 3  # dropped messages that make a compaction, if no message after them was kept
FindParts = Callable[[], tuple[PromptPart, ...]]


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Facts of the engine about a prompt, of which the first `reused` tokens were found."""

    reused: int
    evicted: Callable[[bytes], float | None]  # by hash: monotonic seconds of a page's eviction; None: unknown
    states: bool = False  # the model has recurrent states
    apart: bool = False  # each replica has its own pages
    declined: int = 0  # tokens on the disk that were faster to compute


@dataclass(frozen=True)
class NewPrompt:
    asked: PromptTerms
    ids: Sequence[int]
    find_parts: FindParts
    pictures: Spans = ()

    @cached_property
    def parts(self) -> tuple[PromptPart, ...]:
        return self.find_parts() or (PromptPart(0, len(self.ids), "prompt"),)

    @cached_property
    def tokens(self) -> Ids:
        return np.array(self.ids, np.uint32)

    @cached_property
    def texts(self) -> list[bytes]:
        return list(_messages(self.parts, self.tokens, 0, self.pictures, system=False).values())


@dataclass(frozen=True, slots=True)
class _Place:
    """The place where a prompt begins to differ from an earlier text."""

    cause: Cause
    part: PromptPart
    change: Change = ""


def explain(
    new: NewPrompt, old: PromptRecord, common: int, facts: CacheFacts, tokenizer: "Tokenizer", now: float
) -> CacheReport:
    """Compare a prompt with an earlier one. common: their first tokens. now: in monotonic seconds."""
    most = min(old.computed, old.kept, len(new.ids) - 1)  # tokens that could have been found
    both = min(common, most)
    found = CacheReport(len(new.ids), facts.reused, compared=old.name, common=common)
    again, at = most - facts.reused, facts.reused
    if again <= 0:
        return found
    if (other := old.asked.model != new.asked.model) or old.asked.salt != new.asked.salt:
        again = both - facts.reused
        return replace(found, cause=Cause.MODEL if other else Cause.KEY, again=again, at=0) if again > 0 else found
    lost = _lost(old, both, facts, now) if at + old.page_size <= both else None
    if lost is None and common >= most:
        return replace(found, cause=Cause.PLACE, again=again, at=at)  # no part is the cause
    if lost is not None:
        return replace(found, again=again, at=at, part=str(part_at(new.parts, at)), **lost)
    if (place := _difference(new, old, common, tokenizer)) is None:
        return found
    return replace(
        found,
        cause=place.cause,
        again=again,
        at=common,
        part=str(place.part),
        message=place.part.message if place.part.message >= 0 else None,
        change=place.change,
        before=tokenizer.decode(old.ids[common : common + SHOWN].tolist(), skip_special=False),
        now=tokenizer.decode(new.ids[common : common + SHOWN], skip_special=False),
    )


def _lost(old: PromptRecord, stop: int, facts: CacheFacts, now: float) -> dict[str, Any] | None:
    """Why pages of common text were not found, and up to which token; None: a recurrent state was not cached."""
    size = old.page_size
    if facts.declined >= size:
        return {"cause": Cause.DISK}
    pages = range(facts.reused // size, stop // size)
    times = [at for page in pages if (at := facts.evicted(bytes(old.hashes[SHORT * page : SHORT * (page + 1)])))]
    if not times:
        return None if facts.states else {"cause": Cause.ELSEWHERE if facts.apart else Cause.EVICTED}
    pinned = old.asked.pinned_s
    expired = pinned > 0 and min(times) >= old.ended + pinned
    return {"cause": Cause.EXPIRED if expired else Cause.EVICTED, "evicted_s": now - min(times)}


def _difference(new: NewPrompt, old: PromptRecord, common: int, tokenizer: "Tokenizer") -> _Place | None:
    """The part with the first token that differs; None: no computed token comes again."""
    theirs, mine = part_at(old.parts, common), part_at(new.parts, common)
    if common >= (old.parts[-1].stop if old.parts else old.prompt):
        return _of_answer(new, old, common, mine, tokenizer)
    kinds, roles = {theirs.kind, mine.kind}, {theirs.role, mine.role}
    after, next_ = _after(old.parts, theirs), _after(new.parts, mine)
    if after.kind == "thoughts" and mine.kind != "thoughts" and after.message == mine.message:
        return _Place(Cause.THOUGHTS, after)
    if old.asked.settings != new.asked.settings and not kinds.isdisjoint(("template", "system")):
        return _Place(Cause.FORMAT, mine)
    if "tools" in (after.kind, next_.kind):
        return _Place(Cause.TOOLS, next_ if next_.kind == "tools" else after)
    first = min(_opening(old.parts), _opening(new.parts))
    if common < max(_opening(old.parts), _opening(new.parts)) and (
        "system" in kinds or _leading(theirs) or _leading(mine)
    ):
        return _Place(Cause.SYSTEM, mine if "system" in (mine.kind, mine.role) else theirs)
    if common < first and len(roles) == 1:
        return _Place(Cause.SYSTEM, mine)
    if new.asked.edited:
        return _Place(Cause.COMPACTED, mine)
    for one, other in ((theirs, mine), (mine, theirs)):
        if one.kind == "message" and one.start < common and other.kind == "template":  # the message ends here
            return _Place(Cause.MESSAGE, one, "edited")
    return _of_messages(new, old, theirs, mine, _answer(old, tokenizer))


def _after(parts: Sequence[PromptPart], part: PromptPart) -> PromptPart:
    return part_at(parts, part.stop) if part.kind == "template" and part.stop < sys.maxsize else part


def _leading(part: PromptPart) -> bool:
    return part.role in ("system", "developer")


def _opening(parts: Sequence[PromptPart]) -> int:
    return next((part.start for part in parts if part.message >= 0 and not _leading(part)), 0)


def _of_answer(
    new: NewPrompt, old: PromptRecord, common: int, mine: PromptPart, tokenizer: "Tokenizer"
) -> _Place | None:
    """The cause of a difference in the model's own answer, or in the template's text before it."""
    if mine.kind != "prompt" and mine.role != "assistant":
        return None if mine.message >= 0 or mine.kind == "template" else _Place(Cause.TOOLS, mine)
    ids = old.ids[common : common + MOST_READ].tolist()
    while ids and ids[-1] in tokenizer.special_ids:
        ids.pop()
    wrote = tokenizer.decode(ids, skip_special=False)
    came = tokenizer.decode(new.ids[common : common + 2 * len(ids) + SHOWN], skip_special=False)
    if old.thoughts is not None and old.thoughts[1] in wrote:
        answer = _letters(wrote.rpartition(old.thoughts[1])[2])
        if old.thoughts[1] not in came[: len(wrote)] and answer in _letters(came):
            return _Place(Cause.THOUGHTS, mine)
    cut = old.cut and _letters(wrote).startswith(_letters(tokenizer.decode(new.ids[common : mine.stop])))
    own_words = mine.kind == "prompt" and common == old.prompt  # it may continue the prompt without the answer
    if cut or mine.kind == "calls" or (_letters(came).startswith(_letters(wrote)) and (wrote.strip() or not own_words)):
        return _Place(Cause.RETOKENISED, mine)
    return None if own_words else _Place(Cause.MESSAGE, mine, "edited")


def _letters(text: str) -> str:
    """A text without white space, which templates and JSON may change."""
    return "".join(text.split())


def _answer(old: PromptRecord, tokenizer: "Tokenizer") -> bytes:
    stop = len(old.ids)
    while stop > old.prompt and int(old.ids[stop - 1]) in tokenizer.special_ids:
        stop -= 1
    return old.ids[old.prompt : stop].tobytes()


def _of_messages(new: NewPrompt, old: PromptRecord, theirs: PromptPart, mine: PromptPart, answer: bytes) -> _Place:
    if mine.kind == "prompt":
        return _Place(Cause.MESSAGE, mine, "edited")
    were = _messages(old.parts, old.ids[: old.prompt], theirs.message, old.pictures)
    are = _messages(new.parts, new.tokens, mine.message, new.pictures)
    if not were or not are:
        return _Place(Cause.MESSAGE, mine, "edited")
    had, have = {*were.values(), answer}, set(are.values())
    gone = [message for message, text in were.items() if text not in have]
    fresh = next((at for at, text in enumerate(are.values()) if text in had), len(are))  # before the first kept one
    stays, kept = next(iter(were.values())) in have, fresh < len(are)
    if stays:
        return _Place(Cause.MESSAGE, mine, "inserted" if fresh else "reordered")
    first = theirs.start <= _opening(old.parts)
    fewer = len(gone) > fresh and (kept or (first and len(are) < len(were)))
    if fewer and len(gone) >= (2 if fresh and kept else COMPACTED):
        return _Place(Cause.COMPACTED, mine)
    return _Place(Cause.MESSAGE, mine, "edited") if fresh else _Place(Cause.MESSAGE, theirs, "dropped")


def _messages(
    parts: Sequence[PromptPart], ids: Ids, first: int, pictures: Spans = (), *, system: bool = True
) -> dict[int, bytes]:
    """The tokens and pictures of each message from `first` on, without reasoning, which templates drop."""
    found: dict[int, list[bytes]] = {}
    for start, stop, kind, message, _ in parts:
        if message >= first and (kind in ("message", "calls") or (system and kind == "system")):
            found.setdefault(message, []).append(ids[start:stop].tobytes())
    for one in pictures:
        if (message := part_at(parts, one.start).message) in found:
            found[message].append(one.pixels.digest)
    return {message: b"".join(texts) for message, texts in found.items()}


def related(new: NewPrompt, old: PromptRecord, common: int, tokenizer: "Tokenizer") -> bool:
    """Whether two prompts seem to be of one conversation, judged by their texts.

    They are if they share the first message after system and tools, or a third of their messages, at least two; or if
    they differ only after system and tools and are of one session, or the old answer is among the new messages. If a
    session has only first messages, or other conversations have its name, half of the tokens must be equal. Without
    messages one text must continue the other, over at least a page: less is not cached.
    """
    goes_on = common >= min(old.prompt, old.computed, len(new.ids))
    if not new.parts or new.parts[0].kind == "prompt" or not old.conversation:
        shorter = min(old.prompt, len(new.ids))
        return common >= old.page_size and (goes_on or common > max(shorter - old.page_size, shorter // 2))
    if goes_on:
        return True
    same = bool(new.asked.session) and new.asked.session == old.asked.session
    opened = common - max(_opening(old.parts), _opening(new.parts))
    were, are = list(_messages(old.parts, old.ids, 0, old.pictures, system=False).values()), new.texts
    if not were or not are:
        return False
    grown = len(were) + len(are) > 2 and not new.asked.shared
    if same and opened >= 0 and (grown or 8 * opened > min(len(were[0]), len(are[0]))):
        return True
    if (opened > 0 and _answer(old, tokenizer) in are) or were[0] == are[0]:
        return True
    return len(set(were) & set(are)) >= max(2, min(len(were), len(are)) / 3)
