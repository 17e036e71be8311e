"""The plan against published figures, against what the engine takes and counts, and against its own definition."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.fixtures import read_little
from tests.checkpoints.test_hub import hub, sharded, single  # noqa: F401
from tests.equality.harness import checkpoint_of
from tests.equality.kinds import ALL_KINDS
from tests.models.files.fake_hub import FakeHub
from tests.models.fixtures import KINDS, make_checkpoint, make_config, write_json, write_tokenizer
from tests.models.random_models import MAKERS, random_hybrid
from tests.models.sized import Sized
from tests.models.weights import make_model
from tests.profiles import examples, some
from tests.tensors import kv_memory
from tokenwright import LLM, SamplingParams, plan
from tokenwright.backends.device import Device
from tokenwright.backends.torch.border import TorchDevice
from tokenwright.cache import KVStore, layer_specs
from tokenwright.cache.codec import CODECS
from tokenwright.checkpoints.files.known import KNOWN, known_name
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.folder_writer import write_folder
from tokenwright.checkpoints.packing.packer import pack_checkpoint
from tokenwright.cli.commands.plan import page
from tokenwright.config import Heads, Latent, LayerKV
from tokenwright.engine import Scheduler, Sequence
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import KVFormat, WeightFormat
from tokenwright.llm.model import LoadedModel
from tokenwright.models.cost import CostModel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import Embed, Graph, Head
from tokenwright.models.op import Matrix, Norm
from tokenwright.planner.bandwidth import cache_sizes, measure
from tokenwright.planner.figures import KVMemory
from tokenwright.units import read_bytes, read_rate, read_tokens

KIB, GIB = 2**10, 2**30

PUBLISHED = {
    "gpt-2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "gemma-3-4b": 3_880_263_168,  # the text model
    "deepseek-v3": 671_026_419_200,  # without the MTP module
}
RUNNABLE = [name for name in PUBLISHED if not name.startswith("deepseek")]  # whose memory a test can allocate

CACHES: list[dict[str, Any]] = [
    {},
    {"kv": "int8"},
    {"kv": "k=fp8,v=bfloat16"},
    {"kv": "k=int8,v=int4,first=20,native=0+-1"},
    {"window": 20},
    {"window": 20, "kv": "int4,first=33"},
    {"window": 40, "sinks": 3, "kv": "k=int8,v=int4,first=18,native=1"},
    {"window": 9, "sinks": 30, "kv": "int8,first=5"},
]


def allowed(kind: str) -> list[dict[str, Any]]:
    """The caches that a kind of model may have: windows need a RoPE whose scaling is fixed, sinks need one at all."""
    without = {
        "dynamic": ("window",),
        "phi3-long": ("window",),
        "phi4-mini": ("window",),
        "gpt2": ("sinks",),
        "mamba2": ("window", "sinks"),
    }.get(kind, ())
    found = [options for options in CACHES if not options.keys() & set(without)]
    apart = kind.startswith("deepseek")  # where K and V are one row
    return [options for options in found if not (apart and "v=" in options.get("kv", ""))]


def turned(kind: str) -> list[dict[str, Any]]:
    """Caches of a kind; the profile's share of them begins with another one for each kind."""
    found = allowed(kind)
    first = list(KINDS).index(kind) % len(found)
    return list(some(found[first:] + found[:first]))


