"""Pictures against transformers in fp32, and against ourselves by ==: chunks, no cache, batches, other pictures."""

import asyncio
import math
import tracemalloc
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.engine.invariants import check_invariants
from tests.trace.definition import row_of_run
from tests.vision.models import IMAGE, KINDS, LACKING, make_model, picture, question
from tokenwright import LLM
from tokenwright.backends.towers import tower_runner
from tokenwright.engine import prefix_index
from tokenwright.engine import scheduler as scheduling
from tokenwright.engine.pictures import Spans
from tokenwright.errors import RequestError
from tokenwright.explorer.explorer import Explorer, NewFork, NewRun, OpenedModel
from tokenwright.explorer.panels.block import block
from tokenwright.explorer.panels.heads import matrix
from tokenwright.explorer.panels.times import run_halves
from tokenwright.pictures.processors import largest
from tokenwright.planner.find import find
from tokenwright.units import binary

PROCESSORS = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen2VL", "qwen3_5": "Qwen2VL", "mistral3": "Pixtral",
    "pixtral": "Pixtral", "llava": "CLIP", "internvl": "GotOcr2",
}  # fmt: skip
WHOLE = {"gemma3"}  # kinds whose rows of a picture read each other
BLOCKS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")  # Qwen's towers
TOLERANCE = 1e-4  # of log-probabilities, ours against transformers'


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make_model(folder, request.param)


