"""The explorer: the watched runs of one model, and what the panels (explorer/panels/) keep between requests."""

import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from tokenwright.checks import MAX_TOKENS
from tokenwright.decode.drafts.step_costs import StepCosts
from tokenwright.engine.pictures import Spans, content
from tokenwright.errors import RequestError, TokenwrightError
from tokenwright.explorer.batches import Batches
from tokenwright.explorer.dataclass_reader import Between, Length
from tokenwright.explorer.player import Drive, Player, Runs, new_identity, undriven
from tokenwright.llm.drafts.sources import costs_of_steps
from tokenwright.llm.engine import LLMEngine
from tokenwright.llm.llm import LLM
from tokenwright.llm.run import Run
from tokenwright.llm.run_trace import run_card, token_cards, trace_values
from tokenwright.trace.rooms import ReplicasCard
from tokenwright.trace.schema import Loading, RunCard, TokenCard
from tokenwright.trace.summary import RunHalf

if TYPE_CHECKING:
    from tokenwright.explorer.room import Room
    from tokenwright.planner.bandwidth import Bandwidth

MOST_TEXT = 4 * 2**20
MOST_IDS = MAX_TOKENS >> 8
MOST_STOPS = 64
MOST_HELD = 8  # prompts with pictures

Text = Annotated[str, Length(0, MOST_TEXT)]
Step = Annotated[int, Between(0, MAX_TOKENS)]
Index = Annotated[int, Between(0, 2**16)]
Ids = Annotated[list[int], Length(0, MOST_IDS)]
Token = Annotated[int, Between(0, 2**32 - 1)]
Seed = Annotated[int, Between(0, 2**53 - 1)]
Count = Annotated[int, Between(0, 2**53 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierStep:
    start: Step
    length: Annotated[int, Between(1, MAX_TOKENS)]
    layer_tokens: Count
    step_us: Count
    token: Token | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How tokens are drawn; null: as the checkpoint suggests, or as before."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun(Drawn):
    """POST /runs. A text cannot contain control tokens; `ids` can. pictures: a name of `Explorer.hold`."""

    prompt: Text
    ids: Ids | None = None
    pictures: Annotated[str, Length(0, 64)] = ""
    written: Ids = field(default_factory=list)  # generated ids with which a lost run resumes
    max_tokens: int = 64
    stop: Annotated[list[str], Length(0, MOST_STOPS)] = field(default_factory=list)
    ignore_eos: bool = False
    cache: bool = True
    layer: Index = 0
    head: Index = 0
    first_step: Step = 0  # of a lost run
    earlier: Annotated[list[EarlierStep], Length(0, MOST_IDS)] = field(default_factory=list)  # steps of a lost run


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFork(Drawn):
    """POST /runs/ID/fork: go on from a step with changes; null: no change."""

    step: Step
    token: Token | None = None
    max_tokens: int | None = None


class PanelError(TokenwrightError):
    """A refused request. kind: "gone" (no such run or batch any more), "missing", or "busy" (for now)."""

    def __init__(self, kind: Literal["gone", "missing", "busy"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


def gone() -> PanelError:
    return PanelError("gone", "there is no such run, or no longer; begin a new one")


class ReplicaRouter(Protocol):
    @property
    def replicas(self) -> int: ...

    def look(self) -> ReplicasCard: ...


class Host(Protocol):
    """The model's owner. `llm` raises an error while it is not loaded."""

    name: str
    loading: Loading

    @property
    def llm(self) -> LLM: ...

    @property
    def router(self) -> ReplicaRouter | None: ...


@dataclass(slots=True)
class OpenedModel:
    name: str
    llm: LLM
    loading: Loading = field(default_factory=lambda: Loading("ready", 0, 0, ""))
    router: None = None


class Explorer:
    def __init__(self, host: Host, shown: str = "", drive: Drive = undriven) -> None:
        self.host = host
        self.name = host.name
        self.shown = shown or host.name
        self.runs = Runs(drive)
        self.batches = Batches(drive)
        self.room: Room | None = None  # of a class
        self.measured: Bandwidth | None = None  # of this machine's memory, after the first plan
        self._held: OrderedDict[str, tuple[tuple[int, ...], Spans]] = OrderedDict()
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # of what runs one at a time

    def close(self) -> None:
        self.batches.close()
        self.runs.close()

    @property
    def llm(self) -> LLM:
        return self.host.llm

    @property
    def bandwidth(self) -> "Bandwidth":
        from tokenwright.planner.bandwidth import measure

        with self.locks["bandwidth"]:
            self.measured = self.measured or measure(self.llm.device)
        return self.measured

    @cached_property
    def costs(self) -> StepCosts:
        return step_costs(self.llm.llm_engine.local("run"))

    def player(self, identity: str) -> Player:
        """A run; does not renew its lease. Raises PanelError without it."""
        if (player := self.runs.get(identity)) is None:
            raise gone()
        return player

    def run(self, identity: str) -> Run:
        """A viewer's run; renews its lease. Raises PanelError without it."""
        player = self.player(identity)
        player.renew()
        return player.run

    def begin(self, body: NewRun) -> RunCard:
        """A new run, paused before its first step. Raises RequestError, CapacityError."""
        params = seeded(self.llm, body, ("repetition_penalty", "stop"))
        more = {name: getattr(body, name) for name in ("cache", "written", "layer", "head", "first_step", "earlier")}
        ids, pictures = self._held.get(body.pictures, (body.ids, ()))
        if body.pictures and not pictures:
            raise RequestError("the pictures of this prompt are no longer held; look inside again from the chat page")
        run = self.llm.run(body.prompt if ids is None else ids, params, pictures=pictures, **more)
        return self._added(run, body.prompt, held=body.pictures)

    def hold(self, ids: Iterable[int], pictures: Spans) -> str:
        """Keep a prompt with pictures, one of the last few; a run begins with the returned name. "" for a text."""
        if not pictures:
            return ""
        with self.locks["held"]:
            prompt = tuple(ids)
            name = sha256(repr(prompt).encode() + content(pictures, 0, len(prompt))).hexdigest()
            self._held[name] = prompt, pictures
            self._held.move_to_end(name)
            while len(self._held) > MOST_HELD:
                self._held.popitem(last=False)
        return name

    def fork(self, identity: str, body: NewFork) -> RunCard:
        """A run that continues from another one's step, paused."""
        parent = self.player(identity)
        parent.renew()
        values = {one.name: getattr(body, one.name) for one in fields(body)}
        given = {name: one for name, one in values.items() if one is not None and name not in ("step", "token")}
        greedy = given.get("temperature", parent.run.start.params.temperature) == 0
        if not greedy and parent.run.start.params.seed is None and "seed" not in given:
            given["seed"] = secrets.randbits(32)
        run = self.llm.fork(parent.run, body.step, body.token, **given)
        return self._added(run, parent.card.prompt, identity, parent.card.held)

    def _added(self, run: Run, prompt: str, parent: str | None = None, held: str = "") -> RunCard:
        card = run_card(self.llm.llm_engine.local("run"), run, self.name, prompt)
        return self.runs.add(run, replace(card, run=new_identity(), parent=parent, held=held)).card

    def looks(self, ids: Iterable[int]) -> tuple[TokenCard, ...]:
        return token_cards(self.llm.tokenizer, ids)

    def trace(self, player: Player, halves: Iterable[RunHalf] = ()) -> dict[str, Any]:
        return trace_values(self.llm.llm_engine.local("run"), player.card, player.state(), player.run.frames, halves)


def step_costs(engine: LLMEngine) -> StepCosts:
    return engine.inspect(lambda _: costs_of_steps(engine.loaded, engine.specs))


def seeded(llm: LLM, wanted: Any, more: Iterable[str] = ()) -> Any:
    """A request's sampling parameters, with a seed where they draw."""
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos", *more)
    params = llm.sampling(**{name: getattr(wanted, name) for name in names})
    seed = wanted.seed if wanted.seed is not None else secrets.randbits(32)
    return replace(params, seed=None if params.greedy else seed)


@dataclass(frozen=True, slots=True)
class Download:
    content: dict[str, Any]
    name: str


@dataclass(frozen=True, slots=True)
class MessageStream:
    messages: Iterator[object]  # made when the page can take them
    close: Callable[[], object]  # may be called twice
