"""The KV cache from the front door: formats, windows without end, pages that are shared, and files."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.invariants import check_invariants
from tests.models.fixtures import make_checkpoint
from tests.models.weights import write_weights
from tests.vocabulary import most, text_of
from tokenwright import LLM, CapacityError, RequestError, SamplingParams
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.border import tensor
from tokenwright.errors import CacheFileError, CheckpointError

written = kv_codec.write
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kv") / "model", "qwen2").path


@pytest.mark.parametrize("kv", ["int8", "int4", "fp8", "bfloat16", "k=int8,v=int4,first=5,native=0"])
def test_a_format_is_what_it_says(folder: Path, kv: str) -> None:
    with LLM(folder, kv=kv, pages=8, max_sequences=2) as llm, LLM(folder, pages=8) as plain:
        assert llm.kv_memory < plain.kv_memory
        done, native = llm.generate([text_of(30)], GREEDY)[0], plain.generate([text_of(30)], GREEDY)[0]
        assert 0 < done.usage.kv_bytes < native.usage.kv_bytes
        difference = abs(done.logprobs[0] - native.logprobs[0])
        assert 0 < difference < 1, "it is another cache, and much the same model"


def plain_int4(x: torch.Tensor) -> torch.Tensor:
    """round(x / scale) in -8..7, with the largest of 32 numbers as -8 or 8: decoded again."""
    groups = x.float().unflatten(-1, (-1, 32))
    scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).div(-8).half().float()
    return groups.div(scales).round().clamp(-8, 7).mul(scales).flatten(-2).to(x.dtype)


def test_int4_bears_channels_of_keys_that_are_ten_times_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two channels of each key are larger and those of its query smaller, so a native cache gives the same logits."""
    path = make_checkpoint(tmp_path / "qwen3", "qwen3", changes={"head_dim": 64}).path
    tensors = load_file(path / "model.safetensors")
    for name, weights in tensors.items():
        if name.endswith(("k_norm.weight", "q_norm.weight")):
            weights[[3, 35]] *= 10.0 if "k_norm" in name else 0.1
    write_weights(path, tensors)
    monkeypatch.setenv("TOKENWRIGHT_KERNELS", "reference")
    find_kernels.cache_clear()
    ids = text_of(120)

    def logprobs(kv: str) -> torch.Tensor:
        with LLM(path, kv=kv, dtype="float32", pages=16) as llm:
            return torch.tensor(llm.model(ids)[0]).double().log_softmax(-1)

    def kl(other: torch.Tensor) -> float:
        return float((native.exp() * (native - other)).sum(-1).mean())

    native, ours = logprobs("native"), logprobs("int4")
    monkeypatch.setattr(kv_codec, "write", lambda side, slots, x: written(side, slots, plain_int4(x)))
    plain = logprobs("float32")
    find_kernels.cache_clear()
    assert 0 < kl(ours) < kl(plain) / 3


def test_what_makes_no_sense_is_refused(folder: Path, tmp_path: Path) -> None:
    for options, words in [
        ({"kv": "int3"}, "kv 'int3' is not known"),
        ({"kv": "k=int8,k=int4"}, "each once"),
        ({"kv": "int8,native=9"}, "there is no layer 9"),
        ({"sinks": 4}, "give window as well"),
        ({"window": 0}, "window"),
        ({"window": 8, "sinks": -1}, "sinks"),
    ]:
        with pytest.raises(RequestError, match=words):
            LLM(folder, **options)  # type: ignore[arg-type]
    learned = make_checkpoint(tmp_path / "gpt2", "gpt2").path
    with pytest.raises(RequestError, match="learned"):
        LLM(learned, window=8, sinks=2)
    dynamic = make_checkpoint(tmp_path / "dynamic", "dynamic").path
    with pytest.raises(RequestError, match="depends on the length"):
        LLM(dynamic, window=8)


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_text_without_end_takes_constant_memory(folder: Path, sinks: int) -> None:
    """Past the model's context of 512: pages are returned, the bytes stay, each token is computed once."""
    with LLM(folder, window=32, sinks=sinks, max_sequences=1, token_budget=64, speculate="off") as llm:
        pool, held, bytes_ = llm.engine.pool, [], []
        with llm.stream(text_of(100), most(700)) as stream:
            for _ in stream:
                held.append(pool.pages - pool.available)
                bytes_.append(stream.completion.usage.kv_bytes)
        done = stream.completion
        assert len(done.token_ids) == 700 and done.finish_reason == "length"
        assert done.usage.forward_tokens == 100 + 700 - 1
        assert set(bytes_) == {(31 + sinks) * llm.costs.bytes_per_token}
        assert max(held) <= 4 + bool(sinks), "a window of 32 tokens lies in three pages at most, and one is written to"


def test_a_window_on_learned_positions_ends_with_the_context(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "gpt2", "gpt2").path
    with LLM(path, window=16) as llm:
        done = llm.generate([text_of(500)], most(100))[0]
    assert (done.finish_reason, len(done.token_ids)) == ("context", 12)


