"""Planted faults: each must move the logits by at least 100 times the tolerance, else the oracle tests prove little.

A fault is a wrapper around the runner or the kernels, made here; nothing in the engine knows of it. All runs write
the same forced text, so that only the arithmetic differs. A fault is planted on the kinds where it has a meaning:
a single KV head cannot be mistaken for another, and all rotary positions moved by one are the same positions.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.models.fixtures import KINDS, make_config
from tests.oracle.harness import TOLERANCE, Recorder, Subject, greedy, make_subject, prompt_of, write
from tests.profiles import some
from tokenwright.backends.protocol import Scored
from tokenwright.backends.runner import ModelRunner
from tokenwright.backends.torch import kv_codec
from tokenwright.backends.torch.kernels import Kernels
from tokenwright.backends.torch.op_batch import OpBatch
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.backends.torch.tensor_batch import Batcher
from tokenwright.cache import ChunkRows, KVView
from tokenwright.checkpoints.families.deepseek import DEEPSEEK
from tokenwright.checkpoints.families.family import head_order
from tokenwright.checkpoints.families.registry import parse_config
from tokenwright.config import Learned, ModelConfig, Rope
from tokenwright.config import NoScaling as Unscaled
from tokenwright.engine import Batch
from tokenwright.engine.layer_group import AttentionWindow
from tokenwright.models.combined import Parallel
from tokenwright.models.experts import Experts
from tokenwright.models.graph import MLP, Attention, Graph
from tokenwright.models.latent import LatentAttention
from tokenwright.models.op import Op
from tokenwright.models.recurrent import Recurrent
from tokenwright.models.residual_streams import Correct, Laurel, Merge

PROMPT, NEW, PAGE = 60, 12, 16
PAGES = 5  # as many as a text takes: the second one comes to lie where the first one was
MOVED = 100 * TOLERANCE


class NoMask(ReferenceKernels):
    """A row reads what comes after it, as far as the chunk has it."""

    def weights(self, q, k, positions, start, window, scoring, sink_q=None, ends=None):
        return super().weights(q, k, positions, start + len(q), AttentionWindow(), scoring, sink_q)


class NoWindow(ReferenceKernels):
    """A row reads all that came before it in every layer, as far as an earlier row of its chunk may."""

    def weights(self, q, k, positions, start, window, scoring, sink_q=None, ends=None):
        return super().weights(q, k, positions, start, AttentionWindow(), scoring, sink_q, ends)


class ShortWindow(ReferenceKernels):
    """A window ends one token too early."""

    def weights(self, q, k, positions, start, window, scoring, sink_q=None, ends=None):
        short = replace(window, size=window.size and window.size - 1)
        return super().weights(q, k, positions, start, short, scoring, sink_q, ends)


class NeighbouringHead(ReferenceKernels):
    """Query heads read the KV head after their own."""

    def keys(self, view: KVView, chunk: ChunkRows, scoring: Scored | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        k, positions = super().keys(view, chunk, scoring)
        return k.roll(-1, 1), positions

    def values(self, view: KVView, chunk: ChunkRows) -> torch.Tensor:
        return super().values(view, chunk).roll(-1, 1)


class InterleavedHeads(ReferenceKernels):
    """Query head h reads KV head h % G, where h // (H / G) is right."""

    def attention(self, q, view, chunks, scoring, sink_q=None):
        heads = torch.arange(q.shape[1])
        order = heads.view(-1, view.spec.layout.kv_heads).t().flatten()  # sorted by h % G
        return super().attention(q[:, order], view, chunks, scoring, sink_q)[:, order.argsort()]


class NoScaling(ReferenceKernels):
    def attention(self, q, view, chunks, scoring, sink_q=None):
        return super().attention(q, view, chunks, replace(scoring, scale=1.0), sink_q)


