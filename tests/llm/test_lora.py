"""LoRA adapters: merged, beside the base, and PEFT's own model give the same; a row never depends on its neighbours."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.files.gguf_files import Kind, write_gguf
from tests.models.files.published_files import write
from tests.models.fixtures import make_checkpoint
from tests.serve.live import HANGS, live
from tests.tensors import tensors_of, unpacked
from tokenwright import LLM
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.torch.border import tensor
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.checkpoints.packing.weight_cache import WeightCache
from tokenwright.cli.commands.serve import adapters_of
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.serve.app import Served

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore:The following alpha_pattern:RuntimeWarning"
)  # PEFT over a newer transformers; it warns of patterns for parameters, and obeys them
NATIVE = WeightFormat("native")
TEXT = "the model said hello 12, and then nothing for a long time"
# The kind of model, and what the adapter's config asks for.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama2", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "everything": (
        "qwen2",
        {
            "target_modules": "all-linear",
            "r": 3,
            "use_rslora": True,
            "rank_pattern": {"layers.1.mlp.down_proj": 5, "^model.layers.0.self_attn.k_proj": 2},
            "alpha_pattern": {"o_proj": 11.5},
        },
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "layers_to_transform": [0, 2]}),
    "turned heads": ("neox", {"target_modules": "all-linear"}),  # q, k and v in turn; attention beside the MLP
    "neighbours": ("glm4", {"target_modules": "all-linear"}),  # rows of q and k in another order
    "head": ("llama2", {"target_modules": ["lm_head", "down_proj"]}),
    "experts": (
        "mixtral",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "r": 3,
            "alpha_pattern": {"layers.1.mlp.experts.down_proj": 11.5},
        },
    ),
    "experts in turn": ("gpt-oss-plain", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
}
MERGED = ("head", "experts", "experts in turn")  # what the kernels cannot compute beside the weights


def make_adapter(model: Path, folder: Path, seed: int = 0, **settings: Any) -> tuple[Path, torch.nn.Module]:
    """An adapter with random A and B, saved by PEFT, and PEFT's model with it in fp32."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    wrapped = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, one in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(one, std=0.15)
    wrapped.save_pretrained(folder)  # with copies of the tables of tokens, if it adapts one
    return folder, wrapped.eval()