def pixels(
    kind: str, pictures: list[Image.Image], settings: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The output of transformers' own processor for pictures."""
    settings = settings or KINDS[kind][2]
    processor = getattr(transformers, f"{PROCESSORS.get(kind, KINDS[kind][0])}ImageProcessorPil")(**settings)
    found = processor(images=[[one] for one in pictures] if kind == "smolvlm" else pictures, return_tensors="pt")
    for name in ("num_patches", "rows", "cols", "num_soft_tokens_per_image"):
        found.pop(name, None)
    return dict(found)


def of_spans(spans: Spans) -> dict[str, torch.Tensor]:
    """Pixels as we resize them, as transformers' LFM2-VL takes them; its processor needs torchvision."""
    shapes = [(one.pixels.height // 4, one.pixels.width // 4) for one in spans]
    rows, mask = torch.zeros(len(spans), most := max(map(math.prod, shapes)), 48), torch.zeros(len(spans), most)
    for at, (one, (down, across)) in enumerate(zip(spans, shapes, strict=True)):
        raw = np.frombuffer(one.pixels.data, np.uint8).reshape(down, 4, across, 4, 3).transpose(0, 2, 1, 3, 4)
        rows[at, : down * across] = torch.from_numpy(raw.reshape(-1, 48) / 127.5 - 1)
        mask[at, : down * across] = 1
    return {"pixel_values": rows, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


def computed(kind: str, model: Any, ids: list[int], pixels: dict[str, torch.Tensor], **options: bool) -> Any:
    """The output of transformers for a prompt."""
    tokens = torch.tensor([ids])
    types = (tokens == IMAGE).long()
    takes = {"gemma3": "token_type_ids"} | dict.fromkeys([*BLOCKS, "gemma4"], "mm_token_type_ids")
    more = {takes[kind]: types} if kind in takes else {}
    with torch.no_grad():
        return model(input_ids=tokens, **pixels, **more, **options)


def oracle(kind: str, model: Any, ids: list[int], pixels: dict[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    """transformers' log-probabilities of each token after the first."""
    logits = computed(kind, model, ids, pixels).logits[0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()


def scored(llm: LLM, messages: list[dict[str, Any]], **options: Any) -> tuple[float, ...]:
    """The log-probabilities of a conversation's prompt after its first token, and of two tokens behind it."""
    done = llm.chat(messages, temperature=0.0, max_tokens=2, prompt_logprobs=0, logprobs=0, **options)
    assert done.logprobs is not None
    return (*done.prompt_logprobs, *done.logprobs)


@pytest.fixture
def seeing(kind: tuple[str, Path, Any]) -> tuple[str, Path, Any]:
    """One kind for each way to see: spans that no chunk cuts, axes of positions, states beside pages, tiles."""
    if kind[0] not in ("gemma3", "gemma4", "qwen3_vl", "qwen3_5", "smolvlm", "lfm2_vl"):
        pytest.skip("another kind shows the same")
    return kind


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_transformers_agrees(kind: tuple[str, Path, Any], kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder, model = kind
    if kernels == "reference" and name not in ("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "internvl", "lfm2_vl"):
        pytest.skip("others have no op that these lack")
    monkeypatch.setenv("TOKENWRIGHT_KERNELS", kernels)
    pictures = [picture(50, 70, 1), picture(90, 40, 2)]
    talk = question("See ", pictures[0], " and then this one: ", pictures[1], "what?")
    with LLM(folder, dtype="float32") as llm:
        rendered, ours = llm.render(talk), scored(llm, talk)
        rows = llm.inspect(
            lambda engine: [engine.scheduler.pictures.source.rows(one.pixels)[0] for one in rendered.pictures]
        )
    given = of_spans(rendered.pictures) if name == "lfm2_vl" else pixels(name, pictures)
    with torch.no_grad():
        features = model.get_image_features(**given, return_dict=True).pooler_output
    expected = torch.cat([one.reshape(-1, 32) for one in features]).numpy()
    found = np.concatenate(list({one.tobytes(): one for one in rows}.values()))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
    theirs = oracle(name, model, list(rendered.ids), given)
    assert np.abs(np.array(ours[: len(theirs)]) - theirs).max() < TOLERANCE


def test_every_way_to_compute_has_the_same_bits(seeing: tuple[str, Path, Any]) -> None:
    """Chunks of several sizes, small pages, no cache, a prefix that ends in a picture, and neighbours in the batch."""
    _, folder, _ = seeing
    talk = question("See ", picture(50, 70, 1), " and ", picture(90, 40, 2), "what?")
    with LLM(folder, dtype="float32") as llm:
        whole = scored(llm, talk)
        assert scored(llm, talk, cache=False) == whole
        llm.chat(question("See ", picture(50, 70, 1), "no"), max_tokens=1, temperature=0)
        assert scored(llm, talk) == whole
    for options in ({"token_budget": 19}, {"token_budget": 23, "page_size": 4}, {"page_size": 1}):
        with LLM(folder, dtype="float32", **options) as llm:
            assert scored(llm, talk) == whole, options
            assert scored(llm, talk, cache=False) == whole, options


def test_a_run_shows_what_each_head_reads_of_a_picture(kind: tuple[str, Path, Any]) -> None:
    """Rows of all steps, from the cache, from freed pages and by definition, and matrices: transformers' weights."""
    name, folder, model = kind
    if name not in ("gemma3", "qwen3_vl", "mistral3"):
        pytest.skip("others have spans, positions and layouts of these kinds")
    pictures = [picture(50, 70, 1), picture(90, 40, 2)]
    with LLM(folder, dtype="float32", trace=True, token_budget=40) as llm:
        explorer = Explorer(OpenedModel(name, llm))
        rendered = llm.render(question("See ", pictures[0], " and ", pictures[1], "what?"))
        held = explorer.hold(rendered.ids, rendered.pictures)
        card = explorer.begin(NewRun(prompt="", pictures=held, temperature=1.0, seed=5, max_tokens=3, ignore_eos=True))
        cells = [
            start + at
            for one in card.pictures
            for start in one.starts
            for at in range(one.rows * one.columns // len(one.starts))
        ]
        assert cells == [at for at, token in enumerate(rendered.ids) if token == IMAGE]
        run = explorer.run(card.run)
        while not run.ended:
            run.step()
        model.set_attn_implementation("eager")
        try:
            read = computed(name, model, list(run.tokens[:-1]), pixels(name, pictures), output_attentions=True)
        finally:
            model.set_attn_implementation("sdpa")
        theirs = np.stack([one[0].numpy() for one in read.attentions])  # [L, H, T, T]
        rows = {}
        for frame in run.frames:
            at = run.last_position(frame.step)
            for layer, head in np.ndindex(*theirs.shape[:2]):
                row = rows[frame.step, layer, head] = run.attention(frame.step, layer, head)
                found = np.frombuffer(row.codes, np.uint8)
                assert np.abs(found - 255 * np.sqrt(theirs[layer, head, at, : at + 1])).max() < 1
            given = np.array(row_of_run(run, frame.step, 1, 0))
            assert np.abs(given - theirs[1, 0, at, : at + 1]).max() < TOLERANCE
        for layer, head in np.ndindex(*theirs.shape[:2]):
            *_, found = matrix(explorer, card.run, run.frames[-1].step, layer, head)
            codes = np.frombuffer(b64decode(found.codes), np.uint8).reshape(found.size, found.size)
            assert np.abs(codes - 255 * np.sqrt(theirs[layer, head])).max() < 1
        middle = (cells[0] + cells[3]) // 2
        seen = block(explorer, card.run, run.frames[-1].step, 1, middle)
        assert [one.position for one in seen.reads] == theirs[1, :, middle].argmax(-1).tolist()
        again = explorer.run(explorer.fork(card.run, NewFork(step=run.frames[-3].step)).run)
        while not again.ended:
            again.step()
        assert again.tokens == run.tokens
        *_, halves = run_halves(run)
        both = ([one.token for one in frames if one.token is not None] for frames in (halves[0].frames, run.frames))
        assert [*both] == [list(run.tokens[-3:])] * 2
        run.close()
        for (step, layer, head), row in rows.items():
            assert run.attention(step, layer, head) == row
        again.close()


def texts(llm: LLM, talks: list[list[dict[str, Any]]], **options: Any) -> list[tuple[float, ...]]:
    """The log-probabilities of conversations' answers, which are computed in one batch."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(
            *(llm.achat(one, temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, **options) for one in talks)
        )

    return [tuple(done.logprobs) for done in asyncio.run(all_of_them())]


def test_equal_sizes_and_single_pixels_are_told_apart(seeing: tuple[str, Path, Any]) -> None:
    """Two pictures swapped, one twice, and one with another pixel: the cache never takes one for the other."""
    _, folder, _ = seeing
    one, two = picture(64, 64, 1), picture(64, 64, 2)
    changed = one.copy()
    changed.paste((255, 0, 255), (30, 30, 34, 34))
    orders = ((one, two), (two, one), (one, one), (changed, two), (one, changed))
    talks = [question("a", first, "b", second, "what?") for first, second in orders]
    fresh = []
    for talk in talks:
        with LLM(folder, dtype="float32", page_size=4) as llm:
            fresh.append(scored(llm, talk))
    assert len(set(fresh)) == len(fresh)
    with LLM(folder, dtype="float32", page_size=4) as llm:
        for _ in range(2):
            assert [scored(llm, talk) for talk in talks] == fresh
        again = llm.chat(talks[1], temperature=0, max_tokens=1)
        assert again.usage.reused_tokens > again.usage.prompt_tokens - (
            32 if seeing[0] in ("qwen3_5", "lfm2_vl") else 8
        )


def test_pressure_changes_nothing(seeing: tuple[str, Path, Any], tmp_path: Path) -> None:
    """Preemption, and pages of the disk tier in a second engine."""
    _, folder, _ = seeing
    talks = [question(f"{at}", picture(64, 64, at % 3), "then", picture(64, 60, at % 2), "what?") for at in range(4)]
    with LLM(folder, dtype="float32") as llm:
        alone = [texts(llm, [talk])[0] for talk in talks]
        most = max(len(llm.render(talk).ids) for talk in talks)
    for options in (
        {},
        {"kv_disk": str(tmp_path / "disk")},
        {"kv_disk": str(tmp_path / "disk")},
    ):
        pages = 3 * (most + 16) // 2 // 8
        with LLM(folder, dtype="float32", page_size=8, pages=pages, token_budget=96, **options) as llm:
            assert texts(llm, talks) == alone, options
            llm.inspect(lambda engine: check_invariants(engine.scheduler))


def test_the_tower_is_counted_before_it_is_loaded(kind: tuple[str, Path, Any]) -> None:
    """By the plan, as many bytes as the loaded one has; and its rows are kept, so a second prompt needs no tower."""
    _, folder, _ = kind
    planned = find(str(folder))[1].remarks
    with LLM(folder, dtype="float32") as llm:
        for text in ("one", "two"):
            llm.chat(question(picture(64, 64, 1), text), max_tokens=1, temperature=0)
        pictures = llm.inspect(lambda engine: engine.scheduler.pictures.source)
        seen = {span.pixels.digest for span in llm.render(question(picture(64, 64, 1), "one")).pictures}
        assert pictures.computed == len(seen)
        size = sum(4 * weight.size for weight in llm.llm_engine.loaded.vision.checkpoint.tensors("float32").values())
    assert any(f"a tower of {binary(size)}" in remark for remark in planned)


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_picture_takes_the_memory_of_the_plan(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest picture's, within a quarter: of short slices, whose own arrays are small."""
    monkeypatch.setattr(tower_runner, "WORK", 1 << 20)
    _, config, processor, _ = KINDS[kind]
    if kind == "gemma3":
        tower = config["vision_config"] | {"image_size": 256}
        config, processor = config | {"vision_config": tower}, processor | {"size": {"height": 256, "width": 256}}
    else:
        processor = processor | {"size": {"shortest_edge": 256, "longest_edge": 256**2}}
    make_model(tmp_path, kind, 0, config, processor)
    with LLM(tmp_path, dtype="float32", pages=64) as llm:
        vision, tower = llm.llm_engine.loaded.vision, llm.llm_engine.loaded.tower()
        planned = vision.sight.tower.working_bytes(largest(vision.processor))
        [pixels] = [one.pixels for one in vision.processor.layout(picture(256, 256)) if not isinstance(one, str)]
        tracemalloc.start()
        for _ in tower.slices(pixels):
            pass
        _, measured = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert abs(measured / planned - 1) < 0.25, (measured, planned)
    assert any(binary(planned) in remark for remark in find(str(tmp_path))[1].remarks)


@pytest.mark.parametrize(
    ("kind", "part", "own", "needs"),
    [
        ("onevision", "vision_config", {}, "rows of tiles"),  # its image_newline lies beside the tower
        ("gemma4", "text_config", {"use_bidirectional_attention": "vision"}, "rows read each other in some layers"),
        ("gemma4", "vision_config", {"standardize": True}, "rows shifted and scaled"),
    ],
)
def test_texts_run_where_pictures_are_refused(
    kind: str, part: str, own: dict[str, Any], needs: str, tmp_path: Path
) -> None:
    config = {**KINDS, **LACKING}[kind][1]
    model, talk = make_model(tmp_path, kind, 0, config | {part: config[part] | own}), question("what?")
    with LLM(tmp_path, dtype="float32") as llm:
        theirs = oracle(kind, model, list(llm.render(talk).ids), {})
        assert np.abs(np.array(scored(llm, talk)[: len(theirs)]) - theirs).max() < TOLERANCE
        with pytest.raises(RequestError, match=needs):
            llm.chat(question(picture(8, 8), "what?"))


def test_a_hash_without_the_pixels_is_caught(seeing: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if seeing[0] != "gemma3":
        pytest.skip("the hash is the same for all kinds")
    monkeypatch.setattr(prefix_index, "content", lambda *_: b"")
    with pytest.raises(AssertionError):
        test_equal_sizes_and_single_pixels_are_told_apart(seeing)


def test_a_chunk_that_cuts_a_picture_is_caught(kind: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if kind[0] not in WHOLE:
        pytest.skip("its rows read backwards alone")
    monkeypatch.setattr(scheduling, "uncut", lambda _spans, _start, stop: stop)
    with pytest.raises(AssertionError):
        test_every_way_to_compute_has_the_same_bits(kind)
