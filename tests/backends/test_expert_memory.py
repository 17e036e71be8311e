"""Mixtures whose experts lie in a file: the bits of the model in memory, and a disk that fails."""

import resource
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import httpx2
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.backends.native import needs_native, threads
from tests.equality.harness import checkpoint_of
from tests.llm.test_lora import make_adapter
from tests.models.files.gguf_files import write_gguf
from tests.models.fixtures import make_checkpoint
from tests.oracle.harness import prompt_of
from tests.serve.live import HANGS, live
from tokenwright import LLM, plan
from tokenwright.backends.layout import form_of
from tokenwright.backends.native.expert_pool import ExpertPool
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.packed import packed_sizes
from tokenwright.backends.runner import Model
from tokenwright.cache import layer_specs
from tokenwright.checkpoints import packed_file
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.folder_writer import write_folder
from tokenwright.checkpoints.packing.packer import load_packed, load_paged
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.cluster.processes import open_cluster
from tokenwright.errors import CheckpointError, EngineError, RequestError
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.llm import model
from tokenwright.models.combined import mixtures
from tokenwright.serve.app import Served

pytestmark = needs_native

FORMS = ("float32", "bfloat16", "float16", "int8", "int4")
MIXTURES = (
    *("experts", "shared expert", "learned logits", "values from keys", "latent", "delta rules", "state spaces"),
    *("states by key", "selective scans", "clipped + sinks", "latent + sinks", "one gate a number", "sigmoid experts"),
    *("experts beside shared ones", "experts behind windows", "states beside windows"),
)


def least_pool(checkpoint: Checkpoint, form: WeightFormat) -> int:
    """Bytes of the smallest pool."""
    ops, kept = mixtures(checkpoint.graph), checkpoint.kept(form)
    largest = 0
    for op in ops:
        sizes = [
            packed_sizes(one.out // op.experts, one.inner, form_of(one, resolved(checkpoint, form), kept))
            for one in (op.up, op.down)
        ]
        largest = max(largest, sum(codes + -codes % 64 + 2 * scales + -2 * scales % 64 for codes, scales in sizes))
    return 2 * max(op.chosen for op in ops) * largest


def resolved(checkpoint: Checkpoint, form: WeightFormat) -> WeightFormat:
    return (checkpoint.packed or form).resolved("float32")


def compare(checkpoint: Checkpoint, form: str, folder: Path) -> None:
    """A prompt that names more experts than the pool holds, then token by token: some meet what is there."""
    kernels, wanted = find_kernels(), WeightFormat.parse(form)
    assert kernels is not None
    whole, paged = (
        load_packed(checkpoint, wanted, "float32"),
        load_paged(checkpoint, wanted, "float32", WeightCache(folder / "cache")),
    )
    pool = ExpertPool(kernels.library, checkpoint.graph, paged, least_pool(checkpoint, wanted))
    specs = layer_specs(checkpoint.graph, "float32", KVFormat())
    models = [
        Model(decoder, specs)
        for decoder in (
            NativeDecoder(checkpoint.graph, kernels, whole),
            NativeDecoder(checkpoint.graph, kernels, paged, pool=pool),
        )
    ]
    with threads(2):
        (expected, one), (found, other) = (model(prompt_of(60)) for model in models)
        assert pool.counts["named"] > pool.slots, "there are several rounds"
        rows = [(expected, found)]
        rows += [(models[0]([token], one)[0], models[1]([token], other)[0]) for token in prompt_of(8, seed=3)]
    assert all(np.array_equal(*both) for both in rows)
    counts = pool.counts
    assert counts["failed"] == 0 < counts["hits"] + counts["ahead"]
    assert counts["hits"] < counts["named"] <= counts["hits"] + counts["reads"]
    assert pool.nbytes // pool.slots >= counts["bytes"] / counts["reads"] > 0


@pytest.mark.parametrize(("kind", "form"), [*zip(MIXTURES, cycle(FORMS), strict=False)])
def test_experts_in_a_file_compute_the_bits_of_those_in_memory(kind: str, form: str, tmp_path: Path) -> None:
    compare(checkpoint_of(kind)[0], form, tmp_path)


WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "mlp_only_layers": []}


@pytest.mark.parametrize("kind", ["Q8_0", "TQ2_0", "MXFP4"])
def test_blocks_of_a_gguf_file_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "model", "qwen3-moe", changes=WIDE)
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "model.gguf", folder, GGMLQuantizationType[kind]))
    assert checkpoint.kept(WeightFormat("native"))
    compare(checkpoint, "native", tmp_path)


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path / "cache"))
    return make_checkpoint(tmp_path / "model", "qwen3-moe", changes={"num_hidden_layers": 3, "mlp_only_layers": []})[0]


