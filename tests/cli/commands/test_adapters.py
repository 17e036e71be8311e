"""LoRA adapters in the commands: merged by `quantize` and `bench`, told by `inspect`, counted by `plan`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run
from tests.models.files.adapters import write_adapter
from tests.models.files.published_files import write
from tests.models.fixtures import make_checkpoint
from tests.tensors import tensor_decoder, unpacked
from tokenwright import LLM
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.formats import WeightFormat
from tokenwright.planner import plan


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all linear layers of the blocks, rank 5."""
    return write_adapter(str(model), tmp_path_factory.mktemp("lora") / "adapter", 5, 1)


def test_quantize_merges_first(run: Run, model: Path, adapter: Path, tmp_path: Path) -> None:
    written = run("quantize", model, tmp_path / "q", "--weights", "int4", "--lora", adapter)
    assert written.exit_code == 0, written.output
    form = WeightFormat.parse("int4")
    found, merged = Checkpoint.open(tmp_path / "q"), Checkpoint.open(model).merged([adapter])
    ours, theirs = (unpacked(one.graph, load_packed(one, form, "float32")) for one in (found, merged))
    assert all(torch.equal(ours[name], one) for name, one in theirs.items())
    base = load_packed(Checkpoint.open(model), form, "float32")
    assert not torch.equal(ours["layers.1.mlp.up.weight"], unpacked(found.graph, base)["layers.1.mlp.up.weight"])


def test_inspect_tells_what_would_happen(run: Run, model: Path, adapter: Path, tmp_path: Path) -> None:
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "maker/base"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    [told] = json.loads(run("inspect", model, "--lora", adapter, "--json").stdout)["adapters"]
    with LLM(model, adapters={"one": adapter}) as llm:
        beside = sum(
            update.down.nbytes + update.up.nbytes
            for each in tensor_decoder(llm.loaded.decoder).adapters.values()
            for update in each.values()
        )
    assert told["beside_bytes"] == beside and told["modules"] == 3 * 7 and told["ranks"] == [5]
    assert (told["base"], told["merges"], told["decoded"]) == ("maker/base", True, 0)
    page = run("inspect", model, "--lora", adapter).stdout
    assert f"adapter        {adapter}: rank 5, scale 0.2, 21 linear layers (down_proj, gate_proj, " in page
    assert ", trained on maker/base\nmerged         added to the weights as they are read\nbeside         " in page
    sizes = {"hidden_size": 128, "intermediate_size": 384}
    plain = make_checkpoint(tmp_path / "plain", "llama2", changes=sizes).path
    other = write_adapter(str(plain), tmp_path / "other", 2, 1)
    quantised = write(plain, tmp_path / "numbers", "gptq")
    [told] = json.loads(run("inspect", quantised, "--lora", other, "--json").stdout)["adapters"]
    assert told["decoded"] == 3 * 7, "what the adapter changes is no longer copied"
    packed = tmp_path / "q"
    assert run("quantize", model, packed).exit_code == 0
    assert "merged         not into packed weights\n" in run("inspect", packed, "--lora", adapter).stdout


def test_inspect_tells_several_adapters_apart(run: Run, model: Path, adapter: Path, tmp_path: Path) -> None:
    """The second is one of the head, which no request can choose."""
    out, inner = Checkpoint.open(model).graph.shapes["head.weight"]
    (tmp_path / "head").mkdir()
    sides = {"lora_A": torch.ones(2, inner), "lora_B": torch.ones(out, 2)}
    named = {f"base_model.model.lm_head.{side}.weight": one for side, one in sides.items()}
    save_file(named, tmp_path / "head/adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["lm_head"]}
    (tmp_path / "head/adapter_config.json").write_text(json.dumps(settings))
    page = run("inspect", model, "--lora", adapter, "--lora", tmp_path / "head").stdout
    assert f"adapter 1      {adapter}: rank 5, " in page and " in float32, chosen by each request" in page
    assert f"adapter 2      {tmp_path / 'head'}: rank 2, scale 2, 1 linear layers (lm_head)" in page
    assert "beside 2       not possible: it updates head\n" in page


def test_plan_counts_adapters_beside_the_weights(run: Run, model: Path, adapter: Path) -> None:
    told = json.loads(run("plan", model, "--adapter", adapter, "--adapter", adapter, "--json").stdout)
    bare = plan(model)
    [one, two] = told["adapter_bytes"]
    assert (
        one
        == two
        == json.loads(run("inspect", model, "--lora", adapter, "--json").stdout)["adapters"][0]["beside_bytes"]
    )
    assert told["total_bytes"] == bare.total_bytes + one + two
    assert told["decode_bytes"] == bare.decode_bytes + one, "a sequence has one of them"
    limited = plan(model, adapters=[adapter], memory=bare.weight_bytes + one - 1)
    assert (limited.most_batch, limited.most_context, limited.fits) == (0, 0, False)
    assert (
        "2 kept beside the weights, in float32" in run("plan", model, "--adapter", adapter, "--adapter", adapter).stdout
    )


def test_what_is_no_adapter_is_refused(refused: Callable[..., str], model: Path, adapter: Path, tmp_path: Path) -> None:
    for words in (("bench", model, "--lora"), ("inspect", model, "--lora"), ("plan", model, "--adapter")):
        assert f"{tmp_path / 'none'} is no folder" in refused(*words, tmp_path / "none")
    assert f"{tmp_path / 'none'} is no folder" in refused(
        "quantize", model, tmp_path / "q", "--lora", tmp_path / "none"
    )
    assert f"{adapter} is an adapter, not a model" in refused("inspect", adapter)
    assert "without adapters; leave out --shape" in refused("bench", "--shape", "tiny", "--lora", adapter)
