"""Random schedules of texts with pictures: slices, pressure, disk, forks, clients and replicas that go, by ==."""

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.invariants import check_invariants
from tests.engines import reached
from tests.vision.models import make_model, picture, question
from tokenwright import LLM
from tokenwright.backends.native.native_kernels import NativeKernels
from tokenwright.backends.towers import tower_runner
from tokenwright.cluster.cluster_loop import ClusterLoop
from tokenwright.cluster.processes import open_cluster
from tokenwright.engine import Engine, Event, Step, Token
from tokenwright.llm.model import LoadedModel

ENGINES = int(os.environ.get("TESTS_ENGINES", "2"))  # of a kind, each with three batches
TALKS = [
    question(f"{at % 2}", *(picture(*((48, 48), (64, 40))[one % 2], one) for one in its), "then " * (at % 3), "what?")
    for at, its in enumerate(((1,), (2,), (1, 2), (2, 1), (3, 1), (1, 1), (4, 3), ()))
]


def written(llm: LLM, chosen: list[int], draw: random.Random) -> list[Any]:
    """The log-probabilities of the answers to some talks at once, of which the client leaves some."""

    async def one(at: int, left: bool) -> Any:
        asked = llm.achat(TALKS[at], temperature=0.7, seed=at, max_tokens=10, ignore_eos=True, logprobs=0, n=1 + at % 2)
        if left:
            task = asyncio.create_task(asked)
            await asyncio.sleep(0.02)
            task.cancel()
            return None
        done = await asked
        return [tuple(choice.logprobs) for choice in done.choices]

    async def everyone() -> list[Any]:
        return await asyncio.gather(*(one(at, draw.random() < 0.2) for at in chosen))

    return asyncio.run(everyone())


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "qwen3_5"])
def test_no_schedule_changes_a_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model", kind)
    with LLM(tmp_path / "model", dtype="float32") as llm:
        alone = [written(llm, [at], random.Random(3))[0] for at in range(len(TALKS))]
        most = max(len(llm.render(talk).ids) for talk in TALKS) + 10
    assert None not in alone
    draw = random.Random(kind)
    for number in range(ENGINES):
        size = draw.choice((4, 8, 16))
        options: dict[str, Any] = {
            "page_size": size,
            "pages": -(-most // size) * 2 + draw.randrange(0, 3 * most // size),
            "token_budget": draw.choice((40, 64, 100, 512)),
            "max_sequences": draw.choice((2, 4, 16)),
        }
        if draw.random() < 0.4:
            options["kv_disk"] = str(tmp_path / f"disk{size}")
        monkeypatch.setattr(tower_runner, "WORK", draw.choice((1, 1 << 14)))
        kept = draw.choice((1, 1 << 28))  # bytes of pictures that are kept
        with LLM(tmp_path / "model", dtype="float32", **options) as llm:
            llm.inspect(lambda engine, kept=kept: setattr(engine.scheduler.pictures.source, "_most", kept))
            for _ in range(3):
                chosen = [draw.randrange(len(TALKS)) for _ in range(draw.randint(2, 8))]
                for at, found in zip(chosen, written(llm, chosen, draw), strict=True):
                    assert found in (None, alone[at]), (number, options, at)
            llm.inspect(lambda engine: check_invariants(engine.scheduler))
    if kind != "qwen3_vl" and ENGINES == 2:
        return  # a cluster takes seconds to open
    cluster = {"dtype": "float32", "threads": 1, "kv_memory": 1 << 22}
    with open_cluster(str(tmp_path / "model"), 2, cluster) as llm, killing(llm, draw) as kills:
        while len(kills) < ENGINES:
            chosen = [draw.randrange(len(TALKS)) for _ in range(16)]
            for at, found in zip(chosen, written(llm, chosen, draw), strict=True):
                assert found in (None, alone[at]), at


@contextmanager
def killing(llm: LLM, draw: random.Random) -> Iterator[list[str]]:
    """Replicas are killed while the other one lives; their names."""
    kills: list[str] = []
    loop, done = llm.llm_engine.loop, threading.Event()
    assert isinstance(loop, ClusterLoop)

    def kill() -> None:
        while not done.wait(draw.random() / 4):
            if len(names := loop.names) == 2:
                kills.append(draw.choice(names))
                os.kill(int(kills[-1]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield kills
    finally:
        done.set()
        killer.join()


def test_another_text_gets_tokens_between_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower's weights and its work on a picture do not stand between two tokens of a text that runs."""
    make_model(tmp_path, "qwen2_5_vl")
    log: list[str] = []
    linear, compute, read, running = NativeKernels.linear, Engine._compute, LoadedModel._open_tower, threading.Event()

    def opened(self: LoadedModel) -> Any:
        log.append("read")
        log.append("read" if running.wait(10) else "late")
        return read(self)

    def seen(self: NativeKernels, *given: Any) -> Any:
        log.append("tower")
        return linear(self, *given)

    def computed(self: Engine, step: Step) -> list[Event]:
        events = compute(self, step)
        log.extend("token" for event in events if isinstance(event, Token))
        if "read" in log and log[-1] == "token":
            running.set()
        return events

    monkeypatch.setattr(tower_runner, "WORK", 1, raising=False)
    monkeypatch.setattr(LoadedModel, "_open_tower", opened)
    with LLM(tmp_path, dtype="float32") as llm:
        llm.render(TALKS[0])  # imports what opens pictures, so that the text still runs when the tower is read
        monkeypatch.setattr(NativeKernels, "linear", seen)
        monkeypatch.setattr(Engine, "_compute", computed)

        async def both() -> None:
            text = asyncio.create_task(llm.agenerate("a text", max_tokens=500, ignore_eos=True))
            await reached(lambda: "token" in log)
            await llm.achat(TALKS[0], max_tokens=1)
            await text

        asyncio.run(both())
    assert "late" not in log, "the text has waited for the tower's weights"
    between = log[log.index("tower") : len(log) - log[::-1].index("tower")]
    assert between.count("token") > 10, "the text has waited for the picture"
