"""Panel Conversations: what the cache found of each turn, and why not more; only the caller's own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tokenwright.explorer.explorer import Explorer
from tokenwright.trace.wire import COUNTED, DERIVED, Wire

if TYPE_CHECKING:
    from tokenwright.llm.prompts.memory import PromptRecord

MOST_CONVERSATIONS = 8
MOST_TURNS = 64


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    name: str
    cause: str  # why tokens were computed again
    part: str
    change: str
    before: str  # the texts that differ, from `at` on
    now: str
    at: Annotated[int | None, Wire("Q", COUNTED, "", "from token", "the first token that differs or was missing")]
    prompt: Annotated[int, Wire("Q", COUNTED, "tokens", "prompt", "tokens of the prompt")]
    reused: Annotated[int, Wire("Q", COUNTED, "tokens", "reused", "prompt tokens whose K and V were found")]
    new: Annotated[int, Wire("Q", COUNTED, "tokens", "new", "prompt tokens that were computed for the first time")]
    again: Annotated[int, Wire("Q", COUNTED, "tokens", "again", "prompt tokens that were computed before, and again")]
    written: Annotated[int, Wire("Q", COUNTED, "tokens", "written", "tokens of the answer")]


@dataclass(frozen=True, slots=True)
class ConversationCard:
    title: str
    session: str  # the client's name for it
    turns: tuple[ConversationTurn, ...]
    tokens: Annotated[int, Wire("Q", COUNTED, "tokens", "tokens", "of the last prompt and its answer")]
    in_memory: Annotated[  # null: replicas have the pages
        int | None, Wire("Q", COUNTED, "tokens", "in memory", "of these, those that a next turn would find in memory")
    ]
    on_disk: Annotated[
        int | None, Wire("Q", COUNTED, "tokens", "on the disk", "of the others, those whose pages are on the disk")
    ]


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    session: str
    tokens: Annotated[int, Wire("Q", COUNTED, "tokens", "pinned", "tokens of the prefix")]
    left_s: Annotated[int, Wire("Q", DERIVED, "s", "left", "seconds until it ends, if it is not used again")]


@dataclass(frozen=True, slots=True)
class ConversationsCard:
    conversations: tuple[ConversationCard, ...]
    pins: tuple[PinnedPrefix, ...]
    reused: Annotated[int, Wire("Q", COUNTED, "tokens", "reused", "prompt tokens of all these turns that were found")]
    computed: Annotated[int, Wire("Q", COUNTED, "tokens", "computed", "prompt tokens of all these turns that were not")]


MESSAGES = (ConversationTurn, ConversationCard, PinnedPrefix, ConversationsCard)


def conversations(explorer: Explorer, salt: str = "", owner: str = "") -> ConversationsCard:
    """The conversations of a caller, by its key's name, and its pins, by its salt."""
    llm = explorer.llm
    found = _grouped(llm.llm_engine.prompts.records(owner))[:MOST_CONVERSATIONS]
    kept: list[tuple[int | None, int | None]] = [(None, None)] * len(found)
    pins: tuple[PinnedPrefix, ...] = ()
    if explorer.host.router is None:
        from tokenwright.explorer.views.kept_text import kept_of, pins_of

        kept = [kept_of(llm, one[-1]) for one in found]
        pins = tuple(PinnedPrefix(*one) for one in pins_of(llm, salt))
    each = tuple(_conversation(explorer, *pair) for pair in zip(found, kept, strict=True))
    turns = [turn for one in each for turn in one.turns]
    reused = sum(turn.reused for turn in turns)
    return ConversationsCard(each, pins, reused, sum(turn.prompt for turn in turns) - reused)


def _grouped(records: "list[PromptRecord]") -> "list[list[PromptRecord]]":
    """Each conversation's turns, the newest first. A turn continues the one that it was compared with."""
    groups: dict[str, list[PromptRecord]] = {}
    for record in reversed(records):
        group = groups.get(record.before) or next(
            (one for one in groups.values() if record.asked.session and one[-1].asked.session == record.asked.session),
            [],
        )
        group.append(record)
        groups[record.name] = group
    unique = {id(one): one for one in groups.values()}.values()
    return sorted(unique, key=lambda one: -one[-1].ended)


def _conversation(
    explorer: Explorer, records: "list[PromptRecord]", kept: tuple[int | None, int | None]
) -> ConversationCard:
    last, tokenizer = records[-1], explorer.llm.tokenizer
    first = records[0]  # whose last words are the user's own: an agent puts its context before them
    asked = next((one for one in reversed(first.parts) if one.role == "user"), first.parts[0] if first.parts else None)
    words = [] if asked is None else first.ids[asked.start : min(asked.stop, asked.start + 24)].tolist()
    turns = tuple(map(_turn, records[-MOST_TURNS:]))
    return ConversationCard(tokenizer.decode(words), last.asked.session, turns, len(last.ids), *kept)


def _turn(record: "PromptRecord") -> ConversationTurn:
    report = record.report
    assert report is not None, "a watch has made it"
    cause = str(report.cause) if report.known else ""
    again = min(report.again, report.computed)
    return ConversationTurn(
        name=record.name,
        cause=cause,
        part=report.part,
        change=report.change,
        before=report.before,
        now=report.now,
        at=report.at,
        prompt=report.prompt,
        reused=report.reused,
        new=report.computed - again,
        again=again,
        written=len(record.ids) - record.prompt,
    )