def expected(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """The log-probabilities [T - 1] of a text's tokens after the first."""
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def scored(llm: LLM, ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
    [one] = llm.generate([list(ids)], adapter=adapter, max_tokens=1, temperature=0, prompt_logprobs=0)
    assert one.prompt_logprobs is not None
    return torch.tensor([float(each) for each in one.prompt_logprobs if each is not None])


@pytest.mark.parametrize("case", CASES)
def test_merged_beside_and_peft_agree(case: str, tmp_path: Path) -> None:
    kind, settings = CASES[case]
    model = make_checkpoint(tmp_path / "model", kind).path
    folder, oracle = make_adapter(model, tmp_path / "adapter", **settings)
    with LLM(model, lora=[folder], dtype="float32") as llm:
        ids = llm.tokenizer.encode(TEXT)
        rows, merged = expected(oracle, ids), torch.from_numpy(llm.score(ids)).float()
    assert (merged - rows).abs().max() < 1e-4
    if case in MERGED:
        with pytest.raises(CheckpointError, match="only a merge can"):
            LLM(model, adapters={"one": folder})
        return
    with LLM(model, adapters={"one": folder}, dtype="float32") as llm:
        beside, base = scored(llm, ids, "one"), torch.from_numpy(llm.score(ids)).float()
    assert (beside - rows).abs().max() < 1e-4
    assert (base - rows).abs().max() > 0.01, "the adapter changes the texts"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A model, and four adapters of different ranks and modules."""
    home = tmp_path_factory.mktemp("lora")
    model = make_checkpoint(home / "model", "qwen2").path
    targets = (["q_proj", "v_proj"], ["o_proj", "gate_proj", "up_proj"], ["down_proj"], ["q_proj", "k_proj", "o_proj"])
    made = {
        f"a{i}": make_adapter(model, home / f"a{i}", i, target_modules=each, r=2 + 3 * i, lora_alpha=8)[0]
        for i, each in enumerate(targets)
    }
    return model, made


Rows = dict[tuple[tuple[int, ...], int, int], torch.Tensor]


def recorded(llm: LLM) -> Rows:
    """Every row of logits that an engine computes from now on, by (prompt, adapter, position)."""
    rows: Rows = {}
    runner: Any = llm.engine.runner
    forward = runner.forward

    def recording(step: Any, *rest: Any) -> Any:
        output = forward(step, *rest)
        for chunk, places in zip(step.chunks, output.rows, strict=True):
            for position, place in zip(range(chunk.stop - len(places), chunk.stop), places, strict=True):
                rows[chunk.request.prompt, chunk.request.adapter, position] = tensor(output.logits[place].copy())
        return output

    runner.forward = recording
    return rows


@pytest.mark.skipif(find_kernels() is None, reason="torch's own products depend on the rows beside them")
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_sixteen_requests_with_four_adapters_are_as_alone(four: tuple[Path, Mapping[str, Path]], weights: str) -> None:
    model, made = four
    names = [None, *made]
    prompts = [[5 + (7 * i + j * j) % 300 for j in range(3 + 5 * i)] for i in range(16)]
    chosen = [names[i % 5] for i in range(16)]
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with LLM(model, adapters=made, weights=weights, token_budget=48, pages=16) as llm:
        together = recorded(llm)
        texts = llm.generate(prompts, adapter=chosen, **asked)
        assert any(one.usage.preemptions for one in texts), "prompts are cut, and texts preempted"
    with LLM(model, adapters=made, weights=weights) as llm:
        alone = recorded(llm)
        for prompt, name, text in zip(prompts, chosen, texts, strict=True):
            [one] = llm.generate([prompt], adapter=name, **asked)
            assert one.token_ids == text.token_ids
    assert alone.keys() <= together.keys() and len(alone) >= 16 * 24
    assert all(torch.equal(row, together[key]) for key, row in alone.items())


def test_adapters_share_no_pages_and_beams_keep_theirs(four: tuple[Path, Mapping[str, Path]]) -> None:
    model, made = four
    ids = [5 + i % 200 for i in range(70)]
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with LLM(model, adapters=made) as llm:
        [first] = llm.generate([ids], adapter="a0", **asked)
        [other] = llm.generate([ids], adapter="a1", **asked)
        [base] = llm.generate([ids], **asked)
        [again] = llm.generate([ids], adapter="a0", **asked)
        assert other.usage.reused_tokens == base.usage.reused_tokens == 0 < again.usage.reused_tokens
        assert again.token_ids == first.token_ids
        beams = llm.generate([ids], adapter="a3", beams=3, max_tokens=6)[0]
        with pytest.raises(RequestError, match="no adapter 'a9'; it has a0"):
            llm.generate("the", adapter="a9")
    with LLM(model, lora=[made["a3"]]) as llm:
        assert llm.generate([ids], beams=3, max_tokens=6)[0].token_ids == beams.token_ids


def test_a_merge_adds_every_adapter_and_has_a_cache_of_its_own(
    four: tuple[Path, Mapping[str, Path]], tmp_path: Path
) -> None:
    model, made = four
    base = Checkpoint.open(model)
    cache, form = WeightCache(tmp_path, 0), WeightFormat.parse("int8")
    files = {cache._file(one, form) for one in (base, *(base.merged([made[name]]) for name in made))}
    assert len(files) == 5
    twice = tensors_of(base.merged([made["a0"], made["a3"]]), torch.float32)
    name = "layers.0.attention.q.weight"
    added = sum(
        tensor(one.up @ one.down * one.scale)
        for path in ("a0", "a3")
        for one in [base.adapter(made[path]).updates[name[:-7]]]
    )
    assert torch.allclose(twice[name], tensors_of(base, torch.float32)[name] + added, atol=1e-6)


def test_a_merge_decodes_what_it_changes_of_a_quantised_folder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384}
    plain = make_checkpoint(tmp_path / "plain", "llama2", changes=sizes).path
    adapter, _ = make_adapter(plain, tmp_path / "adapter", target_modules=["q_proj"], layers_to_transform=[1])
    base = Checkpoint.open(write(plain, tmp_path / "numbers", "gptq"))
    merged = base.merged([adapter])
    gone = {f"layers.1.attention.{part}" for part in "qkv"}
    assert base.as_stored.keys() - merged.as_stored.keys() == gone
    update, name = merged.adapters[0].updates["layers.1.attention.q"], "layers.1.attention.q.weight"
    before, after = (unpacked(one.graph, load_packed(one, NATIVE, "float32")) for one in (base, merged))
    assert torch.allclose(after.pop(name), before.pop(name) + tensor(update.scale * update.up @ update.down), atol=1e-5)
    assert all(torch.equal(after[other], before[other]) for other in before), "the other matrices stay as they are"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, '"IA3" asks for another kind of adapter.*merge_and_unload'),
    "dora": ({"use_dora": True}, "DoRA"),
    "bias": ({"bias": "all"}, "trained biases"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "unknown": ({"use_new_arithmetic": True}, "use_new_arithmetic"),
    "rank": ({"r": 9}, r"is \[2, 64\], but \[9, 64\]"),
    "pattern": ({"alpha_pattern": {"(a+)+$": 2}}, "not expressions"),
    "target": ({"target_modules": ["q_proj"]}, "not among the target_modules"),
    "missing": ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "lacks layers.0.self_attn.k_proj"),
    "alpha": ({"lora_alpha": float("nan")}, "lora_alpha"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_is_implemented_or_refused(four: tuple[Path, Mapping[str, Path]], case: str, tmp_path: Path) -> None:
    model, made = four
    folder = Path(shutil.copytree(made["a0"], tmp_path / "adapter"))
    changes, reason = REFUSED[case]
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(model).adapter(folder)


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_copies_of_the_tables_of_tokens_are_left_out(form: str, tmp_path: Path) -> None:
    """PEFT saves both tables, also where the head is the embeddings."""
    model = make_checkpoint(tmp_path / "model", "llama2", changes={"tie_word_embeddings": True}).path
    folder, _ = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    copies = {f"base_model.model.{name}.weight": table.clone() for name in ("lm_head", "model.embed_tokens")}
    file = folder / "adapter_model.safetensors"
    own = load_file(file)
    opened = Checkpoint.open(write_gguf(tmp_path / "model.gguf", model, Kind.F32) if form == "gguf" else model)
    expected = opened.adapter(folder).digest
    save_file(own | copies, file)
    assert opened.adapter(folder).digest == expected
    save_file(own | copies | {"base_model.model.lm_head.weight": table + 1}, file)
    with pytest.raises(CheckpointError, match="a whole layer in place of the model's"):
        opened.adapter(folder)


def test_an_adapter_of_mlx_lm_is_named(four: tuple[Path, Mapping[str, Path]], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "num_layers": 16}))
    save_file({"model.layers.0.self_attn.q_proj.lora_a": torch.ones(1)}, tmp_path / "adapters.safetensors")
    with pytest.raises(CheckpointError, match="an adapter of mlx-lm"):
        Checkpoint.open(four[0]).adapter(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "a whole layer in place of the model's"),
        (lambda t: t | {"base_model.model.x.lora_embedding_A": torch.zeros(2, 2)}, "reads the lora_A.weight"),
        (lambda t: {k.replace("layers.0", "layers.9"): v for k, v in t.items()}, "no linear layer"),
        (lambda t: {k: v for k, v in t.items() if "layers.1.self_attn.q_proj.lora_A" not in k}, "alone"),
        (lambda t: {k: v[:, :-1].contiguous() if "lora_A" in k else v for k, v in t.items()}, "by adapter_config.json"),
        (
            lambda t: t | {"base_model.model.lm_head.base_layer.weight": torch.zeros(2, 2)},
            "a whole layer in place of the model's",
        ),
        (lambda t: {k: v / 0 for k, v in t.items()}, "not finite"),
        (lambda t: {k: v.to(torch.int32) for k, v in t.items()}, "I32"),
    ],
)
def test_a_tensor_belongs_to_the_model(
    four: tuple[Path, Mapping[str, Path]], change: Any, reason: str, tmp_path: Path
) -> None:
    model, made = four
    folder = Path(shutil.copytree(made["a0"], tmp_path / "adapter"))
    save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(model).adapter(folder)


def test_a_server_has_each_adapter_as_a_model(four: tuple[Path, Mapping[str, Path]]) -> None:
    model, made = four
    body: dict[str, Any] = {"prompt": "the model", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with LLM(model, adapters=made) as llm:
        asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        names = (None, "a0", "a3")
        alone = {name or "tiny": llm.generate("the model", adapter=name, **asked)[0].text for name in names}
    assert len(set(alone.values())) == 3
    with live(model, adapters=made, served=Served(["tiny"], adapters=list(made))) as server:
        listed = ask(server.url, "/v1/models")["data"]
        assert [one["id"] for one in listed] == ["tiny", *made]
        for name, text in alone.items():
            answer = ask(server.url, "/v1/completions", {**body, "model": name})
            assert (answer["choices"][0]["text"], answer["model"]) == (text, name)
        options = {"num_predict": 8, "temperature": 0}
        asked = {"model": "a3", "prompt": "the model", "raw": True, "stream": False, "options": options}
        told = ask(server.url, "/api/generate", asked)
        assert alone["a3"].startswith(told["response"]) and told["response"]
        with pytest.raises(httpx2.HTTPStatusError, match="400"):
            ask(server.url, "/v1/embeddings", {"model": "a0", "input": "the"})


def ask(url: str, path: str, body: Any = None) -> Any:
    answer = httpx2.request("GET" if body is None else "POST", url + path, json=body, timeout=HANGS)
    return answer.raise_for_status().json()


@pytest.mark.parametrize(
    ("given", "reason"), [(["a"], "NAME=FOLDER"), (["a=x", "a=y"], "taken"), (["tiny=x"], "taken")]
)
def test_adapters_of_a_server_have_names_of_their_own(given: list[str], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        adapters_of(given, ("tiny",))