PROMPTS = [list(prompt_of(1 + seed % 3, seed=seed)) for seed in range(16)]


def texts_of(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(one.token_ids) for one in llm.generate(prompts, max_tokens=3, temperature=0, ignore_eos=True)]


def opened(mixture: Path, **options: object) -> LLM:
    memory = least_pool(Checkpoint.open(mixture), WeightFormat("native"))
    return LLM(mixture, speculate="off", **{"expert_memory": memory} | options)


def test_texts_of_a_batch_are_those_in_memory(mixture: Path) -> None:
    with LLM(mixture) as whole, opened(mixture) as llm:
        assert texts_of(llm) == texts_of(whole)
        assert llm.weight_bytes < whole.weight_bytes
    with opened(mixture) as again:
        assert texts_of(again), "the file of the first time is used"


def test_a_disk_that_fails_ends_the_texts_that_meet_it_and_no_other(mixture: Path) -> None:
    """The file is cut in the middle of the last layer's experts: later ones cannot be read any more."""
    with LLM(mixture) as whole:
        expected = texts_of(whole)
    with opened(mixture) as llm:
        loaded = llm.llm_engine.loaded
        part = loaded.decoder.weights[mixtures(loaded.facts.graph)[-1].down.name]
        disk, content = part.on_disk, part.on_disk.file.read_bytes()
        with disk.file.open("r+b") as stream:
            stream.truncate(disk.codes + part.out * part.inner * 4 * 15 // 16)
        with pytest.raises(EngineError, match=r"an expert of the model cannot be read from .*ends too early"):
            texts_of(llm)
        outcomes = []
        for prompt in PROMPTS:
            try:
                outcomes += texts_of(llm, [prompt])
            except EngineError:
                outcomes.append(None)
        with pytest.raises(EngineError) as error:
            texts_of(llm)
        together = [None if one is None else list(one.token_ids) for one in error.value.completions]
        assert together == outcomes, "a text that fails takes no other with it"
        assert None in outcomes and any(one is not None for one in outcomes)
        assert all(one in (None, text) for one, text in zip(outcomes, expected, strict=True))
        with disk.file.open("r+b") as stream:
            stream.write(content)
        assert texts_of(llm) == expected, "nothing of the failed texts is left in the cache"


def test_replicas_have_pools_of_their_own_and_sum_their_counts(mixture: Path) -> None:
    with LLM(mixture) as whole:
        expected = texts_of(whole)
    memory = 2 * least_pool(Checkpoint.open(mixture), WeightFormat("native"))
    with open_cluster(str(mixture), 2, {"expert_memory": memory, "kv_memory": 1 << 24}) as llm:
        found, loop = llm.llm_engine, llm.llm_engine.loop
        assert set(found.expert_counts.values()) == {0}, "known before the first text"
        while len(loop.names) < 2:
            time.sleep(0.01)
        assert texts_of(llm) == expected
        each = [one.experts for one in loop._supervisor.seats]
        assert found.expert_counts == {name: sum(one.get(name, 0) for one in each) for name in found.expert_counts}
        assert found.expert_counts["named"] > 0 < found.expert_counts["reads"] and not found.expert_counts["failed"]


def test_a_pool_too_small_or_for_nothing_is_refused(mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"expert_memory .* holds . of the model's experts.*give at least"):
        opened(mixture, expert_memory=least_pool(Checkpoint.open(mixture), WeightFormat("native")) - 1)
    dense, _ = make_checkpoint(tmp_path / "dense", "llama2")
    with pytest.raises(RequestError, match="expert_memory is for mixtures"):
        LLM(dense, expert_memory="1GB")
    with pytest.raises(RequestError, match="expert_memory must be bytes"):
        LLM(mixture, expert_memory="much")


def test_a_model_that_does_not_fit_opens_with_the_memory_that_there_is(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(mixture)
    with LLM(mixture) as whole:
        expected = texts_of(whole)
    least = least_pool(checkpoint, WeightFormat("native"))
    whole_bytes = checkpoint.nbytes
    monkeypatch.setattr(model, "free_memory", lambda _: whole_bytes - 1)
    with LLM(mixture, speculate="off") as llm:
        pool = llm.llm_engine.loaded.decoder.pool
        assert least <= pool.nbytes < whole_bytes
        assert texts_of(llm) == expected


def test_a_damaged_file_is_made_again(mixture: Path, tmp_path: Path) -> None:
    with opened(mixture) as llm:
        expected = texts_of(llm)
    [file] = (tmp_path / "cache").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # a norm, whose checksum is tested
    file.write_bytes(content)
    with opened(mixture) as llm:
        assert texts_of(llm) == expected
    assert file.read_bytes() != bytes(content)


def test_a_packed_folder_is_read_where_it_lies(mixture: Path, tmp_path: Path) -> None:
    checkpoint, form = Checkpoint.open(mixture), WeightFormat.parse("int8")
    write_folder(checkpoint, tmp_path / "packed", form, load_packed(checkpoint, form, "float32"))
    with LLM(tmp_path / "packed") as whole, opened(tmp_path / "packed") as llm:
        assert texts_of(llm) == texts_of(whole)
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]


def test_experts_are_looked_into_op_by_op(mixture: Path) -> None:
    """The explorer computes op by op, and so reads experts one by one."""
    with opened(mixture) as llm:
        decoder = llm.llm_engine.loaded.decoder
        [op, *_] = mixtures(decoder.graph)
        part = decoder.weights[op.up.name].split(op.experts)[3].in_memory()
    whole = load_packed(Checkpoint.open(mixture), WeightFormat("native"), "float32")[op.up.name].split(op.experts)[3]
    assert np.array_equal(part.unpack(), whole.unpack())


def test_a_cut_file_is_an_error_op_by_op(mixture: Path) -> None:
    """A mapped file would end the process by a signal."""
    with opened(mixture) as llm:
        decoder = llm.llm_engine.loaded.decoder
        last = decoder.weights[mixtures(decoder.graph)[-1].down.name].split(8)[-1]
        with last.on_disk.file.open("r+b") as stream:
            stream.truncate(last.on_disk.codes + 1)
        with pytest.raises(EngineError, match=r"an expert of the model cannot be read from .*ends too early"):
            last.in_memory()


def test_a_disk_that_becomes_full_ends_the_packing(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may allocate no space in advance; Python ignores the signal of a file that is too large."""
    monkeypatch.setattr(packed_file.os, "posix_fallocate", lambda *_: None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"the weights cannot be written to .*\(File too large\); make room"):
            opened(mixture)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with LLM(mixture) as whole, opened(mixture) as llm:
        assert texts_of(llm) == texts_of(whole), "nothing of the broken file is used"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT's use of transformers
def test_adapters_of_attention_are_computed_beside_experts_in_a_file(mixture: Path, tmp_path: Path) -> None:
    adapter, _ = make_adapter(mixture, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], r=4)
    asked = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    with LLM(mixture, adapters={"a": adapter}) as whole, opened(mixture, adapters={"a": adapter}) as llm:
        expected, found = (
            [list(o.generate([p], adapter="a", **asked)[0].token_ids) for p in PROMPTS] for o in (whole, llm)
        )
        assert found == expected
        assert found != texts_of(llm), "the adapter changes texts"


def test_a_reply_says_what_was_read_for_it(mixture: Path) -> None:
    memory = least_pool(Checkpoint.open(mixture), WeightFormat("native"))
    with live(mixture, expert_memory=memory, speculate="off", served=Served(["tiny"], timings=True)) as server:
        body = {"model": "tiny", "prompt": [3, 5, 7], "max_tokens": 4, "ignore_eos": True}
        before = dict(server.llm.llm_engine.expert_counts)
        found = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=HANGS).json()["timings"]["experts"]
        after = server.llm.llm_engine.expert_counts
    assert found["named"] == after["named"] - before["named"] > 0
    assert 0 < found["bytes"] <= after["bytes"] - before["bytes"]
    assert found.keys() == after.keys()


def test_a_plan_foretells_the_bytes_that_a_token_reads(mixture: Path) -> None:
    """Of a pool of half of the experts: more than is read on demand, less than with the guesses of what comes next.

    The random routers of this model choose each expert about as often, and two guesses of three are wrong.
    """
    memory, steps = plan(mixture, expert_memory="1GB").expert_bytes // 2, 300
    with LLM(mixture, speculate="off", expert_memory=memory) as llm:
        llm.generate([[3, 5, 7]], max_tokens=100, temperature=1, seed=1, ignore_eos=True)
        before = dict(llm.llm_engine.expert_counts)
        llm.generate([[9, 5, 7]], max_tokens=steps, temperature=1, seed=2, ignore_eos=True)
        read = {name: (count - before[name]) / steps for name, count in llm.llm_engine.expert_counts.items()}
    expert = read["bytes"] / read["reads"]
    foretold = plan(mixture, expert_memory=memory).disk_bytes
    assert (read["reads"] - read["ahead"]) * expert < foretold < read["bytes"] < 2 * foretold
