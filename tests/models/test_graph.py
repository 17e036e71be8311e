"""The graph as the one description of a model: its tensors, matrices and KV, and what it takes to add an op."""

import ast
import subprocess
import sys
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest

import tokenwright
from tests.models.fixtures import KINDS, make_config
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.config import Heads, Latent, LayerKV, Learned
from tokenwright.explorer.panels.block import _flops
from tokenwright.models.graph import MLP, Attention, Embed, Graph, Head
from tokenwright.models.op import InputGate, Matrix, Norm, Op, Shape, numbers
from tokenwright.models.split import RankPlace, cut_graph

PACKAGE = Path(tokenwright.__file__).parent


def graph_of(kind: str) -> Graph:
    return parse_config(make_config(kind)).graph


def test_the_ops_of_a_model_in_order() -> None:
    graph = graph_of("qwen2-window")
    assert [type(op) for op in graph.ops] == [Embed, *[Attention, MLP] * 4, Head]
    assert [(op.layer, op.window) for op in graph.attention if isinstance(op, Attention)] == [
        (0, None), (1, None), (2, 32), (3, 32),
    ]  # fmt: skip
    assert [op.layer for op in graph.blocks if isinstance(op, MLP)] == [0, 1, 2, 3]


def test_every_tensor_of_gpt2() -> None:
    graph = graph_of("gpt2")
    first = {
        "embed.weight": (320, 64),
        "positions.weight": (512, 64),
        "layers.0.attention_norm.weight": (64,),
        "layers.0.attention_norm.bias": (64,),
        **{f"layers.0.attention.{n}.{k}": s for n in "qkv" for k, s in (("weight", (64, 64)), ("bias", (64,)))},
        "layers.0.attention.o.weight": (64, 64),
        "layers.0.attention.o.bias": (64,),
        "layers.0.mlp_norm.weight": (64,),
        "layers.0.mlp_norm.bias": (64,),
        "layers.0.mlp.up.weight": (256, 64),
        "layers.0.mlp.up.bias": (256,),
        "layers.0.mlp.down.weight": (64, 256),
        "layers.0.mlp.down.bias": (64,),
    }
    assert list(graph.shapes.items())[: len(first)] == list(first.items()), "in this order"
    assert len(graph.shapes) == 2 + 3 * 16 + 2, "a tied head has none of its own"
    assert graph.positions == Learned()