def test_a_second_text_starts_behind_what_it_shares(folder: Path) -> None:
    with LLM(folder, pages=64) as llm:
        first = llm.generate([text_of(100)], GREEDY)[0]
        again = llm.generate([text_of(100)], GREEDY)[0]
        salted = llm.generate([text_of(100)], GREEDY, salt="somebody else")[0]
        assert first.usage.reused_tokens == salted.usage.reused_tokens == 0
        assert again.usage.reused_tokens == 96
        assert again.usage.forward_tokens == 100 + 11 - 96
        assert first.token_ids == again.token_ids == salted.token_ids
        assert llm.generate([text_of(100)], GREEDY, cache=False)[0].usage.reused_tokens == 0
        assert len(llm.score(text_of(100))) == 99, "every row of the prompt is computed for it"


@pytest.mark.parametrize("kind", ["dynamic", "phi3-long"])
def test_angles_that_depend_on_the_length_are_not_shared_across_lengths(kind: str, tmp_path: Path) -> None:
    """They depend on how long a text may become: a longer one must not take a shorter one's pages."""
    path = make_checkpoint(tmp_path / kind, kind).path
    with LLM(path, pages=64) as llm:
        prompt = text_of(100)
        short, shorter = llm.generate([prompt], most(5))[0], llm.generate([prompt], most(10))[0]
        long = llm.generate([prompt], most(200))[0]
        assert (short.usage.reused_tokens, shorter.usage.reused_tokens, long.usage.reused_tokens) == (0, 96, 0)
        assert long.token_ids == llm.generate([prompt], most(200), cache=False)[0].token_ids


@pytest.mark.parametrize(
    "options", [{}, {"kv": "int4"}, {"window": 40, "sinks": 4}, {"kv": "k=fp8,v=int8,first=20,native=-1", "window": 64}]
)
def test_a_cache_file_spares_a_long_prompt(folder: Path, tmp_path: Path, options: dict[str, object]) -> None:
    prompt, file = text_of(200), tmp_path / "chat.kv"
    with LLM(folder, **options) as llm:  # type: ignore[arg-type]
        first = llm.generate([prompt], GREEDY)[0]
        assert llm.save_cache(file, [*prompt, *first.token_ids]) == 208
    with LLM(folder, **options) as llm:  # type: ignore[arg-type]
        assert llm.load_cache(file) == 208
        again = llm.generate([[*prompt, *first.token_ids]], GREEDY)[0]
        assert again.usage.reused_tokens == 208
        assert again.usage.forward_tokens == 212 + 11 - 208, "less than a page of the text was computed again"
        naive = llm.generate([[*prompt, *first.token_ids]], GREEDY, cache=False)[0]
        assert again.token_ids == naive.token_ids


