"""The backend `wgpu`: its kernels beside the CPU's, its proof, its errors, and what a step costs.

Logits may differ by rounding alone: `gpu.rounding` is the formula. Sums of integers are equal to the bit.
"""

import importlib.util
import json
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.backends.gpu import (
    REFUSED,
    AlteredGpu,
    checkpoint,
    chunk,
    counted,
    needs_gpu,
    pair,
    weights_of,
)
from tests.backends.native import OF_FILES, blocks
from tests.checkpoints.gguf.test_gguf import LARGER, MIXED
from tests.llm.drafts.test_speculation import has_failed, with_draft
from tests.llm.test_lora import CASES, make_adapter
from tests.models.files.gguf_files import write_gguf
from tests.models.fixtures import make_checkpoint
from tests.oracle.harness import prompt_of
from tokenwright import LLM, SamplingParams
from tokenwright.arrays import Floats
from tokenwright.backends.device import Device
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.native.native_passes import NativePasses
from tokenwright.backends.native.program import NativeBackend, NativeDecoder
from tokenwright.backends.packed import Packed
from tokenwright.backends.runner import gpu_decoder
from tokenwright.backends.wgpu import proof as proofs
from tokenwright.backends.wgpu.cut import cut, layers_before
from tokenwright.backends.wgpu.gpu import FACTS, Gpu, open_gpu
from tokenwright.backends.wgpu.gpu_backend import GpuBackend, GpuDecoder
from tokenwright.backends.wgpu.proof import proof, proof_file, prove, read_proof
from tokenwright.backends.wgpu.uploads import uploaded
from tokenwright.cache import KVStore, layer_specs
from tokenwright.cli import app
from tokenwright.cli.commands import verify
from tokenwright.errors import CapacityError, CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.llm import model as loading
from tokenwright.llm.model import LoadedModel
from tokenwright.models.graph import Deepstack
from tokenwright.models.taps import Site

pytestmark = needs_gpu

TEXT = prompt_of(36)
BOUND = "max-storage-buffers-per-shader-stage"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.mark.parametrize(
    ("form", "inner"), [("int8", 64), ("int8", 40), ("int8:32", 32), ("int4:64", 64), ("int4:32", 32)]
)
def test_sums_of_integers_are_those_of_the_cpu_to_the_bit(form: str, inner: int) -> None:
    """With one group of inputs an output is one exact sum times its scale; the codes are the CPU's too."""
    packed = Packed.empty(40, inner, WeightFormat.parse(form))
    packed.pack_rows(0, np.random.default_rng(0).standard_normal((40, inner)).astype(np.float32))
    for found, expected in products(packed):
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", OF_FILES, ids=str)
def test_a_matrix_as_files_have_it_has_the_products_and_rows_of_the_cpu(form: WeightFormat) -> None:
    """But for the rounding of four additions in another order, which a driver may not fuse."""
    packed = blocks(form, 40, 512, bias=True).packed
    for found, expected in products(packed):
        assert np.abs(found - expected).max() <= 2.0**-20 * np.abs(expected).max()
    device, width, ids = open_gpu(None), 512, np.arange(5) * 9
    matrix, x = uploaded(device, packed), device.buffer(4 * 5 * width)
    [piece], step = matrix.pieces, [5, 0, 0, 4, *ids]
    buffers = [piece.codes, piece.scales, matrix.factors or device.nothing, device.nothing, x]
    computed(device, "embed", {**matrix.constants, "PLACES": False}, buffers, (width, matrix.slabs, 1.0, 0, 40), step)
    found, expected = device.read(x, 0, 4 * 5 * width).view(np.float32).reshape(5, width), np.asarray(packed.rows(ids))
    assert np.abs(found - expected).max() <= 2.0**-22 * np.abs(expected).max()


