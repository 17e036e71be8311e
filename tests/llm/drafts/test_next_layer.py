"""Drafts of a model's own layer for further tokens (MTP): its logits, what its rows read, and texts equal by ==."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines import held
from tests.llm.drafts.test_speculation import FREE, STORY, has_failed, schedule, told, written
from tests.models.files.gguf_files import Kind, write_gguf
from tests.models.fixtures import make_checkpoint, write_json
from tests.models.next_layers import MadeNext, make_next_layer
from tests.profiles import share
from tokenwright import LLM, SamplingParams
from tokenwright.backends.runner import backend_over
from tokenwright.cache import KVStore
from tokenwright.decode.drafts.draft_model import DraftModel
from tokenwright.decode.drafts.layer_drafts import NextLayer
from tokenwright.decode.drafts.step_costs import StepCosts
from tokenwright.engine import one_chunk
from tokenwright.engine.layer_group import PageTable
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.llm.model import LoadedModel

# Latent attention, and plain, both with experts; layers with states, with experts and without.
KINDS = ("deepseek3", "glm4.5", "qwen3-next", "qwen3.5")
WEIGHTS = {"deepseek3": "native", "glm4.5": "int8", "qwen3-next": "int8", "qwen3.5": "bfloat16"}
PAGES, PAGE = 40, 16
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeNext]:
    folder = tmp_path_factory.mktemp("next")
    return {kind: make_next_layer(folder / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def models(made: dict[str, MadeNext]) -> dict[str, LoadedModel]:
    return {kind: LoadedModel(made[kind].path, weights=WEIGHTS[kind]) for kind in KINDS}


def opened(loaded: LoadedModel, **options: Any) -> tuple[LLM, Any]:
    """An LLM whose layer's steps cost nearly nothing, and its proposer."""
    llm = LLM(loaded, speculate="mtp", **options)
    proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
    proposer.costs, proposer.own = FREE, StepCosts({1: 0.01, 64: 0.01})
    return llm, proposer


class Rows:
    """A decoder over an empty store of its own, that computes one text row by row."""

    def __init__(self, decoder: Any, specs: Any) -> None:
        store = KVStore(specs, PAGES, PAGE)
        self.backend, self.groups = backend_over(decoder, store), len(store.groups)

    def __call__(self, tokens: list[int], start: int = 0, before: Any = None) -> tuple[Any, Any]:
        """The logits and the hidden states of tokens at positions [start, ...)."""
        tables = [PageTable({page: page for page in range(PAGES)})] * self.groups
        batch = one_chunk(tokens, start, tables, PAGES * PAGE)
        batch.before, batch.hidden_rows = before, batch.logits_rows
        found = self.backend(batch)
        return found.rows, found.hidden


