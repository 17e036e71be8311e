"""Reports how much of a prompt the cache found, and the cause why not more, from a closed list."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

PROMPT_MEMORY = 64 * 2**20  # bytes for remembered prompts

Change = Literal["", "edited", "dropped", "inserted", "reordered"]


class Cause(StrEnum):
    """Why the cache did not find a whole prompt."""

    NOTHING_TO_COMPARE = "nothing_to_compare"  # no earlier prompt of this conversation is known
    MODEL = "model_changed"  # another model, adapter or cache format
    KEY = "key_changed"  # another salt
    TOOLS = "tools_changed"
    SYSTEM = "system_changed"
    MESSAGE = "message_changed"  # an earlier message was edited, dropped, inserted or reordered
    COMPACTED = "context_compacted"  # earlier messages were left out or replaced by fewer
    THOUGHTS = "thoughts_dropped"  # the template leaves out the reasoning of earlier answers
    RETOKENISED = "answer_retokenised"  # the model's own answer came back as other tokens
    FORMAT = "format_changed"  # the effort or the format changed, and with it the template's text
    EVICTED = "evicted"  # its pages were evicted for other texts
    ELSEWHERE = "other_replica"  # its pages are on a replica that was busier, or has ended
    EXPIRED = "expired"  # its pages were evicted after the time for which they had been pinned
    PLACE = "below_a_page"  # the texts differ inside a page, or where no recurrent state was cached
    DISK = "disk_slower"  # its pages were on the disk, where reading takes longer than computing


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How much of a prompt the cache found, and why not more."""

    prompt: int  # tokens of the prompt
    reused: int  # tokens that were found
    cause: Cause | None = None  # None: all that was known was found
    again: int = 0  # tokens of the earlier text that would have been found without the cause
    at: int | None = None  # the first token that differs or is missing
    part: str = ""  # the part of the request with that token
    message: int | None = None
    change: Change = ""
    before: str = ""  # the earlier text from there on
    now: str = ""  # this text from there on
    compared: str = ""  # the name of the earlier answer
    common: int = 0  # how many first tokens both share
    missing: bool = False  # the client named an unknown answer
    seconds: float = 0.0  # the time to compute as many tokens as `again`
    evicted_s: float | None = None  # how long ago the first page was evicted
    by_session: int = 0  # tokens that the session computed since then, or since the earlier answer
    by_others: int = 0  # tokens that all others computed since then

    @property
    def computed(self) -> int:
        return self.prompt - self.reused

    @property
    def known(self) -> bool:
        return self.cause is not None and self.cause is not Cause.NOTHING_TO_COMPARE

    def __str__(self) -> str:
        found = f"{self.reused:,} of {self.prompt:,} prompt tokens reused"
        if not self.known:
            return found + ("; nothing to compare with" if self.cause else "")
        again = f"{self.again:,} computed again" + (f" in {self.seconds:.2f} s" if self.seconds else "")
        where = f" at token {self.at:,}" if self.at is not None else ""
        what = f", {self.part}{' ' * bool(self.change)}{self.change}" if self.part else ""
        return f"{found}, {again}: {str(self.cause).replace('_', ' ')}{where}{what}"