def products(packed: Packed) -> Iterator[tuple[Floats, Floats]]:
    """Five random rows times a matrix [40, inner], on the device by each tile, and on the CPU."""
    device, native, inner = open_gpu(None), find_kernels(), packed.inner
    assert native is not None, "tests are marked needs_gpu"
    x = np.random.default_rng(1).standard_normal((5, inner)).astype(np.float32)
    matrix, nothing = uploaded(device, packed), device.nothing
    rows, y, [piece] = device.buffer(20 * matrix.row_words), device.buffer(800), matrix.pieces
    constants = {"GROUP": matrix.group}
    computed(device, "quantise", constants, [device.uploaded(x), rows], (inner, inner, matrix.depth, 0, 1))
    facts = (matrix.row_words, inner, matrix.slabs, 40, 40, 0, 0, int(matrix.bias is not None), 0, 0, 0, 1)
    buffers = [rows, piece.codes, piece.scales, matrix.bias or nothing, matrix.factors or nothing, nothing, y]
    for tile in (1, 4):
        computed(device, "linear", {**matrix.constants, "TILE": tile}, buffers, facts)
        yield device.read(y, 0, 800).view(np.float32).reshape(5, 40), native.linear(x, packed)


def computed(
    device: Gpu,
    name: str,
    constants: dict[str, int],
    buffers: list[Any],
    facts: tuple[int | float, ...],
    step: Sequence[int] = (5, 0, 0, 0),
    blocks: int = 8,
) -> None:
    """One dispatch of a kernel over five rows."""
    kernel, words = device.kernel(name, **constants), np.zeros(FACTS // 4, np.uint32)
    words[: len(facts)] = [np.float32(one).view(np.uint32) if isinstance(one, float) else one for one in facts]
    encoder = device.device.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(kernel.pipeline)
    bound = [device.uploaded(np.array(step, np.uint32)), *buffers]
    compute.set_bind_group(0, device.group(kernel, bound, device.uploaded(words), 0))
    compute.dispatch_workgroups(blocks, 5, 1)
    compute.end()
    device.submit(encoder)


def test_a_greedy_step_is_one_submission_reads_a_few_bytes_and_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = ["Once upon a time", "The little dog", "One day a bird"]
    with LLM("stories", device="cpu", dtype="float32") as llm:
        expected = [one.token_ids for one in llm.generate(prompts, GREEDY)]
        drawn = llm.generate(prompts[0], SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=2))
    device, made = open_gpu(None), []
    plain = type(device).buffer
    with LLM("stories", device="gpu", dtype="float32", speculate="off") as llm:
        assert llm.kernels == "wgsl" and [one.token_ids for one in llm.generate(prompts, GREEDY)] == expected
        monkeypatch.setattr(type(device), "buffer", lambda self, size: made.append(size) or plain(self, size))
        found: list = []
        submissions, read = counted(device, lambda: found.extend(llm.generate(prompts, GREEDY)))
        assert [one.token_ids for one in found] == expected
        assert submissions == 6 and read == 6 * 3 * 12, "12 bytes for each of three rows"
        assert not made
        again = llm.generate(prompts[0], SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=2))
        assert again[0].token_ids == drawn[0].token_ids
        for k, size in ((20, 12 + 4 * 129), (100, 12 + 4 * 129 + 4 * 4096)):  # the 64 highest logits, or all
            few = SamplingParams(temperature=0.8, seed=3, max_tokens=6, top_k=k)
            llm.generate(prompts[0], few)  # a step after one that drew finds them
            submissions, read = counted(device, lambda: found.extend(llm.generate(prompts[0], few)))  # noqa: B023
            [again] = llm.generate(prompts[0], replace(few, logprobs=1))  # from whole rows
            assert found[-1].token_ids == again.token_ids and (submissions, read) == (6, 6 * size)