def test_every_tensor_of_a_qwen3() -> None:
    graph = graph_of("qwen3")
    block = [name.removeprefix("layers.1.") for name in graph.shapes if name.startswith("layers.1.")]
    attention = [f"attention.{name}.weight" for name in ("q", "k", "v", "o", "q_norm", "k_norm")]
    assert block == [
        "attention_norm.weight", *attention, "mlp_norm.weight", *(f"mlp.{n}.weight" for n in ("gate", "up", "down")),
    ]  # fmt: skip
    assert graph.shapes["layers.0.attention.k.weight"] == (2 * 32, 64)
    assert graph.shapes["layers.0.attention.k_norm.weight"] == (32,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_dense_or_part_of_one_matrix(kind: str) -> None:
    graph = graph_of(kind)
    inside = [name for matrix in graph.matrices.values() for name in matrix.shapes]
    assert len(inside) == len(set(inside)), "no part of two matrices"
    assert {*inside, *graph.dense} == graph.shapes.keys()
    assert not {*inside} & {*graph.dense}
    for matrix in graph.matrices.values():
        assert matrix.out == sum(graph.shapes[f"{name}.weight"][0] for name, _ in matrix.parts)
        assert {graph.shapes[f"{name}.weight"][1] for name, _ in matrix.parts} == {matrix.inner}
    assert graph.parameters == sum(map(prod, graph.shapes.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_says_what_the_config_says(kind: str) -> None:
    _, config, graph = parse_config(make_config(kind))
    assert (graph.architecture, graph.context) == (config.architecture, config.context)
    assert (graph.layers, graph.width, graph.vocab_size) == (config.layers, config.width, config.vocab_size)
    latent = config.latent
    alone = len(graph.recurrent) == graph.layers  # it has no attention
    turns = any(rotary for i, rotary in enumerate(config.rotary) if i not in graph.recurrent)
    assert graph.positions == (config.positions if turns or config.positions == Learned() else None)
    assert graph.rotary_size == (0 if alone else config.head_size if latent is None else latent.rope)
    assert graph.tied_head == config.tied_head == ("head.weight" not in graph.shapes)
    heads = Heads(config.kv_heads, config.head_size)
    layout = heads if latent is None else Latent(latent.rank, latent.rope)
    kept = [(i, replace(one, biased=False)) for i, one in enumerate(graph.kv) if i not in graph.recurrent]
    assert kept == [(i, LayerKV(layout, config.windows[i])) for i, _ in kept]
    rotates = [(i, graph.attention[i].rope is not None) for i, _ in kept]
    turning = graph.positions == config.positions != Learned()
    assert rotates == [(i, config.rotary[i] and turning) for i, _ in kept]


def test_what_a_step_reads() -> None:
    """All but the tables in which a row is looked up; a tied head is one of them and is read all the same."""
    for kind in ("gpt2", "llama2", "qwen2.5"):
        graph = graph_of(kind)
        left_out = graph.shapes.keys() - graph.read(5).keys()
        looked_up = {"positions.weight"} if kind == "gpt2" else {"embed.weight"}
        assert left_out == (set() if kind == "qwen2.5" else looked_up)


def test_weights_that_a_row_is_multiplied_with() -> None:
    graph = graph_of("llama2")
    attention, mlp = graph.blocks[:2]
    assert (graph.embed.multiplied, graph.head.multiplied) == (0, 320 * 64)
    assert (attention.multiplied, mlp.multiplied) == (4 * 64 * 64, 3 * 64 * 96)
    assert (attention.pair_flops, mlp.pair_flops) == (4 * 4 * 16, 0)


@pytest.mark.parametrize("kind", ["llama2", "neox", "mixtral", "deepseek2"])
def test_the_stages_of_a_layer_add_up_to_its_work(kind: str) -> None:
    """Also where attention and MLP are one op: each has its stages."""
    graph, context = graph_of(kind), 20
    found = _flops(graph, 1, context)
    ops = [op for op in graph.blocks if {part.layer for part in op.parts} == {1}]  # type: ignore[attr-defined]
    assert sum(found.values()) == sum(2 * op.multiplied + op.pair_flops * context for op in ops)
    assert found.keys() >= {"attention", "output", "mlp_output"}
    assert ("query" in found) == (kind != "deepseek2"), "a latent's products are told together"
    assert ("hidden" in found) == (kind in ("llama2", "neox")), "experts have no numbers that all rows share"


@dataclass(frozen=True)
class Toy(Op):
    layer: int
    norm: Norm | None
    up: Matrix
    each: tuple[Matrix, ...] = ()
    inputs: InputGate | None = None
    factor: str | None = None

    @property
    def learned_shapes(self) -> dict[str, Shape]:
        return numbers(self.factor, 3)


def test_the_tensors_and_the_cost_of_an_op_follow_from_its_fields() -> None:
    norm, up = Norm("norm", "layer", 8, 1e-5), Matrix("up", (("a", 16), ("b", 32)), 8, bias=True)
    bare = Toy(0, None, up)
    assert bare.matrices == (up,) and bare.shapes == up.shapes and bare.multiplied == 48 * 8
    gate, out = Matrix.single("gate", 4, 8), Matrix.single("out", 8, 4)
    inputs = InputGate(0, gate, "gelu", out, Norm("post", "rms", 8, 1e-5))
    op = Toy(0, norm, up, (out, gate), inputs, "factor")
    assert op.matrices == (up, out, gate, gate, out)
    assert op.shapes == {
        "norm.weight": (8,),
        "norm.bias": (8,),
        "a.weight": (16, 8),
        "a.bias": (16,),
        "b.weight": (32, 8),
        "b.bias": (32,),
        "out.weight": (8, 4),
        "gate.weight": (4, 8),
        "post.weight": (8,),
        "factor.weight": (3,),
    }
    own, _ = cut_graph(replace(graph_of("llama2"), blocks=(op,)), RankPlace(1, 2, 16))
    assert own.blocks == (op,), "each rank computes an op that no rule cuts"


def test_the_graph_loads_no_torch() -> None:
    code = "import sys, tokenwright.models.graph; print(sys.modules.get('torch') is not None)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "False"


def test_ops_are_known_in_few_places() -> None:
    """A file that imports an op by name is one that a new op touches: its family and two backends, beside the graph."""
    ops = {one.__name__ for one in (Embed, Attention, MLP, Head)}
    places = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "from tokenwright.models.graph" in (text := path.read_text(encoding="utf-8"))  # parses few of the files
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "tokenwright.models.graph"
        if {alias.name for alias in node.names} & ops
    }
    assert places == {
        "models/combined.py",  # ops that are made of attention and MLPs
        "models/split.py",
        "backends/wgpu/lacking.py",  # without wgpu
        "checkpoints/families/graph_builder.py",
        "checkpoints/families/gemma3n.py",
        "checkpoints/families/gemma.py",
        "checkpoints/families/gemma4.py",  # changes the attention that the builder makes, layer by layer
        "checkpoints/families/gpt2.py",
        "backends/wgpu/cut.py",
        "backends/wgpu/dispatches.py",
        "checkpoints/towers/parts.py",
        "models/tower.py",
        "backends/torch/embedding.py",
        "backends/torch/op_parts.py",
        "backends/torch/ops.py",
        "backends/native/compile.py",
        "explorer/panels/block.py",  # undoes the rotation of a key
    }
