"""What it takes to add a family: a row, if its parts are known; with an op of its own the op, and the torch op as well.

The toy of known parts is OLMo 2 under another name. The toy with an op is Llama with an MLP whose result is capped
softly. Everything else (files, packing, the engine, the cache, cost, plan, inspect) finds the new op in the graph. The
native kernels lack it, so its model runs op by op on those they have; a native op would be a struct in `step.h` and a
file of `ops/` as well.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.models.fixtures import make_checkpoint
from tokenwright import LLM, SamplingParams, plan
from tokenwright.backends.layout import Weights
from tokenwright.backends.native import structs
from tokenwright.backends.native.program import NativeDecoder
from tokenwright.backends.torch import ops as torch_ops
from tokenwright.backends.torch.border import tensor
from tokenwright.backends.torch.kernels import Kernels
from tokenwright.backends.torch.op_batch import ForwardState
from tokenwright.checkpoints.families import llama, registry
from tokenwright.checkpoints.families import llama_like as parts
from tokenwright.checkpoints.families.family import in_layers
from tokenwright.checkpoints.families.llama_like import LlamaLike, by_config
from tokenwright.checkpoints.families.registry import LLAMA
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.cli import app
from tokenwright.config import ModelConfig
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import MLP, Graph
from tokenwright.models.taps import Site

ROOM = Path(registry.__file__).parents[2]
FAMILY, OP, TORCH = "checkpoints/families/registry.py", "models/graph.py", "backends/torch/ops.py"
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PROMPT = [7, 40, 3, 99, 200, 12, 5, 31]


# In models/graph.py:
@dataclass(frozen=True)
class CappedMLP(MLP):
    """x + cap tanh(mlp(x) / cap)."""

    cap: float = 1.0


# In backends/torch/ops.py:
class TorchCappedMLP:
    def __init__(self, op: CappedMLP, kernels: Kernels, weights: Weights) -> None:
        self.inner = torch_ops.TorchMLP(op, kernels, weights)
        self.layer, self.cap = op.layer, op.cap

    def __call__(self, x: torch.Tensor, state: ForwardState) -> torch.Tensor:
        silent = replace(state, tap=lambda *_: None)
        x = x + self.cap * ((self.inner(x, silent) - x) / self.cap).tanh()
        state.tap(Site.MLP, self.layer, x)
        return x


# In checkpoints/families/registry.py:
def _parse(keys: JsonKeys, architecture: str) -> tuple[ModelConfig, Graph]:
    cap = keys.number("mlp_cap")
    config, graph = LLAMA.parse(keys, "LlamaForCausalLM")
    blocks = tuple(CappedMLP(**vars(op), cap=cap) if isinstance(op, MLP) else op for op in graph.blocks)
    return replace(config, architecture=architecture), replace(graph, architecture=architecture, blocks=blocks)


TOY = replace(LLAMA, architectures={"ToyForCausalLM": "toy"}, parse=_parse)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The family as if it had been added; the files that this takes."""
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, TOY))
    monkeypatch.setattr(torch_ops, "OPS", {**torch_ops.OPS, CappedMLP: TorchCappedMLP})
    return {FAMILY, OP, TORCH}


def folder_of(tmp_path: Path, cap: float) -> tuple[Path, torch.nn.Module]:
    """A checkpoint of the toy, and transformers' Llama with its MLPs capped."""
    folder, oracle = make_checkpoint(tmp_path / "toy", "llama2")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy", "mlp_cap": cap}
    (folder / "config.json").write_text(json.dumps(config))
    for layer in oracle.model.layers:
        layer.mlp.register_forward_hook(lambda _, __, y: cap * (y / cap).tanh())
    return folder, oracle