class StalePage(ReferenceKernels):
    """Once armed, one page keeps what a former text left in it."""

    armed = False

    def store(self, view: KVView, slots: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        for part in view.parts:
            places = slots[part.group]
            fresh = places // PAGE != 1 if self.armed else torch.ones_like(places, dtype=torch.bool)
            kv_codec.write(part.k, places[fresh], k[fresh])
            kv_codec.write(part.v, places[fresh], v[fresh])


class Moved:
    """A backend's batcher whose chunks, those whose first position matches, stand one position too late."""

    def __init__(self, batcher: Batcher, when: Callable[[int], bool]) -> None:
        self.batcher, self.when = batcher, when

    def __call__(self, batch: Batch) -> OpBatch:
        chunks = array("q")
        for row, rows, start, limit in batch.each_chunk():
            chunks.extend((row, rows, start + self.when(start), limit))
        anywhere = [array("i", [0]) * 1000 for _ in batch.tables]  # for where they would lie, which is not used
        later = self.batcher(replace(batch, chunks=chunks, tables=anywhere))
        return replace(self.batcher(batch), positions=later.positions, rotations=later.rotations)


def moved_by_one(when: Callable[[int], bool]) -> Callable[[ModelRunner], ModelRunner]:
    def around(runner: ModelRunner) -> ModelRunner:
        runner.backend.batcher = Moved(runner.backend.batcher, when)
        return runner

    return around


def same(runner: ModelRunner) -> ModelRunner:
    return runner


@dataclass(frozen=True)
class Plant:
    kernels: Callable[[], Kernels] = ReferenceKernels
    around: Callable[[ModelRunner], ModelRunner] = same
    means: Callable[[ModelConfig], bool] = field(default=lambda config: True)


def slides(config: ModelConfig) -> bool:
    """Whether the text leaves the window of some layer."""
    return any(window is not None and window < PROMPT + NEW for window in config.windows)


def placed(config: ModelConfig) -> bool:
    """Whether a batch has the positions of its rows, or their rotations."""
    return isinstance(config.positions, Learned) or (isinstance(config.positions, Rope) and any(config.rotary))


FAULTS = {
    "new tokens one position late": Plant(around=moved_by_one(lambda start: start > 0), means=placed),
    "every position late": Plant(
        around=moved_by_one(lambda start: True), means=lambda config: isinstance(config.positions, Learned)
    ),
    "no mask": Plant(NoMask),
    "no window": Plant(NoWindow, means=slides),
    "window too short": Plant(ShortWindow, means=slides),
    "the next KV head": Plant(NeighbouringHead, means=lambda config: config.kv_heads > 1),
    "KV heads interleaved": Plant(InterleavedHeads, means=lambda config: 1 < config.kv_heads < config.heads),
    "no score scaling": Plant(NoScaling),
    "stale page": Plant(StalePage),
}


def moves(subject: Subject, plant: Plant) -> float:
    """The largest change of a logit, over a prompt's rows and those of the tokens written after it."""
    text = prompt_of(PROMPT + NEW, seed=5)  # what is forced
    sampler = Recorder({1: text})
    kernels = plant.kernels()
    engine = subject.engine(sampler, page_size=PAGE, pages=PAGES, kernels=kernels, around=plant.around)
    [former] = write(engine, [greedy(prompt_of(PROMPT + NEW, seed=6), 1)])
    if isinstance(kernels, StalePage):
        kernels.armed = True
    [now] = write(engine, [greedy(text[:PROMPT], NEW, prompt_logprobs=True)])
    assert (former.id, now.id, tuple(now.tokens)) == (0, 1, text)
    theirs = subject.logits(text[:-1], now.limit)
    return max(float((row - theirs[place]).abs().max()) for place, row in sampler.rows[now.id].items())


def config_of(kind: str) -> ModelConfig:
    return parse_config(make_config(kind))[1]


def meaningful() -> list[tuple[str, str]]:
    without = [("mamba2", name) for name in FAULTS]  # no attention
    means = [(kind, name) for kind in KINDS for name, plant in FAULTS.items() if plant.means(config_of(kind))]
    return [one for one in means if one not in without]


@pytest.mark.parametrize(("kind", "fault"), some(meaningful()))
def test_a_planted_fault_moves_the_logits(kind: str, fault: str) -> None:
    assert moves(make_subject(kind), FAULTS[fault]) >= MOVED


def each_block(**changes: object) -> Callable[[Graph], Graph]:
    return lambda graph: replace(graph, blocks=tuple(replace(op, **changes) for op in graph.blocks))


def norms_before(graph: Graph) -> Graph:
    return replace(graph, blocks=tuple(replace(op, norm=op.post_norm, post_norm=None) for op in graph.blocks))


def each_attention(change: Callable[[Attention], Attention]) -> Callable[[Graph], Graph]:
    def changed(op: Op) -> Op:
        if isinstance(op, Parallel):
            return replace(op, attention=change(op.attention))
        return change(op) if isinstance(op, Attention) else op

    return lambda graph: replace(graph, blocks=tuple(map(changed, graph.blocks)))


no_head_norms = each_attention(lambda op: replace(op, q_norm=None, k_norm=None))


def one_after_the_other(graph: Graph) -> Graph:
    pairs = [(op.attention, op.mlp) for op in graph.blocks if isinstance(op, Parallel)]
    return replace(graph, blocks=tuple(op for pair in pairs for op in pair))


def other_activation(graph: Graph) -> Graph:
    blocks = (replace(op, activation="silu") if isinstance(op, MLP) else op for op in graph.blocks)
    return replace(graph, blocks=tuple(blocks))


def each_mixture(routing: Mapping[str, object], **changes: object) -> Callable[[Graph], Graph]:
    def planted(op: Op) -> Op:
        return replace(op, routing=replace(op.routing, **routing), **changes) if isinstance(op, Experts) else op

    return lambda graph: replace(graph, blocks=tuple(map(planted, graph.blocks)))


def each_latent(change: Callable[[LatentAttention], LatentAttention]) -> Callable[[Graph], Graph]:
    def changed(op: Op) -> Op:
        return change(op) if isinstance(op, LatentAttention) else op

    return lambda graph: replace(graph, blocks=tuple(map(changed, graph.blocks)))


def scores_by_size(op: LatentAttention) -> LatentAttention:
    return replace(op, scoring=replace(op.scoring, scale=(op.nope_size + op.rope_size) ** -0.5))


def no_embedding_scale(graph: Graph) -> Graph:
    return replace(graph, embed=replace(graph.embed, scale=1.0))


def global_rotation(graph: Graph) -> Graph:
    """Also of layers that have another one, or none."""
    return each_attention(lambda op: replace(op, rotary=graph.ropes[0]))(graph)


def plainly_rotated(graph: Graph) -> Graph:
    """Without the scaling of full layers' positions."""
    return each_attention(lambda op: replace(op, rotary=replace(op.rotary or Rope(), scaling=Unscaled())))(graph)


def scores_by_the_heads_size(graph: Graph) -> Graph:
    by_size = each_attention(lambda op: replace(op, scoring=replace(op.scoring, scale=op.head_size**-0.5)))
    return by_size(graph)


def each_of(kind: type[Op], **facts: object) -> Callable[[Graph], Graph]:
    return lambda graph: replace(
        graph, blocks=tuple(replace(op, **facts) if isinstance(op, kind) else op for op in graph.blocks)
    )


def each_input(**facts: object) -> Callable[[Graph], Graph]:
    def faulty(graph: Graph) -> Graph:
        ops = (replace(op, inputs=replace(op.inputs, **facts)) if isinstance(op, MLP) else op for op in graph.blocks)
        return replace(graph, blocks=tuple(ops))

    return faulty


def other_streams(graph: Graph) -> Graph:
    """The head's matrices of the streams in another order."""
    *blocks, merge = graph.blocks
    assert isinstance(merge, Merge)
    return replace(graph, blocks=(*blocks, replace(merge, each=merge.each[::-1])))


GRAPH_FAULTS: dict[tuple[str, str], Callable[[Graph], Graph]] = {
    **{(kind, "positions not scaled"): plainly_rotated for kind in ("llama3", "linear", "yarn", "phi3-long")},
    ("gpt2", "another activation"): other_activation,
    ("starcoder2", "another activation"): other_activation,
    ("qwen3", "no norms of q and k"): no_head_norms,
    ("qwen3-moe", "no norms of q and k"): no_head_norms,
    ("smollm3", "all layers rotate"): global_rotation,
    ("phi4-mini", "all of a head turns"): each_attention(lambda op: replace(op, rotary=Rope(10000.0))),
    ("granite", "scores by the head's size"): scores_by_the_heads_size,
    ("granite", "embeddings as stored"): no_embedding_scale,
    ("granite", "residual as computed"): each_block(residual_scale=1.0),
    ("granite", "logits as computed"): lambda graph: replace(graph, head=replace(graph.head, scale=1.0)),
    ("olmo2", "norms before, not after"): norms_before,
    ("olmo2", "no norms of q and k"): no_head_norms,
    ("mixtral", "weights as scored"): each_mixture({"renormalise": False}),
    ("mixtral", "an expert fewer"): each_mixture({"chosen": 1}),
    ("qwen2-moe", "weights that sum to one"): each_mixture({"renormalise": True}),
    ("qwen2-moe", "scores of a sigmoid"): each_mixture({"scores": "sigmoid"}),
    ("qwen2-moe", "no shared expert"): each_mixture({}, shared=None),
    ("qwen2-moe", "the shared expert without its gate"): each_mixture({"shared_gate": False}),
    ("gpt-oss", "weights as scored"): each_mixture({"renormalise": False}),
    ("gpt-oss", "another activation"): each_mixture({}, activation="silu"),
    ("gpt-oss", "positions not scaled"): plainly_rotated,
    ("gpt-oss", "no learned logits"): each_attention(lambda op: replace(op, sink_logits=None)),
    ("qwen3-moe", "an expert more"): each_mixture({"chosen": 4}),
    ("gemma2", "no cap of scores"): each_attention(lambda op: replace(op, scoring=replace(op.scoring, cap=None))),
    ("gemma2", "no cap of logits"): lambda graph: replace(graph, head=replace(graph.head, cap=None)),
    ("gemma2", "scores by the head's size"): scores_by_the_heads_size,
    ("gemma2", "no norms after"): each_block(post_norm=None),
    ("gemma2", "no norms before"): each_block(norm=None),
    ("gemma2", "embeddings as stored"): no_embedding_scale,
    ("gemma2", "another activation"): other_activation,
    ("gemma3", "one rotation in all layers"): global_rotation,
    ("gemma3", "positions not scaled"): plainly_rotated,
    ("gemma3", "no norms of q and k"): no_head_norms,
    ("olmoe", "q, k and v as computed"): each_of(Attention, clip=None),
    ("gemma3n", "gates as computed"): each_of(MLP, deviations=None),
    ("gemma3n", "what the inputs read without factors"): each_of(Correct, scale=None),
    ("gemma3n", "twice the low-rank addition"): each_of(Laurel, factor=1.0),
    ("gemma3n", "streams for one another"): other_streams,
    ("gemma4", "values without a norm"): each_of(Attention, v_norm=None),
    ("gemma4", "residual stream without a factor"): each_of(MLP, stream=None),
    ("gemma4", "inputs of the first layer in all"): each_input(at=0),
    ("gemma4", "frequencies of a smaller head"): each_attention(
        lambda op: replace(op, rotary=op.rotary and replace(op.rotary, spread=None))
    ),
    ("cohere", "one after the other"): one_after_the_other,
    ("cohere", "logits as computed"): lambda graph: replace(graph, head=replace(graph.head, scale=1.0)),
    ("cohere-norms", "no norms of q and k"): no_head_norms,
    ("cohere2", "one after the other"): one_after_the_other,
    ("cohere2", "all layers rotate"): global_rotation,
    ("exaone4", "all layers rotate"): global_rotation,
    ("exaone4", "norms before, not after"): norms_before,
    ("olmo3", "one rotation in all layers"): global_rotation,
    ("neox", "one after the other"): one_after_the_other,
    ("neox", "all of a head turns"): each_attention(lambda op: replace(op, rotary=Rope(10000.0))),
    ("deepseek2", "scores by the head's size"): each_latent(scores_by_size),
    ("deepseek2", "positions not scaled"): each_latent(lambda op: replace(op, rotary=Rope())),
    ("deepseek2", "weights that sum to one"): each_mixture({"renormalise": True}),
    ("deepseek2", "no shared expert"): each_mixture({}, shared=None),
    ("deepseek3", "no norm of q's latent"): each_latent(lambda op: replace(op, q_norm=None)),
    ("deepseek3", "no correction of ranks"): each_mixture({}, correction=None),
    ("deepseek3", "experts of all groups"): each_mixture({"groups": 1}),
    ("deepseek3", "groups by their best alone"): each_mixture({"group_best": 1}),
    ("deepseek3", "weights as scored"): each_mixture({"factor": 1.0}),
    ("glm4", "no norms after"): each_block(post_norm=None),
    ("glm4", "all of a head turns"): each_attention(lambda op: replace(op, rotary=Rope(10000.0))),
    ("falcon-h1", "one after the other"): each_of(Recurrent, beside=False),
    ("falcon-h1", "rows as projected"): each_of(Recurrent, factors=()),
    ("falcon-h1", "gates as projected"): each_of(MLP, factors=()),
}


@pytest.mark.parametrize("named", some(list(GRAPH_FAULTS)), ids=", ".join)
def test_a_fact_missing_from_the_graph_moves_the_logits(named: tuple[str, str]) -> None:
    subject = make_subject(named[0])
    assert moves(replace(subject, graph=GRAPH_FAULTS[named](subject.graph)), Plant()) >= MOVED


@pytest.mark.parametrize("kind", ["cohere", "glm4", "ernie"])
def test_neighbours_taken_for_halves_move_the_logits(kind: str) -> None:
    """The rows of q and k as the file has them: as if it turned the halves of a head."""
    subject = make_subject(kind)
    size = subject.config.head_size
    back = torch.tensor(rows_of(subject.config)).argsort()
    stored = {
        name: weight.unflatten(0, (-1, size))[:, back].flatten(0, 1) if name.split(".")[-2] in ("q", "k") else weight
        for name, weight in subject.weights.items()
    }
    assert moves(replace(subject, weights=stored), Plant()) >= MOVED


@pytest.mark.parametrize("part", ["q_b", "kv_a"])
def test_neighbours_of_a_latent_taken_for_halves_move_the_logits(part: str) -> None:
    subject = make_subject("deepseek3")
    assert DEEPSEEK.orders is not None
    order = DEEPSEEK.orders(part, subject.graph)
    assert order is not None
    back = torch.tensor(order.rows).argsort()
    stored = {
        name: w.unflatten(0, (-1, order.block))[:, back].flatten(0, 1) if f".{part}." in name else w
        for name, w in subject.weights.items()
    }
    assert moves(replace(subject, weights=stored), Plant()) >= MOVED


def rows_of(config: ModelConfig) -> tuple[int, ...]:
    assert isinstance(config.positions, Rope)
    order = head_order(config.head_size, config.positions.rotated or config.head_size, neighbours=True)
    assert order is not None
    return order.rows


@pytest.mark.parametrize("missing", ["norm.weight", "attention_norm.weight", "attention.k_norm.weight"])
def test_a_norm_without_its_one_moves_the_logits(missing: str) -> None:
    subject = make_subject("gemma3")
    weights = {
        name: w - 1 if name.endswith(f".{missing}") or name == missing else w for name, w in subject.weights.items()
    }
    assert moves(replace(subject, weights=weights), Plant()) >= MOVED


def test_norms_with_the_weights_of_the_neighbouring_head_move_the_logits() -> None:
    subject = make_subject("cohere-norms")
    size = subject.config.head_size
    weights = {name: w.roll(size) if "q_norm" in name else w for name, w in subject.weights.items()}
    assert moves(replace(subject, weights=weights), Plant()) >= MOVED


def test_gate_and_up_of_a_fused_projection_cannot_be_mistaken() -> None:
    subject = make_subject("phi3")
    turned = {"gate": "up", "up": "gate"}
    swapped = {
        ".".join(turned.get(part, part) for part in name.split(".")): weight for name, weight in subject.weights.items()
    }
    assert moves(replace(subject, weights=swapped), Plant()) >= MOVED


@pytest.mark.parametrize("kind", some(list(KINDS)))
def test_without_a_fault_they_stay(kind: str) -> None:
    """The same measurement, nothing planted; and rotary positions that are all late, for only distances count."""
    assert moves(make_subject(kind), Plant()) <= TOLERANCE
    if isinstance(config_of(kind).positions, Rope):
        assert moves(make_subject(kind), Plant(around=moved_by_one(lambda start: True))) <= TOLERANCE