def test_a_draft_model_reads_a_few_bytes_a_token(tmp_path: Path) -> None:
    """Also one with fewer ids than the model, whose rows stay on the device."""
    model, draft = (
        make_checkpoint(tmp_path / name, "llama2", changes=changes).path
        for name, changes in (("model", {"vocab_size": 384}), ("draft", {}))
    )
    loaded, drawn = LoadedModel(model, device="gpu", dtype="float32"), replace(GREEDY, temperature=0.8, seed=3, top_k=9)
    with LLM(loaded, speculate="off") as llm:
        expected = [llm.generate([TEXT], params)[0].token_ids for params in (GREEDY, drawn)]
    for params, text in zip((GREEDY, drawn), expected, strict=True):
        with with_draft(loaded, str(draft), "native", {}) as llm:
            llm.generate([TEXT[:20]], drawn)  # a step after one that drew finds the highest logits
            found: list[Any] = []
            submissions, read = counted(open_gpu(None), lambda: found.extend(llm.generate([TEXT], params)))  # noqa: B023
            assert found[0].token_ids == text and found[0].usage.drafted_tokens and not has_failed(llm)
            assert read < submissions * 8 * (12 + 4 * 129), "no row of 256 logits is read"


def test_a_gguf_file_of_k_quants_is_computed_as_it_lies(tmp_path: Path) -> None:
    """On a device with the limits that WebGPU grants everywhere."""
    folder = make_checkpoint(tmp_path / "model", "llama2", changes=LARGER).path
    file, text = write_gguf(tmp_path / "model.gguf", folder, blocks=MIXED), list(range(10, 60))
    with LLM(file, device="cpu", dtype="float32") as theirs, LLM(file, device="gpu", dtype="float32") as ours:
        assert ours.loaded.copies == theirs.loaded.copies and ours.loaded.decoder.gpu.device.limits[BOUND] == 8
        found, expected = np.array(ours.score(text)), np.array(theirs.score(text))
        assert np.abs(found - expected).max() < 2 / 127 * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "named"), REFUSED.items())
def test_what_no_kernel_computes_is_refused_by_its_name_before_it_is_loaded(kind: str, named: str) -> None:
    def load() -> Any:
        raise AssertionError("this takes minutes")

    with pytest.raises(CheckpointError, match=f"needs .*{named}.*use device cpu"):
        gpu_decoder(checkpoint(kind).graph, Device("gpu"), load, "float32", "8GB")


def test_blocks_without_a_layer_are_counted_with_others() -> None:
    graph = checkpoint("residual streams").graph
    held = [graph.blocks_from(layer) for layer in range(graph.layers + 1)]
    assert held[0] == graph.blocks and held[-1] == graph.blocks[len(graph.blocks) - len(held[-1]) :]
    assert all(len(more) > len(fewer) for more, fewer in pairwise(held))
    with pytest.raises(RequestError, match="part layers that share K and V"):
        layers_before(graph, weights_of("residual streams", "float32"), "300kB")


def test_what_a_tower_adds_to_pictures_is_nothing_without_them() -> None:
    (ours, _), graph = pair("GQA"), checkpoint("GQA").graph
    deep = replace(graph, blocks=(*graph.blocks[:2], Deepstack(0), *graph.blocks[2:]))
    backend = GpuBackend(GpuDecoder(deep, open_gpu(None), weights_of("GQA", "float32")), ours.store)
    batch = chunk(1, TEXT)
    found, expected = (np.asarray(one(batch).rows) for one in (backend, ours))
    assert found.tobytes() == expected.tobytes()