class TestPublished:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_parameters(self, name: str) -> None:
        assert plan(name).graph.parameters == PUBLISHED[name]

    def test_all_that_are_known_are_held_to_their_size(self) -> None:
        assert {known_name(name) for name in PUBLISHED} == KNOWN.keys()

    @pytest.mark.parametrize(
        ("name", "bytes_per_token"),
        [
            ("gpt-2", 73_728),
            ("llama-2-7b", 512 * KIB),
            ("llama-3-8b", 131_072),
            ("llama-3.1-8b", 131_072),
            ("llama-3.1-70b", 320 * KIB),
            ("llama-3.1-405b", 504 * KIB),
            ("qwen2.5-0.5b", 12_288),
            ("deepseek-v3", 70_272),  # (512 + 64) x 2 bytes x 61 layers
        ],
    )
    def test_kv_of_a_token(self, name: str, bytes_per_token: int) -> None:
        assert plan(name).kv_bytes_per_token == bytes_per_token

    def test_llama_at_8k(self) -> None:
        found = plan("llama-3.1-8b", context=8192)
        assert (found.kv_bytes_per_sequence, found.kv_bytes_total) == (GIB, GIB)
        assert plan("llama-3.1-8b", context="8k", batch=8).kv_bytes_total == 8 * GIB
        assert found.weight_bytes == 2 * 8_030_261_248 + 2 * 65 * 4096, "norms are kept in float32"

    @pytest.mark.parametrize(("batch", "tokens"), [(1, 122_537), (8, 15_318)])
    def test_where_the_cache_exceeds_the_weights(self, batch: int, tokens: int) -> None:
        found = plan("llama-3.1-8b", batch=batch)
        assert found.cache_exceeds_weights_at == tokens
        assert batch * found.kv_bytes(tokens - 1) <= found.weight_bytes < batch * found.kv_bytes(tokens)

    def test_128k_in_8_gb(self) -> None:
        int8, int4 = (plan("llama-3.1-8b", context="128k", kv=kv).kv_bytes_total for kv in ("int8", "int4"))
        assert (int8, int4) == (9_126_805_504, 4_831_838_208)
        assert int4 < 8e9 < int8
        small = plan("llama-3.1-8b", context="128k", weights="int4")
        assert small.weight_bytes == pytest.approx(5.01e9, rel=1e-3)  # embedding and head in int8
        assert small.weight_bytes + int4 > 8e9

    def test_a_quarter_of_the_layers_full(self) -> None:
        """GQA in bfloat16 with 8 of 32 full layers and W = 4,096: 4.70 GB."""
        full, windowed = plan("llama-3.1-8b"), plan("llama-3.1-8b", window=4096)
        assert full.kv_bytes_total // 4 + windowed.kv_bytes_total * 3 // 4 == pytest.approx(4.70e9, rel=1e-3)

    def test_deepseek_activates_37_billion(self) -> None:
        """36.6e9 by its card, the head among them and the embedding not."""
        costs = plan("deepseek-v3").costs
        assert costs.block_weights + costs.head_weights == pytest.approx(36.6e9, rel=1e-3)

    def test_first_tokens_and_layers_stay_native(self) -> None:
        """A head of a token: 136 + 72 B in int8 and int4, 512 B in bfloat16."""
        found = plan("llama-3.1-8b", context=8192, kv="k=int8,v=int4,first=64,native=0+-1")
        assert found.kv_bytes_per_token == 30 * 8 * 208 + 2 * 8 * 512 == 58_112
        kept = 30 * 8 * (64 * 512 + 8128 * 208) + 2 * 8 * 8192 * 512
        assert found.kv_bytes_per_sequence == kept == 480_722_944
        assert found.decode_bytes == found.weight_bytes_read + kept
        short = plan("llama-3.1-8b", context=50, kv="k=int8,v=int4,first=64,native=0+-1")
        assert short.kv_bytes_total == plan("llama-3.1-8b", context=50).kv_bytes_total

    def test_first_tokens_behind_a_window(self) -> None:
        """What is let go is wider than what comes: most is kept when the window is full, not at the end."""
        found = plan("llama-3.1-8b", context="128k", kv="k=int8,v=int4,first=64", window=4096, sinks=4, batch=3)
        head, heads = 208, 32 * 8
        most, end = heads * (64 * 512 + 4036 * head), heads * (4 * 512 + 4096 * head)
        assert (found.kv_bytes(4100), found.kv_bytes(131_072)) == (most, end)
        assert (found.kv_bytes_per_sequence, found.kv_bytes_total) == (most, 3 * most)
        assert found.decode_bytes == found.weight_bytes_read + 3 * end
        room = found.weight_bytes + 3 * (most - 1)
        tight = plan("llama-3.1-8b", kv="k=int8,v=int4,first=64", window=4096, sinks=4, batch=3, memory=room)
        assert (tight.fits, tight.most_context, tight.most_batch) == (False, 4099, 2)

    def test_latents_and_windows_of_models_that_are_only_planned(self) -> None:
        """A latent in int8: 512 + 64 B and 18 scales of 2 B; 576 x 2 B where it is native."""
        latent = plan("deepseek-v3", context=1000, kv="int8,first=100,native=3", window=300, sinks=7)
        assert latent.kv_bytes_per_token == 60 * 612 + 1152
        assert latent.kv_bytes(1000) == 60 * (7 * 1152 + 300 * 612) + 307 * 1152
        assert latent.kv_bytes_per_sequence == 60 * (100 * 1152 + 207 * 612) + 307 * 1152
        gemma = plan("gemma-3-4b", context=2000, sinks=10, kv="int8,first=4")  # 29 layers of W = 1,024
        wide, narrow = 4 * 2 * 512, 4 * 2 * 272
        assert gemma.kv_bytes_total == 34 * 4 * wide + narrow * (5 * 1996 + 29 * 1030)

    def test_the_memory_that_this_process_may_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small = plan("gpt2")
        for free, fits in ((small.total_bytes, True), (small.total_bytes - 1, False)):
            monkeypatch.setattr("tokenwright.planner.free_memory", lambda device, free=free: free)
            found = plan("gpt2", memory="here")
            assert (found.memory, found.fits) == (free, fits)
        monkeypatch.setattr("tokenwright.planner.free_memory", lambda device: None)
        with pytest.raises(RequestError, match="does not report its free memory; give memory in bytes"):
            plan("gpt2", memory="here")

    def test_the_layers_that_a_card_holds(self) -> None:
        """A layer: 218,103,808 numbers in bfloat16, two norms in fp32, and 2 x 8 x 128 x 2 B of a token."""
        found, layer = plan("llama-3.1-8b", context=777), 2 * 218_103_808 + 2 * 4 * 4096 + 4096 * 777
        assert found.gpu_layers is None and found.gpu_bytes(32) == found.total_bytes
        assert found.gpu_bytes(10) == 10 * layer + 2 * 128_256 * 4096 + 4 * 4096, "the head and its norm"
        for room, layers in ((found.gpu_bytes(10), 10), (found.gpu_bytes(10) - 1, 9), (1 << 50, 32), (1 << 20, 0)):
            card = plan("llama-3.1-8b", context=777, gpu_memory=room)
            assert card.gpu_layers == card.facts()["gpu_layers"] == layers
            assert ("--gpu-layers" in page(card)) == (layers not in (0, 32))

    def test_no_card_holds_layers_that_no_kernel_computes(self, tmp_path: Path) -> None:
        write_json(tmp_path / "config.json", make_config("deepseek2"))
        card = plan(str(tmp_path), gpu_memory=1 << 30)
        assert card.gpu_layers == 0
        assert "no kernel computes a layer" in page(card) and "--gpu-layers" not in page(card)

    def test_steps_of_llama(self) -> None:
        """2 (P_b + P_lm) + 4 H D L t, and bytes without the embedding, which is looked up."""
        found = plan("llama-3.1-8b", context=777, bandwidth="30GB/s")
        assert found.decode_flops == 15_009_316_864 + 524_288 * 777
        read = 16_061_054_976 - 2 * 128_256 * 4096 + 131_072 * 777
        assert found.decode_bytes == read
        assert found.tokens_per_second == 30e9 / read

    def test_attention_over_a_latent(self) -> None:
        """Absorbed: R + rope for a score and R for the sum, of 128 heads in 61 layers."""
        flops = [plan("deepseek-v3", context=tokens).decode_flops for tokens in (100, 101)]
        assert flops[1] - flops[0] == 61 * 128 * 2 * ((512 + 64) + 512)


