"""The model and the watched runs: what the page asks before it opens a panel."""

import base64
from dataclasses import asdict, replace
from typing import Any

from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer, gone
from tokenwright.llm.run_trace import model_card
from tokenwright.trace.frame_codec import as_json
from tokenwright.trace.rooms import ReplicasCard
from tokenwright.trace.schema import HeadMasses, Loading, ModelCard, RunState


def status(explorer: Explorer) -> Loading:
    return explorer.host.loading


def model(explorer: Explorer) -> ModelCard:
    card, router = model_card(explorer.llm.llm_engine, explorer.name), explorer.host.router
    return card if router is None else replace(card, replicas=router.replicas)


def replicas(explorer: Explorer) -> ReplicasCard:
    explorer.llm.check()  # raises an error while it is not loaded
    if (router := explorer.host.router) is None:
        raise RequestError("this server has no replicas; start it with --replicas 2")
    return router.look()


def state(explorer: Explorer, identity: str) -> RunState:
    return explorer.player(identity).state()


def end(explorer: Explorer, identity: str) -> None:
    if not explorer.runs.remove(identity):
        raise gone()


def one_step(explorer: Explorer, identity: str, step: int) -> dict[str, Any]:
    return as_json(explorer.player(identity).run.frame(step))


def attention(explorer: Explorer, identity: str, step: int, layer: int, head: int) -> dict[str, Any]:
    row = explorer.run(identity).attention(step, layer, head)
    return asdict(row) | {"codes": base64.b64encode(row.codes).decode()}


def masses(explorer: Explorer, identity: str, step: int) -> HeadMasses:
    return explorer.run(identity).heads(step)