def test_options_that_need_the_cpu_are_refused() -> None:
    for options, named in (
        ({"trace": True}, "has no trace"),
        ({"kv": "int8,first=4"}, "first"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ):
        with pytest.raises(RequestError, match=named), LLM("stories", device="gpu", **options):
            pass


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of PEFT, which makes the adapter
def test_an_adapter_is_merged_and_beside_the_weights_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama2").path
    folder, _ = make_adapter(model, tmp_path / "adapter", **CASES["attention"][1])
    texts = []
    for device in ("cpu", "gpu"):
        with LLM(model, lora=[folder], device=device, dtype="float32") as llm:
            texts.append(llm.generate([TEXT], GREEDY)[0].token_ids)
    assert texts[0] == texts[1]
    monkeypatch.setattr(loading, "make_decoder", None)  # this takes minutes
    with pytest.raises(RequestError, match=r"a model on a GPU has no .*adapters; use device cpu"):
        LLM(model, adapters={"a": folder}, device="gpu")


def test_layers_beyond_the_card_stay_on_the_cpu_with_its_texts() -> None:
    prompts, weights = ["Once upon a time", "The little dog", "One day a bird"], "int8"
    with LLM("stories", device="cpu", dtype="float32", weights=weights) as llm:
        expected = [one.token_ids for one in llm.generate(prompts, GREEDY)]
    with LLM("stories", device="gpu", dtype="float32", weights=weights, gpu_layers="3MB") as llm:
        decoder = llm.loaded.decoder
        assert 0 < decoder.first < 6 and {one.on_host for one in llm.llm_engine.specs} == {True, False}
        assert [one.token_ids for one in llm.generate(prompts, GREEDY)] == expected
        llm.llm_engine.check()


def test_the_rows_that_cross_the_cut_are_the_cpus_to_the_bit() -> None:
    graph, native, seen = checkpoint("GQA").graph, find_kernels(), {}
    assert native is not None, "tests are marked needs_gpu"
    whole, weights = NativeDecoder(graph, native, weights_of("GQA", "int8")), weights_of("GQA", "int8")
    half, _ = cut(graph, weights, 1)
    assert not any(name.startswith(("embed", "layers.0.")) for name in weights)
    specs, batch = layer_specs(graph, "float32"), chunk(1, TEXT)
    passes = NativePasses(whole.over_arrays, native)
    passes.run(batch, KVStore(specs, 8, 16), lambda site, layer, value: seen.update({(site, layer): np.array(value)}))
    batch.hidden_rows, batch.logits_rows = batch.logits_rows, array("q")
    found = NativeBackend(half, KVStore(specs[:1], 8, 16))(batch).hidden
    assert found is not None and found.tobytes() == seen[Site.MLP, 0].tobytes()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu_layers": 0}, "at least 1, or a size"),
        ({"gpu_layers": "1kB"}, "the head and a layer take"),
        ({"gpu_layers": 2, "device": "cpu"}, "gpu_layers is for device gpu"),
    ],
)
def test_layers_that_cannot_be_on_the_gpu_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named), LLM("stories", **{"device": "gpu", **options}):
        pass