class TestCodecs:
    def test_bytes_of_a_number(self) -> None:
        per_number = {name: codec.nbytes(128) / 128 for name, codec in CODECS.items()}
        assert per_number == {
            "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1.0625, "int4": 0.5625, "fp8": 1,
        }  # fmt: skip

    def test_k_and_v_are_chosen_apart(self) -> None:
        both = [
            plan("llama-3.1-8b", kv=kv).kv_bytes_per_token for kv in ("int8", "int4", "k=int8,v=int4", "v=int4,k=int8")
        ]
        assert both[2] == both[3] == (both[0] + both[1]) // 2
        assert plan("llama-3.1-8b", kv="v=fp8").kv_bytes_per_token == 32 * 8 * 128 * (2 + 1)

    def test_quantised_weights_are_matrices_alone(self) -> None:
        """At 4.5 bits, but the embedding (padded to whole blocks of 16) at 8.25; positions and vectors in float32."""
        found = plan("gpt-2", weights="int4")
        shapes = {name: shape for name, shape in found.graph.shapes.items() if len(shape) == 2}
        matrices = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
        rest = sum(math.prod(shape) for shape in found.graph.shapes.values() if len(shape) == 1) + 1024 * 768
        assert found.weight_bytes == matrices * 9 // 16 + 50_272 * 768 * 33 // 32 + 4 * rest
        grouped = plan("gpt-2", weights="int4:64")
        assert grouped.weight_bytes == found.weight_bytes - matrices // 32

    @pytest.mark.parametrize("kind", ALL_KINDS)
    def test_weights_are_those_that_are_loaded(self, kind: str) -> None:
        """To the byte, with norms in float32, and with rows that fill the last block of a matrix."""
        check_weights(Path(checkpoint_of(kind)[2].name) / "model", list(ALL_KINDS).index(kind))

    @pytest.mark.sweep
    @pytest.mark.parametrize("seed", range(3 * len(MAKERS)))
    def test_weights_of_random_models(self, seed: int, tmp_path: Path) -> None:
        model = make_model(random_hybrid(seed))
        model.save_pretrained(tmp_path)
        write_tokenizer(tmp_path)
        check_weights(tmp_path, seed)

    def test_of_a_quantised_folder(self, tmp_path: Path) -> None:
        model, form = Checkpoint.open(make_checkpoint(tmp_path / "m", "qwen3").path), WeightFormat.parse("int4:64")
        write_folder(model, tmp_path / "q", form, pack_checkpoint(model, form))
        found = plan(tmp_path / "q")
        assert found.weights == form
        assert found.weight_bytes == Checkpoint.open(tmp_path / "q").nbytes
        assert (found.native, found.hindrances) == ("float32", ())
        with pytest.raises(RequestError, match="kept as int4:64; leave weights out"):
            plan(tmp_path / "q", weights="int8")

    def test_native_cache_has_the_dtype_of_the_weights(self) -> None:
        assert plan("llama-3.1-8b", weights="float32").k.name == "float32"
        assert plan("llama-3.1-8b", weights="int8").k.name == "bfloat16"
        first = plan("llama-3.1-8b", weights="float16", kv="int8,first=10", context=10)
        assert (first.native, first.kv_bytes_total) == ("float16", 10 * 131_072)

    def test_a_format_that_is_native_has_no_first_tokens(self) -> None:
        found = plan("llama-3.1-8b", kv="bfloat16,first=64,native=0", context=100)
        assert (found.kv_bytes_total, found.kept_native) == (100 * 131_072, ())


