"""The explorer's model and its runs, for the routes that the page calls (routes.py, and one module for each panel)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tokenwright.checks import MAX_TOKENS
from tokenwright.errors import RequestError
from tokenwright.serve.explorer.player import Player, Runs, new_identity
from tokenwright.serve.http.fields import MOST_STOPS, Text, many
from tokenwright.serve.service.model_host import Load, ModelHost
from tokenwright.trace.rooms import ReplicasCard
from tokenwright.trace.schema import Loading, ModelCard, RunCard, TokenCard

if TYPE_CHECKING:  # NumPy is loaded with the model, not with the server (llm/run_trace.py needs it too)
    from tokenwright.llm.llm import LLM
    from tokenwright.llm.run import Run
    from tokenwright.trace.summary import RunHalf

HIDDEN: dict[str, Any] = {"include_in_schema": False}  # the page's own protocol, which changes with the page

Step = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Index = Annotated[int, Field(ge=0, le=2**16)]
Ids = Annotated[list[int], many(MAX_TOKENS >> 8)]


class Strict(BaseModel):
    """A message from a client: unknown fields are errors, and 1 is not True."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class EarlierStep(Strict):
    """The facts of a step of a lost run that the summary of a run needs (trace/summary.py)."""

    start: Step
    length: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    layer_tokens: Annotated[int, Field(ge=0, lt=2**53)]
    step_us: Annotated[int, Field(ge=0, lt=2**53)]
    token: Annotated[int, Field(ge=0, lt=2**32)] | None


class NewRun(Strict):
    """POST /runs. `ids`: of the prompt; None: of its text. Control tokens that a person has written in a
    message are text, which the prompt's text does not tell.

    `written`: ids already generated after the prompt, where a lost run resumes at `first_step`. `earlier`: its steps
    before that one, or since its fork.
    """

    prompt: Text
    ids: Ids | None = None
    written: Ids = []
    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    stop: Annotated[list[str], many(MOST_STOPS)] = []
    ignore_eos: bool = False
    cache: bool = True
    layer: Index = 0
    head: Index = 0
    first_step: Step = 0
    earlier: Annotated[list[EarlierStep], many(MAX_TOKENS >> 8)] = []


class NewFork(Strict):
    """POST /runs/ID/fork: go on from a step, with another token or other settings; null: as they were there."""

    step: Step
    token: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None


class RunGone(Exception):
    """The run does not exist, or no longer exists."""


class Explorer:
    """One model and its runs."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.host = ModelHost(name, load)
        self.runs = Runs()
        self.closing: list[Callable[[], object]] = []  # what panels hold, ended first

    def start(self) -> None:
        """Start to load the model."""
        self.host.start()

    def close(self) -> None:
        """End all runs and free the memory. Does not wait for a model that is still loading."""
        for close in self.closing:
            close()
        self.runs.close()
        self.host.close()

    @property
    def loading(self) -> Loading:
        return self.host.loading

    @property
    def llm(self) -> LLM:
        return self.host.llm

    def player(self, identity: str) -> Player:
        player = self.runs.get(identity)
        if player is None:
            raise RunGone
        return player

    def model(self) -> ModelCard:
        from tokenwright.cluster.cluster_llm import cluster_of
        from tokenwright.llm.run_trace import model_card

        card, cluster = model_card(self.llm.llm_engine, self.name), cluster_of(self.llm)
        return card if cluster is None else replace(card, replicas=cluster.loop.replicas)

    def replicas(self) -> ReplicasCard:
        """The replicas of the server. Raises RequestError without any."""
        from tokenwright.cluster.cluster_llm import cluster_of

        if (cluster := cluster_of(self.llm)) is None:
            raise RequestError("this server has no replicas; start it with --replicas 2")
        return cluster.loop.look()

    def begin(self, wanted: NewRun) -> RunCard:
        """A new run, paused before its first step.

        Raises NotReady while the model loads, RequestError for an invalid request, CapacityError without room for it.
        """
        llm = self.llm
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "stop", "ignore_eos")
        params = llm.sampling(**{name: getattr(wanted, name) for name in names})
        seed = wanted.seed if wanted.seed is not None else secrets.randbits(32)
        params = replace(params, seed=None if params.greedy else seed)
        run = llm.run(
            wanted.prompt if wanted.ids is None else wanted.ids,
            params,
            cache=wanted.cache,
            written=wanted.written,
            layer=wanted.layer,
            head=wanted.head,
            first_step=wanted.first_step,
            earlier=wanted.earlier,
        )
        return self._added(run, wanted.prompt)

    def fork(self, identity: str, wanted: NewFork) -> RunCard:
        """A run that goes on from a step of another one, paused before its first step.

        Raises Gone if there is no such run, RequestError for a step that cannot be gone on from, CapacityError without
        room for it.
        """
        parent = self.player(identity)
        parent.renew()
        given = wanted.model_dump(exclude={"step", "token"}, exclude_none=True)
        greedy = given.get("temperature", parent.run.start.params.temperature) == 0
        if not greedy and parent.run.start.params.seed is None and "seed" not in given:
            given["seed"] = secrets.randbits(32)
        run = self.llm.fork(parent.run, wanted.step, wanted.token, **given)
        return self._added(run, parent.card.prompt, identity)

    def _added(self, run: Run, prompt: str, parent: str | None = None) -> RunCard:
        """Add a new run; `prompt` is its text."""
        from tokenwright.llm.run_trace import run_card

        card = replace(
            run_card(self.llm.llm_engine.local("run"), run, self.name, prompt), run=new_identity(), parent=parent
        )
        self.runs.add(run, card)
        return card

    def looks(self, ids: Iterable[int]) -> tuple[TokenCard, ...]:
        from tokenwright.llm.run_trace import token_cards

        return token_cards(self.llm.tokenizer, ids)

    def trace(self, player: Player, halves: Iterable[RunHalf] = ()) -> dict[str, Any]:
        """A run as the content of a trace file."""
        from tokenwright.llm.run_trace import trace_values

        return trace_values(self.llm.llm_engine.local("run"), player.card, player.state(), player.run.frames, halves)