def shifted(states: Any) -> Any:
    """The states before each row: zeros before the first."""
    return np.concatenate((np.zeros_like(states[:1]), states[:-1]))


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        *((kind, "native") for kind in (*KINDS, "mimo", "qwen3.5-moe", "apart")),
        ("glm4.5", "reference"),
    ],
)
def test_the_logits_are_those_of_the_published_layer(
    made: dict[str, MadeNext], kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "reference":
        monkeypatch.setenv("TOKENWRIGHT_KERNELS", "reference")
    other = "qwen3.5-moe" if kind == "apart" else kind
    one = made.get(kind) or make_next_layer(tmp_path / "made", other, apart=kind == "apart")
    loaded = LoadedModel(one.path)
    tokens = loaded.facts.tokenizer.encode(STORY)[:60]
    with LLM(loaded, speculate="mtp") as llm:
        proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
        layer = proposer.model._layer
        states = one.states(tokens).numpy()
        logits, _ = Rows(layer.decoder, layer.store.specs)(tokens, before=shifted(states))
    expected = one.logits(tokens)
    assert expected.std() > 1 and (torch.tensor(np.array(logits)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("number", range(share(4 * 10)))
def test_texts_with_the_layers_drafts_are_those_without(models: dict[str, LoadedModel], number: int) -> None:
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    asked, options, cut = schedule(draw, models[kind], grammars=False, window=kind == "glm4.5")
    with LLM(models[kind], speculate="off", **options) as llm:
        without = written(llm, asked, cut)
    llm, proposer = opened(models[kind], **options)
    with llm:
        assert written(llm, asked, cut) == without and not has_failed(llm)
        assert not proposer.model._states and not proposer.model._filled, "texts that have ended take no memory"


@pytest.mark.parametrize("kind", [*KINDS, "mimo"])
def test_a_layer_that_copies_the_model_is_always_right(kind: str, tmp_path: Path) -> None:
    path = make_next_layer(tmp_path / "copies", kind, copies=True).path
    params = SamplingParams(**GREEDY, max_tokens=60, logprobs=2)
    with LLM(path, speculate="off") as llm:
        [without] = llm.generate([STORY], params)
    llm, proposer = opened(LoadedModel(path))
    proposer.earlier.capacity, proposer._repeated = 0, lambda *_: None  # no drafts from repeated text
    with llm:
        [done] = llm.generate([STORY], params)
    assert told(done) == told(without)
    assert done.usage.accepted_tokens == done.usage.drafted_tokens > 40


@pytest.mark.parametrize(("kind", "form"), [("glm4.5", Kind.F32), ("deepseek3", Kind.Q8_0), ("qwen3.5", Kind.BF16)])
def test_a_gguf_file_drafts_as_its_folder(kind: str, form: Kind, tmp_path: Path) -> None:
    path = make_next_layer(tmp_path / "copies", kind, copies=True).path
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"_next": 1})
    file = write_gguf(tmp_path / "model.gguf", path, form)
    params = SamplingParams(**GREEDY, max_tokens=60, logprobs=2)
    found = {}
    for name, one in (("folder", path), ("file", file)):
        llm, proposer = opened(LoadedModel(one))
        proposer.earlier.capacity, proposer._repeated = 0, lambda *_: None  # no drafts from repeated text
        with llm:
            [found[name]] = llm.generate([STORY], params)
    with LLM(file, speculate="off") as llm:
        [without] = llm.generate([STORY], params)
    assert told(found["file"]) == told(without)
    assert found["file"].usage.accepted_tokens == found["file"].usage.drafted_tokens > 40
    assert form is not Kind.F32 or told(found["file"]) == told(found["folder"])


def wrong_rows(loaded: LoadedModel, number: int) -> tuple[int, int]:
    """The guesses of the layer while texts run together, and how many came from other logits than a text's own.

    The guesses are put right but for every fifth, so that rows are kept and rejected; each is then computed once more
    by itself, from the model's states of the text and the layer's own behind it.
    """
    draw = random.Random(number)
    options = {"page_size": draw.choice([1, 4, 16]), "token_budget": draw.choice([8, 32, 512])}
    ids = loaded.facts.tokenizer.encode(STORY * 2)
    asked = [
        {
            "prompt": ids[: draw.randint(1, 60)],
            "params": SamplingParams(**GREEDY, max_tokens=40),
            "salt": str(i),
        }
        for i in range(draw.randint(2, 3))
    ]
    with LLM(loaded, speculate="off", **options) as llm:
        texts = {
            one["salt"]: [*one["prompt"], *next(iter(written(llm, [one | {"adapter": None}], None)))[0].token_ids]
            for one in asked
        }
    llm, proposer = opened(loaded, **options)
    proposer.earlier.capacity, proposer._repeated = 0, lambda *_: None
    layer, extend, guesses = proposer.model._layer, proposer.model.extend, []
    reserve = proposer.model.reserve
    proposer.model.reserve = lambda text, most: 0 if len(text.tokens) % 7 in (1, 2) else reserve(text, most)  # lags
    answers: list[Any] = []
    forward = layer.forward_after

    def answered(*arguments: Any) -> Any:
        found = forward(*arguments)
        answers[:] = [found[0].logits[rows.start : rows.stop].copy() for rows in found[0].rows]
        return found

    def corrected(asking: Any) -> Any:
        before = [list(text.tokens) for text in asking]
        found = extend(asking)
        for text, drafts, row in zip(asking, before, answers, strict=True):
            known = text.sequence.tokens
            guesses.append((list(known), drafts, row[0]))
            whole = next(one for one in texts.values() if one[: len(known)] == known)
            place = len(known) + len(drafts)
            if place < len(whole):
                text.tokens[-1] = (whole[place] + (place % 5 == 0)) % loaded.facts.config.vocab_size
        return found

    layer.forward_after, proposer.model.extend = answered, corrected
    with llm:
        with held(llm):
            streams = [llm.stream(**one) for one in asked]
        for stream in streams:
            list(stream)
        assert not has_failed(llm)
        specs, decoder = llm.llm_engine.specs, layer.decoder
    states = {tuple(one): Rows(loaded.decoder, specs)(one)[1] for one in texts.values()}
    wrong = sum(not np.array_equal(row, replayed(decoder, layer.store.specs, states, *one)) for *one, row in guesses)
    return len(guesses), wrong


def replayed(decoder: Any, specs: Any, states: Any, known: list[int], drafts: list[int]) -> Any:
    """The logits of the layer's row of the last draft, or of the last known token."""
    own = next(found for text, found in states.items() if list(text[: len(known)]) == known)
    rows = Rows(decoder, specs)
    logits, after = rows(known, before=shifted(own[: len(known)]))
    for place, token in enumerate(drafts, len(known)):
        logits, after = rows([token], place, after[-1:])
    return logits[-1]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_rows_read_the_text_and_its_states(models: dict[str, LoadedModel], number: int) -> None:
    guessed, wrong = wrong_rows(models[KINDS[number % len(KINDS)]], number)
    assert guessed > 20 and wrong == 0


def left_behind(self: Any, sequence: Any, computed: int, drafts: Any) -> int:
    """A planted fault: what a draft that was not kept has left is taken for the text's own."""
    found = self._filled.get(sequence.id)
    return FILLED(self, sequence, computed, drafts) if found is None else found.known + len(found.guessed)


FILLED, KEEP = DraftModel._filled_of, NextLayer._keep
FAULTS = {
    "left behind": (DraftModel, "_filled_of", left_behind),
    "own states": (NextLayer, "release", DraftModel.release),  # rows that read them count as computed
    "old states": (
        NextLayer,
        "_keep",
        lambda self, sequence, start, rows: self._states.get(sequence.id) or KEEP(self, sequence, start, rows),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_are_seen(models: dict[str, LoadedModel], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert any(wrong_rows(models["glm4.5"], number)[1] for number in range(3))


def test_a_model_without_such_a_layer_is_refused(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"\(MTP\), and stories has none; give suffix"):
        LLM("stories", speculate="mtp")
    with pytest.raises(RequestError, match="leave draft or mtp out"):
        LLM("stories", speculate="mtp", draft="stories")
    with pytest.raises(RequestError, match=r"\(MTP\), and next has none; give suffix"):
        LLM(make_checkpoint(tmp_path / "next", "qwen3-next").path, speculate="mtp")
    with pytest.raises(CheckpointError, match=r"further tokens \(MTP\) cannot be read: .* missing"):
        LLM(make_checkpoint(tmp_path / "half", "deepseek3").path, speculate="mtp")
