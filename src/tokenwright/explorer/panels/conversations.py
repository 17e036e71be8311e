"""Panel Conversations: what the cache found of each turn, and why not more; only the caller's own."""

from dataclasses import dataclass
from typing import Annotated, Any

from tokenwright.explorer.explorer import Explorer
from tokenwright.llm.prompts.kept import KeptText
from tokenwright.llm.prompts.memory import PromptRecord
from tokenwright.trace.wire import COUNTED, DERIVED, Wire

MOST_CONVERSATIONS = 8
MOST_TURNS = 64
TOLD = ("part", "change", "before", "now", "at", "prompt", "reused")  # of a report


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
    in_memory: Annotated[
        int, Wire("Q", COUNTED, "tokens", "in memory", "of these, those that a next turn would find in memory")
    ]
    on_disk: Annotated[
        int, Wire("Q", COUNTED, "tokens", "on the disk", "of the others, those whose pages are on the disk")
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
    engine = explorer.llm.llm_engine
    found = _grouped(engine.prompts.records(owner))[:MOST_CONVERSATIONS]
    last = (one[-1] for one in found)
    texts = [KeptText(one.name, one.ids.tobytes(), one.root, one.page_size, one.pictures) for one in last]
    kept = engine.kept(texts, salt)
    pins = tuple(PinnedPrefix(*one) for one in kept.pins)
    each = tuple(_conversation(explorer, *pair) for pair in zip(found, kept.texts, strict=True))
    turns = [turn for one in each for turn in one.turns]
    reused = sum(turn.reused for turn in turns)
    return ConversationsCard(each, pins, reused, sum(turn.prompt for turn in turns) - reused)


def _grouped(records: list[PromptRecord]) -> list[list[PromptRecord]]:
    """Each conversation's turns, the newest first. A turn continues the one that it was compared with."""
    groups: dict[str, list[PromptRecord]] = {}
    sessions: dict[str, list[PromptRecord]] = {}  # by the names that no other conversation has
    for record in reversed(records):
        session = "" if record.asked.shared else record.asked.session
        group = groups.get(record.before) or (session and sessions.get(session)) or []
        group.append(record)
        groups[record.name] = group
        sessions[session] = group
    unique = {id(one): one for one in groups.values()}.values()
    return sorted(unique, key=lambda one: -one[-1].ended)


def _conversation(explorer: Explorer, records: list[PromptRecord], kept: tuple[int, int]) -> ConversationCard:
    last, tokenizer = records[-1], explorer.llm.tokenizer
    first = records[0]  # whose last words are the user's own: an agent puts its context before them
    asked = next((one for one in reversed(first.parts) if one.role == "user"), first.parts[0] if first.parts else None)
    words = [] if asked is None else first.ids[asked.start : min(asked.stop, asked.start + 24)].tolist()
    turns = tuple(map(_turn, records[-MOST_TURNS:]))
    return ConversationCard(tokenizer.decode(words), last.asked.session, turns, len(last.ids), *kept)


def _turn(record: PromptRecord) -> ConversationTurn:
    report = record.report
    assert report is not None, "a watch has made it"
    told: dict[str, Any] = {name: getattr(report, name) for name in TOLD}
    cause, again = str(report.cause) if report.known else "", min(report.again, report.computed)
    new, written = report.computed - again, len(record.ids) - record.prompt
    return ConversationTurn(record.name, cause, new=new, again=again, written=written, **told)
