"""Tensor parallel: every number of processes gives the bits of one; a process that ends takes the engine with it."""

import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines import settled
from tests.models.fixtures import make_checkpoint
from tests.processes import running
from tokenwright import LLM, SamplingParams
from tokenwright.backends import layout
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.rank_messages import packed, unpacked
from tokenwright.backends.native.ranks import Compute
from tokenwright.backends.packed import LANES
from tokenwright.engine import Request, one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.engine.warming import WarmRules
from tokenwright.errors import EngineError, RequestError
from tokenwright.llm.ranks.tensor_parallel import Workers
from tokenwright.models.split import RankPlace, RowCut

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or find_kernels() is None, reason="needs Linux and the native kernels"
)
SOON = 5  # seconds
# The model, its window and sinks, the format of weights and of K and V, and the numbers of processes.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "stories": ("stories", {}, (2, 8)),
    "grouped heads, int4": ("qwen2", {"weights": "int4", "kv": "k=int8,v=int4", "window": 20, "sinks": 3}, (4,)),
    "experts": ("qwen3-moe", {}, (2,)),
    "shared expert, int8": ("qwen2-moe", {"weights": "int8"}, (4,)),
    "latent": ("deepseek2", {}, (4,)),
    "norms over all heads": ("olmo2", {}, (2,)),
    "side by side, biases": ("neox", {}, (4,)),
    "states": ("qwen3-next", {}, (2,)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(kind: str, folders: Path) -> str | Path:
    folder = folders / kind
    return kind if kind == "stories" else folder if folder.exists() else make_checkpoint(folder, kind)[0]


def opened(model: str | Path, ranks: int, **options: Any) -> LLM:
    return LLM(model, threads=2, kv_memory="16MB", token_budget=48, tensor_parallel=ranks, **options)


def written(llm: LLM) -> dict[str, object]:
    """Logits of a text that comes in pieces, and texts of a batch: with page copies, prefix hits, and drafts."""
    ids = [(place * 7919 + 3) % llm.config.vocab_size for place in range(61)]
    logits, cache = llm.model(ids[:20])
    more, cache = llm.model(ids[20:60], cache)
    last, _ = llm.model(ids[60:], cache)
    prompts = [ids[:3], ids[:17], ids[:40], ids[:40], [*ids[:40], *ids[:9], *ids[:9]]]
    common: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    greedy = llm.generate(prompts, temperature=0, **common)
    seeded = llm.generate(prompts, temperature=1, seed=5, n=2, **common)
    found: dict[str, object] = {"logits": [one.tobytes() for one in (logits, more, last)]}
    found["scores"] = llm.score(ids).tobytes()
    for name, texts in (("greedy", greedy), ("seeded", seeded)):
        each = [text for one in texts for text in (one, *one.others)]
        found[name] = [(text.token_ids, text.logprobs, text.top_logprobs, text.usage.reused_tokens) for text in each]
    assert any(one.usage.reused_tokens for one in seeded), "prefixes were found"
    warmed = [(place * 31 + 11) % llm.config.vocab_size for place in range(45)]
    llm.llm_engine.warm(Request((*warmed, 0), SamplingParams(max_tokens=0)), WarmRules())
    while settled(llm).due:
        pass
    [next_turn] = llm.generate([[*warmed, 5]], temperature=0, **common)
    assert next_turn.usage.reused_tokens == len(warmed)
    found["warmed"] = next_turn.token_ids, next_turn.logprobs
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_processes_gives_the_same_bits(case: str, folders: Path) -> None:
    kind, options, degrees = CASES[case]
    model = model_of(kind, folders)
    with opened(model, 1, **options) as llm:
        alone = written(llm)
        whole, weight_bytes = llm.llm_engine.kv_memory, llm.weight_bytes
    for ranks in degrees:
        with opened(model, ranks, **options) as llm:
            assert written(llm) == alone, ranks
            team = llm.loaded.team
            assert team is not None
            assert team.count == ranks
            assert max(team.weight_bytes) < (0.5 + 1 / ranks) * weight_bytes
            assert llm.llm_engine.kv_memory == whole


def test_a_rank_with_the_rows_of_another_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison above can fail."""
    with opened("stories", 1) as llm:
        alone = written(llm)

    def wrong(weights: Any, cuts: Any) -> Any:
        name = next(name for name, cut in cuts.items() if cut.whole and name != "embed")
        own = cuts[name]
        return layout.cut_weights(weights, {**cuts, name: replace(own, rows=own.rows - own.first)})

    monkeypatch.setattr("tokenwright.llm.ranks.tensor_parallel.cut_weights", wrong)
    with opened("stories", 2) as llm:
        assert written(llm)["logits"] != alone["logits"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_heads_are_computed(ranks: int) -> None:
    """Each by some rank, beside the KV head that it reads."""
    for kv_heads in (1, 2, 3, 4, 5, 8, 12):
        for ratio in (1, 2, 3, 7):
            every = set()
            for rank in range(ranks):
                heads, own = RankPlace(rank, ranks, LANES).heads(kv_heads * ratio, kv_heads)
                assert len(heads)
                assert {head // ratio for head in heads} == set(own)
                assert len(heads) % len(own) == 0
                every.update(heads)
            assert every == set(range(kv_heads * ratio))


@pytest.mark.parametrize("total", [1, 15, 16, 100, 289, 32000])
@pytest.mark.parametrize("unit", [0, 1, 16])
def test_shares_are_the_whole(total: int, unit: int) -> None:
    for ranks in (2, 4, 8):
        shares = [RankPlace(rank, ranks, LANES).share(total, unit) for rank in range(ranks)]
        assert [row for share in shares for row in share] == list(range(total))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 2 * max(1, unit or 16)


def test_a_cut_begins_with_its_first_row() -> None:
    assert RowCut(np.arange(32, 48)).first == 32
    assert RowCut(np.arange(0)).first == 0


def test_a_message_has_values_of_known_classes_alone() -> None:
    """Reading one runs no code."""
    message = Compute(3, one_chunk([5, 6], 0, [PageTable({0: 1})], 8), 2)
    tuples = {"adapters": (), "pictures": (), "inserted": (), "ends": (), "axes": ()}  # what were lists
    assert unpacked(packed(message)) == replace(
        message, batch=replace(message.batch, tables=(array("i", [1]),), **tuples)
    )
    with pytest.raises(KeyError):
        unpacked(b'{"is":"Popen","of":{"args":"true"}}')
    with pytest.raises(AssertionError, match="no class of messages"):
        packed(Path())


def workers_of(llm: LLM) -> list[int]:
    """The processes of the other ranks."""
    assert llm.loaded.team is not None
    others = llm.loaded.team.others
    assert isinstance(others, Workers)
    return others.processes


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(done: Any) -> bool:
    end = time.monotonic() + SOON
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(done())


@pytest.fixture
def pair() -> Iterator[LLM]:
    with opened("stories", 2) as llm:
        llm.generate("Once", max_tokens=1)  # the other rank has started
        yield llm


def test_a_killed_process_ends_the_engine_in_a_text(pair: LLM) -> None:
    [process] = workers_of(pair)
    stream = pair.stream("Once upon a time", max_tokens=200, ignore_eos=True)
    next(stream)
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineError, match=r"process 2 of the 2 .* \(signal 9\)|a process that computes"):
        list(stream)
    assert time.monotonic() - killed < SOON
    with pytest.raises(EngineError, match="open the model again"):
        pair.generate("Once", max_tokens=1)


def test_a_killed_process_ends_an_idle_engine(pair: LLM) -> None:
    [process] = workers_of(pair)
    os.kill(process, signal.SIGKILL)

    def ended() -> bool:
        try:
            pair.llm_engine.check()
        except EngineError as error:
            assert "process 2 of the 2 that compute the model has ended (signal 9)" in str(error)  # noqa: PT017
            return True
        return False

    assert until(ended)


def test_closing_leaves_nothing_and_another_engine_starts_anew() -> None:
    with opened("stories", 2) as llm:
        text, loaded = llm.generate("Once", max_tokens=8, temperature=0), llm.loaded
        processes = workers_of(llm)
    assert not any(map(alive, processes))
    with LLM(loaded, kv_memory="16MB") as again:
        assert again.generate("Once", max_tokens=8, temperature=0)[0].token_ids == text[0].token_ids
        processes = workers_of(again)
    assert not any(map(alive, processes))


def test_the_processes_end_with_the_first() -> None:
    program = """
from tests.llm.ranks.test_tensor_parallel import opened, workers_of
llm = opened("stories", 4)
print(*workers_of(llm), flush=True)
llm.generate("Once upon a time", max_tokens=100_000, ignore_eos=True)
"""
    with running([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        processes = [int(word) for word in first.stdout.readline().split()]
        time.sleep(0.2)
        first.kill()
    assert len(processes) == 3
    assert until(lambda: not any(map(alive, processes)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel": 3}, "1, 2, 4 or 8, not 3"),
        ({"tensor_parallel": True}, "1, 2, 4 or 8"),
        ({"trace": True}, "trace needs a model that one process computes"),
        ({"kv_disk": "pages"}, "kv_disk needs a model that one process computes"),
        ({"draft": "stories"}, "draft needs a model that one process computes"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        LLM("stories", **({"tensor_parallel": 2} | options))


def test_what_looks_inside_is_refused(pair: LLM, tmp_path: Path) -> None:
    for look in (
        lambda: pair.save_cache(tmp_path / "cache", "Once"),
        lambda: pair.load_cache(tmp_path / "cache"),
        lambda: pair.generate("Once", max_tokens=1, observe=True),
    ):
        with pytest.raises(RequestError, match="without tensor_parallel"):
            look()
    assert pair.generate("Once", max_tokens=1)
