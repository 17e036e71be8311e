"""Watches one request's prompt: reports what the cache found and why, and remembers it (in a router, over replicas)."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from tokenwright.engine.port import RequestHandle
from tokenwright.engine.prefix_index import PrefixHashes
from tokenwright.llm.prompts import memory as memories
from tokenwright.llm.prompts.cause import CacheFacts, FindParts, NewPrompt, explain, related
from tokenwright.llm.prompts.report import CacheReport, Cause

if TYPE_CHECKING:
    from tokenwright.text import Tokenizer

log = logging.getLogger(__name__)

_NUMBERS = count(1)  # for answers without a name


@dataclass(frozen=True, slots=True)
class PromptOrigin:
    """The origin of a prompt. `parts` finds the parts of the request; `name` is the client's name of the answer."""

    asked: memories.PromptTerms = field(default_factory=memories.PromptTerms)
    parts: FindParts = tuple
    name: str = ""


@dataclass(frozen=True, slots=True)
class Watching:
    """Facts that the watches of one engine share. states, evicted, apart: as in `CacheFacts`."""

    memory: memories.PromptMemory
    tokenizer: "Tokenizer"
    model: str
    states: bool
    evicted: Callable[[bytes], float | None]
    apart: bool = False


class PromptWatch:
    def __init__(self, shared: Watching, handle: RequestHandle, origin: PromptOrigin) -> None:
        request = handle.sequence.request
        self.name = origin.name or f"answer-{next(_NUMBERS)}"
        self._asked = replace(origin.asked, model=f"{shared.model} {request.adapter}", salt=request.salt.hex())
        self._new = NewPrompt(self._asked, request.prompt, origin.parts, request.pictures)
        self._shared, self._handle = shared, handle
        self._began = time.monotonic()  # pages of texts that end later cannot have been found
        self._report: CacheReport | None = None

    @property
    def report(self) -> CacheReport:
        """The report, without seconds, known once a step has computed tokens of the request."""
        if self._report is None:
            try:
                found = self._explained()
            except Exception:  # an error in a report must not fail the request
                log.exception("the cause of a computed prompt could not be found")
                found = CacheReport(len(self._new.ids), self._handle.sequence.counts.prefix_hit)
            if self._handle.started is None:
                return found
            self._report = found
        return self._report

    def _explained(self) -> CacheReport:
        shared, counts, prompt = self._shared, self._handle.sequence.counts, len(self._new.ids)
        asked, reused, request = self._asked, counts.prefix_hit, self._handle.sequence.request
        missing = bool(asked.previous) and shared.memory.named(asked.owner, asked.previous) is None
        unshared = not request.cache or not request.share or request.hidden or request.prompt_logprobs_from is not None
        if unshared or reused + 1 >= prompt:
            return CacheReport(prompt, reused, missing=missing)
        best = self._compared
        if best is None:
            return CacheReport(prompt, reused, Cause.NOTHING_TO_COMPARE, missing=missing)
        facts = CacheFacts(reused, shared.evicted, shared.states, shared.apart, counts.declined)
        found = explain(self._new, *best, facts, shared.tokenizer, time.monotonic())
        if found.cause in (Cause.EVICTED, Cause.EXPIRED):
            own, others = shared.memory.since(best[0].ended, asked)
            found = replace(found, by_session=own, by_others=others)
        return replace(found, missing=missing)

    @cached_property
    def _compared(self) -> tuple[memories.PromptRecord, int] | None:
        """The earlier prompt to compare with (the client's, else the most similar), and how many tokens are common."""
        memory, asked, hashes = self._shared.memory, self._asked, self._hashes
        tokenizer = self._shared.tokenizer
        named = memory.named(asked.owner, asked.previous) if asked.previous else None
        if named is not None:
            return named, memories.common_tokens(named, self._new.ids, hashes)
        tried = [
            (one, memories.common_tokens(one, self._new.ids, hashes))
            for one in memory.recent(asked, before=self._began)
        ]
        tried.sort(key=lambda pair: -pair[1] * (1 + (pair[0].asked.model == asked.model)))  # another model counts half
        return next(((one, common) for one, common in tried if related(self._new, one, common, tokenizer)), None)

    @property
    def _hashes(self) -> PrefixHashes:
        return self._handle.sequence.prefix_hashes

    def ended(self, written: Sequence[int], cut: bool) -> None:
        """Remember the prompt and its answer. cut: as in `PromptRecord`."""
        try:
            self._remember(written, cut)
        except Exception:
            log.exception("a prompt could not be remembered")

    def _remember(self, written: Sequence[int], cut: bool) -> None:
        request, memory = self._handle.sequence.request, self._shared.memory
        if not request.cache or not request.share or request.hidden:
            return
        report, best = self.report, self._compared
        if best is not None and (best[1] >= best[0].prompt or report.reused > best[0].warmed[0] > 0):
            memory.close(best[0], report.reused)
        memory.worked(self._asked, report.computed + len(written))
        prompt, (before, common) = request.prompt, best or (None, 0)
        thoughts, pinned = request.thoughts, self._handle.sequence.counts.pinned
        marks = zip(request.retention.marks, pinned, strict=False)
        record = memories.PromptRecord(
            name=self.name,
            asked=replace(self._asked, pinned_s=max((mark.ttl_s for mark, tokens in marks if tokens), default=0.0)),
            ids=memories.kept_ids((*prompt, *written), common, before),
            prompt=len(prompt),
            parts=self._new.parts,
            root=self._hashes.root,
            hashes=memories.short_hashes(self._hashes),
            page_size=self._hashes.page_size,
            pictures=tuple(replace(one, pixels=replace(one.pixels, data=b"")) for one in self._hashes.pictures),
            thoughts=None if thoughts is None else (thoughts.start, thoughts.end),
            cut=cut,
            report=report,
            kept=self._handle.sequence.cacheable(len(prompt) + len(written)),
            before="" if before is None else before.name,
        )
        goes_on = before is not None and before.root == record.root and common >= before.computed
        memory.add(record, before if goes_on and common < len(record.ids) else None)