def test_it_computes_what_it_should(added: set[str], tmp_path: Path) -> None:
    folder, oracle = folder_of(tmp_path, cap=0.05)
    with LLM(folder, weights="float32", trace=True) as llm, torch.no_grad():
        ours, _ = llm.model(PROMPT)
        theirs = oracle(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(tensor(ours), theirs, rtol=1e-3, atol=1e-3)
        [cached], [naive] = (llm.generate([PROMPT], GREEDY, cache=cache) for cache in (True, False))
        assert cached.token_ids == naive.token_ids
        frames = list(llm.run(PROMPT, GREEDY).step())
        assert [len(frame.layers) for frame in frames] == [3] * len(frames), "who looks sees its layers"
    assert len(added) <= 4
    assert all((ROOM / file).is_file() for file in added)


def test_the_cap_is_felt(added: set[str], tmp_path: Path) -> None:
    assert added
    logits = []
    for cap in (0.05, 1e6):
        folder, _ = folder_of(tmp_path / str(cap), cap)
        with LLM(folder, weights="float32") as llm:
            logits.append(tensor(llm.model(PROMPT)[0]))
    plain, _ = make_checkpoint(tmp_path / "plain", "llama2")
    with LLM(plain, weights="float32") as llm:
        torch.testing.assert_close(tensor(logits[1]), tensor(llm.model(PROMPT)[0]), rtol=1e-4, atol=1e-4)
    assert abs(logits[0] - logits[1]).max() > 0.05


@pytest.mark.parametrize("weights", ["int8", "int4", "bfloat16"])
def test_packed_weights_and_the_engine(weights: str, added: set[str], tmp_path: Path) -> None:
    assert added
    folder, _ = folder_of(tmp_path, cap=0.5)
    with LLM(folder, weights=weights, kv="int8") as llm:
        assert not isinstance(llm.model.decoder, NativeDecoder), "an op that kernels lack runs in torch"
        [cached], [naive] = (llm.generate([PROMPT], GREEDY, cache=cache) for cache in (True, False))
        assert len(cached.token_ids) == 9
        if llm.kernels != "reference":
            assert cached.token_ids == naive.token_ids


def test_cost_plan_and_inspect_read_it_from_the_graph(added: set[str], tmp_path: Path) -> None:
    assert added
    folder, _ = folder_of(tmp_path, cap=0.5)
    plain, _ = make_checkpoint(tmp_path / "plain", "llama2")
    ours, theirs = plan(folder), plan(plain)
    assert ours.hindrances == ()
    told = ("parameters", "weight_bytes", "prefill_flops", "decode_flops", "decode_bytes", "kv_bytes_per_token")
    assert [ours.facts()[name] for name in told] == [theirs.facts()[name] for name in told]
    shown = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    facts = json.loads(shown.stdout)
    assert (facts["architecture"], facts["native_step"]) == ("ToyForCausalLM", False)
    assert "step           op by op\n" in CliRunner().invoke(app, ["inspect", str(folder)]).stdout


def test_without_its_torch_op_it_can_be_planned_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, TOY))
    folder, _ = folder_of(tmp_path, cap=0.5)
    assert plan(folder).hindrances == ("it has no decoder for ToyForCausalLM",)
    with pytest.raises(CheckpointError, match="CappedMLP"):
        LLM(folder)


def test_without_its_family_it_is_refused(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, cap=0.5)
    with pytest.raises(CheckpointError, match="unknown architecture ToyForCausalLM"):
        LLM(folder)


def test_a_family_of_known_parts_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = llama.row(
        {"KnownForCausalLM": "known"},
        LlamaLike(by_config(), parts.behind(1e-5), llama.ALL_HEADS),
        in_layers("attention_post_norm=post_attention_layernorm mlp_post_norm=post_feedforward_layernorm"),
    )
    folder, _ = make_checkpoint(tmp_path / "olmo2", "olmo2")
    with LLM(folder) as llm:
        theirs, _ = llm.model(PROMPT)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["KnownForCausalLM"], "model_type": "known"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="unknown architecture KnownForCausalLM"):
        LLM(folder)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, known))
    with LLM(folder) as llm:
        ours, _ = llm.model(PROMPT)
        assert llm.graph.architecture == "KnownForCausalLM"
        assert (ours == theirs).all()


def test_a_native_op_has_two_places() -> None:
    """Its struct, and its functions: no other file of the kernels, and none in Python, names an op."""
    room = ROOM / "backends" / "native"
    sources = {file.name: file.read_text() for file in room.rglob("*") if file.suffix in (".py", ".h", ".cpp")}
    for op, file in (("EmbedOp", "embed.cpp"), ("NextInputOp", "next_input.cpp")):
        assert {name for name, source in sources.items() if op in source} == {"step.h", file}
    assert {"MLP", "Attention"} < set(structs.OPS)
    assert "CappedMLP" not in structs.OPS