def check_weights(folder: Path, first: int) -> None:
    """first: the format that is tried first, where only some are."""
    formats = ("native", "float32", "bfloat16", "float16", "int8", "int8:32", "int4", "int4:64")
    for weights in some((formats * 2)[first % 8 : first % 8 + 8], 3):
        loaded = LoadedModel(str(folder), weights=weights)
        assert plan(folder, weights=weights).weight_bytes == loaded.decoder.weight_bytes, weights


class TestEngine:
    """The plan of what the engine runs is what the engine takes and counts, to the byte."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_allocation(self, kind: str, tmp_path: Path) -> None:
        folder, _ = make_checkpoint(tmp_path / kind, kind)
        sizes = ((100, 3), (1, 1), (500, 2))
        for first, options in enumerate(turned(kind), list(KINDS).index(kind)):
            for context, batch in some(sizes[first % 3 :] + sizes[: first % 3]):
                found = plan(folder, context=context, batch=batch, **options)
                assert not found.hindrances
                engine = found.facts()["engine"]
                given = {name: engine[name] for name in ("page_size", "pages", "max_sequences", "token_budget")}
                with LLM(folder, dtype=found.native, **options, **given) as llm:
                    store = llm.engine.runner.store
                    assert found.engine_kv_bytes == engine["kv_bytes"] == llm.kv_memory == allocated(store)
                    assert [group["pages"] for group in engine["groups"]] == list(store.pages)
                    assert [tuple(group["layers"]) for group in engine["groups"]] == [
                        one.layers for one in store.groups
                    ]
                    assert found.weight_bytes == llm.weight_bytes
                    assert found.kv_bytes_per_token == sum(spec.bytes_per_token for spec in store.specs)

    @pytest.mark.parametrize("kind", ["llama2", "qwen2-window", "mistral"])
    def test_the_batch_runs_in_it(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """All at once, and nobody is put off for want of pages."""
        folder, _ = make_checkpoint(tmp_path / kind, kind)
        for options in turned(kind):
            found = plan(folder, context=300, batch=3, **options)
            with LLM(folder, pages=found.engine_pages, max_sequences=3, **options) as llm:
                running, put_off = self.watched(llm.engine.scheduler, monkeypatch)
                prompts = [[5 + first, *range(10, 300 - 5)] for first in range(3)]
                written = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0))
                assert [len(one.token_ids) for one in written] == [4, 4, 4]
                assert (max(running), put_off) == (3, [])

    @staticmethod
    def watched(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Sequence]]:
        """How many run in each step, and who is put off."""
        schedule, preempt = scheduler.schedule, scheduler.preempt
        running, put_off = list[int](), list[Sequence]()
        monkeypatch.setattr(scheduler, "schedule", lambda: (schedule(), running.append(len(scheduler.running)))[0])
        monkeypatch.setattr(scheduler, "preempt", lambda one: (put_off.append(one), preempt(one))[1])
        return running, put_off

    @pytest.mark.parametrize("name", RUNNABLE)
    def test_allocation_of_large_models(self, name: str) -> None:
        for options in allowed("gpt2" if name == "gpt-2" else name):
            found = plan(name, context=4000, batch=5, **options)
            pages = [group.pages for group in found.engine_groups]
            store = KVStore(found.specs, pages, 16, TorchDevice(Device("meta")))
            assert found.engine_kv_bytes == store.nbytes == allocated(store)
            assert found.engine_pages == 5 * 250
            narrow = 5 * (64 + 32 + 1)
            assert options or pages in ([5 * 250], [5 * (256 + 32 + 1)], [5 * 250, narrow])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_in_the_dtype_of_the_weights(self, dtype: str, tmp_path: Path) -> None:
        folder, _ = make_checkpoint(tmp_path / "m", "llama3")
        for kv in ("native", "float32", "k=int8", "int4,first=7"):
            found = plan(folder, context=40, weights=dtype, kv=kv)
            with LLM(folder, dtype=dtype, kv=kv, pages=found.engine_pages, max_sequences=1) as llm:
                assert found.engine_kv_bytes == llm.kv_memory

    @pytest.mark.parametrize(
        ("kind", "options", "told"),
        [
            ("gpt2", {"window": 9, "sinks": 1}, "sinks need rotary positions"),
            ("llama2", {"sinks": 4}, "sinks stay visible beyond a window"),
            ("llama2", {"window": 9, "sinks": -1}, "sinks must be a whole number"),
            ("llama2", {"kv": "int8,native=3"}, "native of kv: there is no layer 3; use 0 to 2, or -1 to -3"),
            ("dynamic", {"window": 9}, "RoPE scaling that depends on the length"),
        ],
    )
    def test_what_it_refuses_is_refused(self, kind: str, options: dict[str, Any], told: str, tmp_path: Path) -> None:
        folder, _ = make_checkpoint(tmp_path / kind, kind)
        with pytest.raises(RequestError, match=told):
            plan(folder, **options)
        with pytest.raises(RequestError, match=r"^(native|sinks|this model)"):
            LLM(folder, **options)

    def test_sinks_of_models_that_have_windows(self) -> None:
        """Some of their own suffice; without any, there is nothing that sinks stay beside."""
        assert plan("gemma-3-4b", sinks=4).facts()["sinks"] == 4
        with pytest.raises(RequestError, match="give window as well"):
            plan("deepseek-v3", sinks=4)
        with pytest.raises(RequestError, match="there is no layer -62"):
            plan("deepseek-v3", kv="int8,native=-62")

    def test_models_without_a_decoder_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tokenwright.planner.figures.lacking", lambda graph: ["LatentAttention"])
        found = plan("gpt-2")
        assert found.hindrances == ("it has no decoder for GPT2LMHeadModel",)
        assert found.facts()["engine"]["groups"] == []
        assert found.engine_kv_bytes is None


def allocated(store: KVStore) -> int:
    """Bytes of all its tensors, by torch."""
    return sum(tensor.nbytes for group in range(len(store.groups)) for tensor in kv_memory(store, group))


class TestRemarks:
    @pytest.mark.parametrize(
        ("model", "options", "told", "untold"),
        [
            ("llama-3.1-8b", {}, [], ["window", "sinks", "end", "native"]),
            ("llama-3.1-8b", {"context": "1m"}, ["1,048,576 tokens are more than the model's context of 131,072"], []),
            ("llama-3.1-8b", {"context": "1m", "window": 4096}, ["without end", "are freed"], ["are more than"]),
            ("llama-3.1-8b", {"window": 200_000}, ["without end", "a window of 200,000 tokens is more"], ["are freed"]),
            ("llama-3.1-8b", {"window": 9, "sinks": 1}, ["the first token stays visible"], []),
            ("mistral-7b", {"sinks": 4}, ["the first 4 tokens stay visible", "are freed"], ["without end"]),
            ("gpt-2", {"window": 100, "context": 2000}, ["are freed", "2,000 tokens are more"], ["without end"]),
            ("gpt-2", {"kv": "int8,first=9,native=-1"}, ["float32 all the same: the first 9 tokens, and layer 11"], []),
            ("gpt-2", {"kv": "int8,native=1+0"}, ["all the same: layers 0 and 1"], ["the first"]),
            ("gpt-2", {"kv": "int8,first=9", "window": 50}, ["a sequence keeps 979,200 bytes; the memory"], []),
        ],
    )  # fmt: skip
    def test_say(self, model: str, options: dict[str, Any], told: list[str], untold: list[str]) -> None:
        found = " | ".join(plan(model, **options).remarks)
        assert [words for words in told if words not in found] == []
        assert [words for words in untold if words in found] == []


class TestOthers:
    @pytest.mark.parametrize(
        ("types", "told"),
        [
            (["full_attention"], "a type for each of the 34 layers"),
            (["global"] * 34, "layer_types has 'global'"),
            ("full", "must be a list"),
        ],
    )
    def test_layer_types_that_are_not_understood(self, types: Any, told: str, tmp_path: Path) -> None:
        config = KNOWN["google/gemma-3-4b-pt"]
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "text_config": {**config["text_config"], "layer_types": types}})
        )
        with pytest.raises(CheckpointError, match=told):
            plan(tmp_path)

    def test_experts_that_a_step_reads(self) -> None:
        op = plan("deepseek-v3").graph.blocks[-1]
        assert isinstance(op, Experts)
        assert [op.experts_met(rows) for rows in (1, 2, 8, 10_000)] == [8, 16, 57, 256]
        one, all_ = (plan("deepseek-v3", batch=batch).weight_bytes_read for batch in (1, 10_000))
        assert one == pytest.approx(2 * 36.6e9, rel=1e-3)
        assert all_ == plan("deepseek-v3").weight_bytes - 2 * 129_280 * 7168


contexts, batches = st.integers(1, 200_000), st.integers(1, 300)
models = st.sampled_from([*PUBLISHED, "stories"])
even = st.sampled_from(["native", "int8", "int4", "fp8", "float32"])  # one format for all tokens
mixed = st.sampled_from(["int8,first=64", "int4,first=5000,native=0", "k=int4,v=fp8,first=1", "fp8,native=-1+2"])
windows = st.none() | st.integers(1, 10_000)
sinks = st.sampled_from([0, 0, 1, 70, 6000])


def asked(model: str, kv: str, window: int | None, sinks: int) -> dict[str, Any]:
    """Options that the model can have, as near to those as may be."""
    rotary, windowed = model != "gpt-2", window is not None or model in ("mistral-7b", "gemma-3-4b")
    kv = kv.replace("k=int4,v=fp8", "int4") if model.startswith("deepseek") else kv
    return {"kv": kv, "window": window, "sinks": sinks if rotary and windowed else 0}


class TestProperties:
    @examples(100)
    @given(models, contexts, batches, even, windows, sinks)
    def test_bytes_and_work_grow_with_context_and_batch(
        self, model: str, context: int, batch: int, kv: str, window: int | None, sinks: int
    ) -> None:
        options = asked(model, kv, window, sinks)
        here = plan(model, context=context, batch=batch, **options)
        longer = plan(model, context=context + 1, batch=batch, **options)
        more = plan(model, context=context, batch=batch + 1, **options)
        for name in ("kv_bytes_total", "total_bytes", "prefill_flops", "decode_flops", "decode_bytes"):
            assert getattr(here, name) <= getattr(longer, name)
            assert getattr(here, name) < getattr(more, name)
        assert here.prefill_flops < longer.prefill_flops
        assert here.weight_bytes == longer.weight_bytes == more.weight_bytes

    @examples(100)
    @given(models, contexts, batches, even | mixed, windows, sinks, st.integers(1, 2 * 10**12))
    def test_what_fits_is_the_most_that_fits(
        self, model: str, context: int, batch: int, kv: str, window: int | None, sinks: int, memory: int
    ) -> None:
        options = {**asked(model, kv, window, sinks), "memory": memory}
        found = plan(model, context=context, batch=batch, **options)
        longest, widest = found.most_context, found.most_batch
        assert widest is not None
        if longest:
            assert plan(model, context=min(longest, 2**31), batch=batch, **options).fits
        if longest is None:
            assert plan(model, context=2**31, batch=batch, **options).fits
        elif longest < 2**31:
            assert not plan(model, context=longest + 1, batch=batch, **options).fits
        if widest:
            assert plan(model, context=context, batch=min(widest, 2**31), **options).fits
        assert not plan(model, context=context, batch=widest + 1, **options).fits
        assert found.fits == (longest is None or context <= longest) == (batch <= widest)

    @examples(100)
    @given(models, batches, even | mixed, windows, sinks)
    def test_the_cache_exceeds_the_weights_there_and_not_before(
        self, model: str, batch: int, kv: str, window: int | None, sinks: int
    ) -> None:
        found = plan(model, batch=batch, **asked(model, kv, window, sinks))
        at = found.cache_exceeds_weights_at
        if at is None:
            assert batch * found.kv_memory.most(2**31) <= found.weight_bytes
        else:
            assert batch * found.kv_memory.most(at - 1) <= found.weight_bytes < batch * found.kv_bytes(at)


layouts = st.builds(Heads, st.integers(1, 3), st.integers(1, 70)) | st.builds(
    Latent, st.integers(1, 70), st.integers(1, 9)
)
kept_layers = st.builds(LayerKV, layouts, st.none() | st.integers(1, 20))
drawn = st.lists(st.builds(Sized, st.just({}), kept_layers, st.integers(1, 9)), min_size=1, max_size=4)


def graph_of(layers: list[Sized]) -> Graph:
    """A model of nothing but these layers."""
    table = Matrix.single("embed", 1, 1)
    return Graph("Some", 100, Embed(table), tuple(layers), Head(Norm("norm", "rms", 1, 1e-6), table))


class TestCounting:
    """What is kept, against a count of every position in every layer."""

    @given(
        drawn,
        st.sampled_from(["bfloat16", "int8", "int4", "fp8", "float32", "native"]),
        st.integers(0, 25),
        st.sets(st.integers(0, 3)),
        st.none() | st.integers(1, 20),
        st.integers(0, 12),
    )
    def test_every_position(
        self, layers: list[Sized], kv: str, first: int, native: set[int], window: int | None, sinks: int
    ) -> None:
        graph = graph_of(layers)
        windows = [min(layer.window or 99, window or 99) for layer in graph.kv]
        sinks = sinks if min(windows) < 99 else 0
        plain, wide = {layer for layer in native if layer < len(layers)}, CODECS["float32"]
        form = KVFormat(kv, kv, first, tuple(plain))
        specs = layer_specs(graph, "float32", form, window, sinks)
        memory, costs = KVMemory(specs), CostModel(graph, specs)
        codec = wide if kv == "native" else CODECS[kv]
        counted, flops = [0], 0
        for tokens in range(1, 61):
            kept, pairs = 0, 0
            for index, (op, layer) in enumerate(zip(layers, graph.kv, strict=True)):
                for position in range(tokens):
                    if position >= tokens - windows[index] or position < sinks:
                        one = wide if position < first or index in plain else codec
                        kept += layer.layout.bytes_per_token(one, one)
                        pairs += op.pair_flops
            counted.append(kept)
            flops += pairs
            assert (memory.at(tokens), costs.attention_flops(tokens)) == (kept, pairs)
            assert (memory.most(tokens), costs.chunk(0, tokens, rows=0).flops) == (max(counted), flops)
        assert memory.bounded == (max(windows) < 99)
        assert costs.bytes_per_token == sum(
            layer.layout.bytes_per_token(*[wide if index in plain else codec] * 2)
            for index, layer in enumerate(graph.kv)
        )

    @pytest.mark.parametrize("options", [{"kv": f"int4,first={2**31}"}, {"window": 5, "sinks": 2**31}])
    def test_figures_beyond_any_text(self, options: dict[str, Any]) -> None:
        found = plan("llama-2-7b", memory="24GB", **options)
        plain = plan("llama-2-7b", memory="24GB")
        assert (found.kv_bytes_total, found.most_context) == (plain.kv_bytes_total, plain.most_context)
        assert found.cache_exceeds_weights_at == plain.cache_exceeds_weights_at


class TestNames:
    @pytest.mark.parametrize(
        "name", ["meta-llama/Llama-3.1-8B", "llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/meta-llama-3.1-8b"]
    )
    def test_known_names(self, name: str) -> None:
        assert plan(name).model == "meta-llama/Llama-3.1-8B"

    def test_the_folder_the_file_and_the_name_are_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "gpt2").mkdir()
        (tmp_path / "gpt2" / "config.json").write_text(json.dumps(make_config("gpt2")))
        monkeypatch.chdir(tmp_path)
        local = [plan(name).blueprint for name in ("gpt2", Path("gpt2"), "gpt2/config.json", tmp_path / "gpt2")]
        assert all(one == local[0] for one in local)
        assert local[0] != plan("gpt-2").blueprint

    def test_the_model_inside(self) -> None:
        assert plan().graph.parameters == 5_770_496

    def test_a_silent_dtype_is_told(self, tmp_path: Path) -> None:
        assert plan("gpt-2").remarks == ("config.json names no dtype that we know: float32 is assumed",)

    def test_from_the_hub_config_json_alone_is_fetched(self, hub: FakeHub) -> None:  # noqa: F811
        assert plan("maker/small").graph.kv
        assert hub.fetched() == {"config.json"}
        with pytest.raises(CheckpointError, match="there is no model maker/nothing on the hub"):
            plan("maker/nothing")

    @pytest.mark.parametrize("model", ["nothing", Path("nothing"), "a/b/c", "~nobody-here/x", "x" * 5000])
    def test_what_is_nowhere(self, model: str | Path) -> None:
        with pytest.raises(CheckpointError, match=r"there is no file or folder|cannot look at") as caught:
            plan(model)
        assert len(str(caught.value)) < 700


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "tokens"),
        [(7, 7), ("8192", 8192), ("8,192", 8192), ("8k", 8192), ("128K", 131_072), ("1.5k", 1536), ("1m", 2**20)],
    )
    def test_tokens(self, text: int | str, tokens: int) -> None:
        assert read_tokens(text, "context") == tokens

    @pytest.mark.parametrize(
        "text", ["", "k", "0", "-1", "8kb", "8 192", "1.5", "8,19", "9" * 5000, "3g", "４", True, 1.5, 0, 2**40, None]
    )
    def test_not_tokens(self, text: Any) -> None:
        with pytest.raises(RequestError, match="context must be a number of tokens"):
            read_tokens(text, "context")

    @pytest.mark.parametrize(
        ("text", "count"),
        [
            *[("24GB", 24 * 10**9), ("24gib", 24 * 2**30), ("24 GiB", 24 * 2**30), ("1.5GB", 1_500_000_000)],
            *[("24000000000", 24 * 10**9), (24e9, 24 * 10**9), ("1TB", 10**12), ("3KiB", 3072), ("7B", 7)],
            *[(text, None) for text in ("24G", "24Gb/s", "8e9", "0GB", "-1GB", "1e400", math.inf, math.nan, False)],
        ],
    )
    def test_bytes(self, text: Any, count: int | None) -> None:
        if count is None:
            with pytest.raises(RequestError, match=r"memory must be bytes, such as 24GB \(10\^9\), 24GiB"):
                read_bytes(text, "memory")
        else:
            assert read_bytes(text, "memory") == count

    @pytest.mark.parametrize("text", ["30GB/s", "30 gb/s", 30e9, 30_000_000_000, "30000000000/s"])
    def test_rates(self, text: Any) -> None:
        assert read_rate(text, "bandwidth") == 30_000_000_000

    @pytest.mark.parametrize("text", ["30GB", "fast", "/s", "30", True, 0])
    def test_not_rates(self, text: Any) -> None:
        with pytest.raises(RequestError, match="bandwidth must be bytes per second"):
            read_rate(text, "bandwidth")

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"kv": "int3"}, "kv 'int3' is not known; use native, float32"),
            ({"kv": "k=int8,k=int4"}, "kv must be one format, or k=FORMAT,v=FORMAT"),
            ({"kv": "k=int8,q=int4"}, "kv must be one format"),
            ({"kv": "k=int8,v="}, "kv '' is not known"),
            ({"weights": "fp8"}, "weights 'fp8' is not known"),
            ({"weights": ""}, "weights '' is not known"),
            ({"batch": 0}, "batch must be a whole number from 1"),
            ({"batch": True}, "not True"),
            ({"kv": "int8,first=-1"}, "first of kv must be a whole number"),
            ({"kv": "int8,native=0+0"}, "native of kv must be numbers of layers, each once"),
            ({"window": 0}, "window must be a number of tokens"),
            ({"window": 9, "sinks": "4"}, "sinks must be a whole number"),
            ({"bandwidth": "slow"}, "bandwidth must be bytes per second"),
        ],
    )
    def test_options_are_refused(self, options: dict[str, Any], told: str) -> None:
        with pytest.raises(RequestError, match=told):
            plan("gpt-2", **options)

    def test_a_latent_has_one_format(self) -> None:
        with pytest.raises(RequestError, match="keeps one latent for K and V together; give one kv format"):
            plan("deepseek-v3", kv="k=int8,v=int4")


class TestBandwidth:
    def test_measured(self) -> None:
        found = measure("cpu", seconds=0.01)
        assert found.kind == "measured"
        assert 1e8 < found.bytes_per_second < 1e14

    def test_a_plan_says_which(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read_little(monkeypatch)
        measured, told = (plan("gpt-2", bandwidth=speed).bandwidth for speed in ("measured", "30GB/s"))
        assert measured is not None
        assert told is not None
        assert (measured.kind, told.kind) == ("measured", "given")
        assert plan("gpt-2").tokens_per_second is None

    def test_caches(self, tmp_path: Path) -> None:
        assert cache_sizes(tmp_path) == []
        for index, size in enumerate(("48K", "32768K", "odd")):
            (tmp_path / f"index{index}").mkdir()
            (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
        assert cache_sizes(tmp_path) == [48 << 10, 32 << 20]


@pytest.mark.parametrize("options", [{}, {"kv": "int8,first=9,native=0", "window": 99, "sinks": 4}])
def test_facts_are_plain(options: dict[str, Any]) -> None:
    found = plan("gemma-3-4b", memory="24GB", bandwidth="30GB/s", **options)
    assert json.loads(json.dumps(found.facts())) == found.facts()