FAULTS = {
    "attention reads one position less": ("attention", "place <= position &&", "place < position &&"),
    "a block of positions is not faded": ("attention", "total *= faded;", ""),
    "rotation to the other side": ("heads", "fma(-second, sine,", "fma(second, sine,"),
    "codes of int8 are cut": ("heads", "i32(round(clamp(v[word", "i32(trunc(clamp(v[word"),
    "int4 without its matrix": ("heads", "v[i] = a + b;", "v[i] = a;"),
    "a slab is left out": ("linear", "slab < slabs; slab += PARTS", "slab < slabs - 1u; slab += PARTS"),
    "no mean of squares": ("norm", "/ f32(size) + number(7u)", "+ number(7u)"),
    "gates by another function": ("activate", "return x * sigmoid(x);", "return sigmoid(x);"),
    "the sum without its last": ("summary", "i < 256u; i++) { sum +=", "i < 255u; i++) { sum +="),
    "another row of the table": ("embed", "let lane = token % 16u;", "let lane = (token + 1u) % 16u;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gpu_that_computes_something_else_is_refused_with_its_kernel(fault: str) -> None:
    with pytest.raises(RequestError, match=f"computes other numbers than the CPU: .*{FAULTS[fault][0]}"):
        prove(AlteredGpu(*FAULTS[fault]), checkpoint("MHA").graph, weights_of("MHA", "float32"), "float32")


def test_a_proof_is_kept_for_the_next_process_in_a_file_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a model whose keys have biases, which the CPU leaves out of what it stores."""
    monkeypatch.setenv("TOKENWRIGHT_CACHE", str(tmp_path))
    graph, weights = checkpoint("GQA").graph, weights_of("GQA", "float32")
    first, second, other = (AlteredGpu("mix", "total +=", text) for text in ("total +=", "total +=", "total -="))
    assert prove(first, graph, weights, "float32") and read_proof(second) == first.proved and read_proof(other) == {}
    monkeypatch.setattr(proofs, "_compared", None)  # the second one compares nothing
    assert prove(second, graph, weights, "float32")
    file, elsewhere = proof_file(second), tmp_path / "elsewhere"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o620)
    assert read_proof(second) == {}, "others may have written it"
    file.chmod(0o600)
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert read_proof(second) == {}, "it is a link"
    file.unlink()
    for text in ("{", "[[1, 2]]", "[[[[]], true]]", "7"):
        file.write_text(text)
        file.chmod(0o600)
        assert read_proof(second) == {}


def test_wide_tiles_that_round_otherwise_are_left_out() -> None:
    total = "total = (sums[place]"
    device = AlteredGpu("linear", total, f"if (TILE == 4u) {{ sums[place] *= 1.0000002; }} {total}")
    graph = checkpoint("GQA").graph
    found, wide = proof(device, graph, weights_of("GQA", "float32"), "float32")
    assert not wide and all(one.sound for one in found)
    assert proof(device, graph, weights_of("GQA", "float32"), "float32") == ([], False), "it is proved once"


def test_a_shader_that_does_not_compile_is_named() -> None:
    with pytest.raises(RequestError, match="cannot compile the kernel norm"):
        AlteredGpu("norm", "let size = fact(0u);", "let size = ;").kernel(
            "norm", KIND=1, WEIGHTED=True, BIASED=False, ADD=False
        )


def test_a_model_without_rotations_runs(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "gpt2", "gpt2")
    with LLM(folder, pages=8) as cpu, LLM(folder, pages=8, device="gpu") as gpu:
        expected, found = (llm.generate([TEXT], GREEDY)[0].token_ids for llm in (cpu, gpu))
    assert found == expected


EXHAUST = """
import resource
from tokenwright.backends.wgpu.gpu import open_gpu
from tokenwright.errors import CapacityError
gpu, size = open_gpu(None), 100 << 20
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * size,) * 2)
kept = []
try:
    while len(kept) < 9:
        kept.append(gpu.buffer(size))
except CapacityError as error:
    kept.clear()
    print(gpu.read(gpu.buffer(64), 0, 4).tolist(), error)
"""


def test_memory_that_is_exhausted_is_said_and_smaller_buffers_are_made() -> None:
    device = AlteredGpu("norm", "", "")
    with pytest.raises(CapacityError, match=r"binds at most .* lower token_budget or kv_memory"):
        device.buffer(device.most_bytes + 4)
    if "llvmpipe" in device.name:  # whose memory is the process's
        told = subprocess.run([sys.executable, "-c", EXHAUST], capture_output=True, text=True, check=True).stdout
        assert told.startswith("[0, 0, 0, 0] the memory of llvmpipe") and "is exhausted; lower kv_memory" in told


def test_without_an_adapter_or_wgpu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"'gpu:77': no such GPU adapter was found.*mesa-vulkan-drivers"):
        LLM("stories", device="gpu:77")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wgpu" else found(name, *more))
    with pytest.raises(RequestError, match="needs wgpu, which is not installed; run: pip install wgpu"):
        LLM("stories", device="gpu")


def test_verify_prints_each_kernel_and_fails_where_one_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "FORMATS", ("int8",))
    ended = CliRunner().invoke(app, ["verify", "--device", "gpu", "--json"])
    told = json.loads(ended.stdout)
    assert ended.exit_code == 0 and told["adapter"] == open_gpu(None).name and told["same"] and told["alike"]
    assert {one["kv"] for one in told["formats"]["int8"]} == {"native", "int8", "int4", "fp8"}