def test_a_cache_file_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    file, prompt = tmp_path / "chat.kv", text_of(100)
    with LLM(folder) as llm:
        llm.generate([prompt], GREEDY)
        llm.save_cache(file, prompt)
    other = make_checkpoint(tmp_path / "other", "qwen2", seed=1).path
    retold = make_checkpoint(tmp_path / "retold", "qwen2", changes={"rope_theta": 500.0}).path
    retokenised = make_checkpoint(tmp_path / "retokenised", "qwen2").path
    tokenizer = json.loads((retokenised / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (retokenised / "tokenizer.json").write_text(json.dumps(tokenizer))
    respelled = shutil.copytree(folder, tmp_path / "respelled")
    (respelled / "tokenizer.model").write_bytes(b"another vocabulary")
    cases: list[tuple[Path, dict[str, object], str]] = [
        (other, {}, "another weights"),
        (retold, {}, "another model"),
        (retokenised, {}, "another tokenizer"),
        (respelled, {}, "another tokenizer"),
        (folder, {"dtype": "bfloat16"}, "another dtype"),
        (folder, {"kv": "int8"}, "another kv format"),
        (folder, {"window": 64}, "another kv format"),
        (folder, {"page_size": 32}, r"another page size \(16\), and this engine has its own \(32\)"),
    ]
    for path, options, words in cases:
        with LLM(path, **options) as llm, pytest.raises(CacheFileError, match=words):  # type: ignore[arg-type]
            llm.load_cache(file)
    with LLM(folder, pages=3) as llm, pytest.raises(CapacityError, match="holds 96 tokens"):
        llm.load_cache(file)


def test_weights_that_changed_under_a_running_model_are_noticed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen2").path
    with LLM(path) as llm:
        llm.generate([text_of(40)], GREEDY)
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[::-1])
        with pytest.raises(CheckpointError, match="have changed since they were loaded"):
            llm.save_cache(tmp_path / "chat.kv", text_of(40))
    assert not (tmp_path / "chat.kv").exists()


def test_a_text_shorter_than_a_page_is_not_saved(folder: Path, tmp_path: Path) -> None:
    with LLM(folder) as llm:
        llm.generate([text_of(3)], most(2))
        assert llm.save_cache(tmp_path / "chat.kv", text_of(3)) == 0
        assert llm.save_cache(tmp_path / "chat.kv", text_of(50, seed=9)) == 0, "nothing is known of it"
    assert not (tmp_path / "chat.kv").exists()


def test_two_caches_over_the_same_weights(folder: Path) -> None:
    with LLM(folder, pages=16) as llm, LLM(llm.loaded, kv="int8", window=24, sinks=2, pages=16) as other:
        assert other.model.decoder is llm.model.decoder
        native = llm.generate([text_of(60)], GREEDY)[0]
        assert other.generate([text_of(60)], GREEDY)[0].usage.kv_bytes < native.usage.kv_bytes / 4
        other.close()
        assert llm.generate([text_of(60)], GREEDY)[0].token_ids == native.token_ids


def test_pages_are_sized_by_the_memory_that_is_granted(folder: Path) -> None:
    for options in ({}, {"kv": "int4"}, {"window": 32, "sinks": 2}, {"kv": "int8,first=16,native=1"}):
        for memory in (200_000, 1_000_000):
            with LLM(folder, kv_memory=memory, max_sequences=4, **options) as llm:  # type: ignore[arg-type]
                assert llm.kv_memory <= memory
                taken = sum(
                    tensor.nbytes
                    for group in range(len(llm.llm_engine.store.groups))
                    for tensor in llm.llm_engine.store.arrays(group)
                )
                assert taken == llm.kv_memory, "what is told is what was taken"
    with pytest.raises(CapacityError, match=r"grant it more memory \(kv_memory\)"):
        LLM(folder, kv_memory=1000)


def test_the_quantised_cache_in_sixteen_bits(folder: Path) -> None:
    with LLM(folder, dtype="bfloat16", kv="int8", pages=8) as llm:
        assert len(llm.generate([text_of(30)], GREEDY)[0].token_ids) == 12
        assert torch.isfinite(tensor(llm.model(text_of(30))[0])).all()
        assert re.fullmatch("int8", llm.kv_format)


@pytest.mark.parametrize("kind", ["dynamic", "phi3-long"])
def test_a_text_with_angles_of_its_own_is_not_saved(kind: str, tmp_path: Path) -> None:
    """Past the original context of 128 the angles depend on how long the text could become."""
    path = make_checkpoint(tmp_path / kind, kind).path
    with LLM(path, pages=64) as llm:
        long = llm.generate([text_of(100)], most(37))[0]
        assert llm.save_cache(tmp_path / "long.kv", [*text_of(100), *long.token_ids]) == 0
        llm.generate([text_of(90)], most(10))
        assert llm.save_cache(tmp_path / "short.kv", text_of(90)) == 80
    with LLM(path, pages=64) as llm:
        assert llm.load_cache(tmp_path / "short.kv") == 80
        again, naive = (llm.generate([text_of(90)], most(10), cache=cache)[0] for cache in (True, False))
        assert (again.usage.reused_tokens, again.token_ids) == (80, naive.token_ids)


def test_a_file_of_a_larger_budget_is_read_as_far_as_it_is_needed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.kv"
    with LLM(folder, window=64, max_sequences=1) as llm:
        done = llm.generate([text_of(400)], GREEDY)[0]
        assert llm.save_cache(file, text_of(400)) == 400
    with LLM(folder, window=64, max_sequences=1, token_budget=16) as llm:
        assert llm.load_cache(file) == 400
        assert llm.load_cache(file) == 400, "what is there already takes no page"
        again = llm.generate([[*text_of(400), *done.token_ids]], GREEDY)[0]
        assert again.usage.reused_tokens == 400
        check_invariants(llm.engine.scheduler)


def test_sizes_without_sense_are_refused(folder: Path) -> None:
    for options in (
        {"window": 10**20},
        {"window": 8, "sinks": 2**63},
        {"kv": f"int8,first={10**19}"},
        {"max_sequences": 10**20},
        {"page_size": 2**40},
    ):
        with pytest.raises(RequestError, match=f"{1 << 31:,}"):
            LLM(folder, **options)  # type: ignore[arg-type]


def test_loading_a_file_keeps_the_pages_that_are_there_already(folder: Path, tmp_path: Path) -> None:
    """The beginning of its text was used longest ago, so it is what the rest of the file would evict."""
    file, text, other = tmp_path / "text.kv", text_of(129), text_of(65, seed=1)
    with LLM(folder, pages=16) as llm:
        llm.generate([text], most(1))
        assert llm.save_cache(file, text) == 128
    with LLM(folder, pages=9) as llm:
        llm.generate([text[:65]], most(1))
        llm.generate([other], most(1))
        assert llm.load_cache(file) == 128
        [done] = llm.generate([text], most(1))
        assert done.usage.reused_tokens == 128
