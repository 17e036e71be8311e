"""The explorer's model and its runs, for the routes that the page calls (explore.py, and one module for each panel)."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

import tokenwright
from tokenwright.checks import MAX_TOKENS
from tokenwright.engine import SamplingParams
from tokenwright.serve.host import Host, Load
from tokenwright.serve.player import Player, Runs, new_identity
from tokenwright.text import TextStream
from tokenwright.trace.codec import as_json
from tokenwright.trace.schema import VERSION, Loading, ModelCard, RunCard, StepFrame, TokenCard, Trace

if TYPE_CHECKING:  # torch is loaded with the model, not with the server
    from tokenwright.llm import LLM
    from tokenwright.run import Run

HIDDEN: dict[str, Any] = {"include_in_schema": False}  # the page's own protocol, which changes with the page

Step = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Index = Annotated[int, Field(ge=0, le=2**16)]


class Strict(BaseModel):
    """A message from a client: unknown fields are errors, and 1 is not True."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NewRun(Strict):
    """POST /runs. `written`: ids already generated after the prompt, where a lost run resumes at `first_step`."""

    prompt: str
    written: list[int] = []
    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    stop: list[str] = []
    ignore_eos: bool = False
    cache: bool = True
    layer: Index = 0
    head: Index = 0
    first_step: Step = 0


class NewFork(Strict):
    """POST /runs/ID/fork: go on from a step, with another token or other settings; null: as they were there."""

    step: Step
    token: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None


class Gone(Exception):
    """The run does not exist, or no longer exists."""


class Explorer:
    """One model and its runs."""

    def __init__(self, name: str, load: Load) -> None:
        self.name = name
        self.host = Host(name, load)
        self.runs = Runs()

    def start(self) -> None:
        """Start to load the model."""
        self.host.start()

    def close(self) -> None:
        """End all runs and free the memory. Does not wait for a model that is still loading."""
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
            raise Gone
        return player

    def model(self) -> ModelCard:
        llm, config, costs = self.llm, self.llm.config, self.llm.costs
        suggested = llm.sampling()
        return ModelCard(
            name=self.name,
            version=tokenwright.__version__,
            device=llm.device,
            dtype=llm.dtype,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            context=config.context,
            windows=config.windows,
            block_weights=costs.block_weights,
            head_weights=costs.head_weights,
            weight_bytes=llm.weight_bytes,
            kv_bytes_per_token=costs.bytes_per_token,
            page_size=llm.engine.pool.page_size,
            pages=llm.engine.pool.pages,
            eos_ids=tuple(sorted(llm.eos_ids)),
            temperature=suggested.temperature,
            top_k=suggested.top_k,
            top_p=suggested.top_p,
        )

    def begin(self, wanted: NewRun) -> RunCard:
        """A new run, paused before its first step.

        Raises NotReady while the model loads, RequestError for an invalid request, CapacityError without room for it.
        """
        llm = self.llm
        names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "ignore_eos")
        params = llm.sampling(**{name: getattr(wanted, name) for name in names})
        seed = wanted.seed if wanted.seed is not None else secrets.randbits(32)
        params = replace(params, seed=None if params.greedy else seed)
        run = llm.run(
            wanted.prompt,
            params,
            cache=wanted.cache,
            written=wanted.written,
            layer=wanted.layer,
            head=wanted.head,
            first_step=wanted.first_step,
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
        start, tokenizer = run.start, self.llm.tokenizer
        ids = run.tokens[len(start.prompt) :]
        written = TextStream(tokenizer, start.params.stop, start.prompt)  # their text as a viewer has seen it
        for token in ids:
            written.push(token)
        card = RunCard(
            run=new_identity(),
            model=self.name,
            prompt=prompt,
            tokens=self.looks(start.prompt),
            written=self.looks(ids),
            written_text=written.text,
            **_sampling(start.params),
            first_step=run.first_step,
            watched=run.watched,
            parent=parent,
        )
        self.runs.add(run, card)
        return card

    def looks(self, ids: Iterable[int]) -> tuple[TokenCard, ...]:
        tokenizer = self.llm.tokenizer
        return tuple(TokenCard(i, tokenizer.token_text(i), i in tokenizer.special_ids) for i in ids)

    def trace(self, player: Player) -> dict[str, Any]:
        """A run as the content of a trace file."""
        frames = list(player.run.frames)
        named = {token for frame in frames for token in named_ids(frame)}
        labels, state = self.looks(sorted(named)), player.state()
        whole = asdict(Trace("tokenwright-trace", VERSION, self.model(), player.card, state, labels, ()))
        return whole | {"steps": [as_json(frame) for frame in frames]}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def named_ids(frame: StepFrame) -> list[int]:
    """The token ids of a frame's candidates."""
    return [candidate.token for candidate in frame.candidates]
