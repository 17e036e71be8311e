"""Mixtures of experts with the native kernels: the same bits in any company, from the chosen experts alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.native import KERNELS, each_isa, needs_native, noise, threads
from tests.backends.test_program import Bench, decoder
from tests.oracle.harness import prompt_of
from tests.profiles import examples
from tests.tensors import op_by_op
from tokenwright.backends.layout import Weights
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.engine import Step, flatten
from tokenwright.models.experts import Experts, Routing
from tokenwright.models.taps import Site

KINDS = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek3")
WEIGHTS = ("float32", "bfloat16", "float16", "int8", "int4")
KEPT = {"native": ("native", None, 0), "int8": ("int8", None, 0), "int4": ("int4", 20, 4)}

pytestmark = needs_native


@each_isa
@pytest.mark.parametrize(("weights", "kind"), [(form, KINDS[i]) for i, form in enumerate(WEIGHTS)])
def test_a_row_has_the_same_bits_alone_and_beside_others(isa: str, weights: str, kind: str) -> None:
    """Alone token by token; and all texts together in one step, where an expert gets from one to a hundred rows."""
    kept = list(KEPT.values())[WEIGHTS.index(weights) % 3]
    made = decoder(kind, weights, isa)
    texts = [prompt_of(length, seed) for seed, length in enumerate((1, 37, 60, 5, 70, 18))]
    company = Bench(made, kept)
    with threads(2):
        together = company.whole([company.chunk(i, text, 0, len(text)) for i, text in enumerate(texts)]).rows
    alone = []
    for i, text in enumerate(texts):
        bench = Bench(made, kept)
        with threads(1):
            alone += [bench.whole([bench.chunk(i, text, at, at + 1)]).rows for at in range(len(text))]
    assert torch.equal(together, torch.cat(alone))


def chosen_in(bench: Bench, text: tuple[int, ...]) -> dict[int, set[int]]:
    """The experts that the text's last token chooses in each layer, seen op by op."""
    found: dict[int, set[int]] = {}
    decoder = bench.backend.decoder.over_arrays
    ops = [op for op in decoder.blocks if hasattr(op, "routing")]
    for op in ops:
        plain = op.kernels

        class Watching:
            def __getattr__(self, name: str, plain: object = plain) -> object:
                return getattr(plain, name)

            def route(self, logits, routing, correction, plain=plain, layer=op.layer):
                ids, weights = plain.route(logits, routing, correction)
                found[layer] = set(ids[-1].tolist())
                return ids, weights

        op.kernels = Watching()
    try:
        bench.by_parts([bench.chunk(9, text, len(text) - 1, len(text))])
    finally:
        for op in ops:
            op.kernels = decoder.kernels
    return found


def experts_of(weights: Weights, op: Experts) -> Iterator[tuple[int, Packed]]:
    for name in (op.up.name, op.down.name):
        packed = weights[name]
        assert isinstance(packed, Packed)
        yield from enumerate(packed.split(op.routing.experts))


@each_isa
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_computes_with_the_chosen_experts_alone(isa: str, kind: str) -> None:
    """The others' weights become NaN, which nothing survives that is multiplied with them."""
    made = decoder(kind, "float32", isa)
    text = prompt_of(9, seed=3)
    one, other, third = (Bench(made, KEPT["native"]) for _ in range(3))
    for bench in (one, other, third):
        bench.whole([bench.chunk(9, text, 0, len(text) - 1)])
    right = one.whole([one.chunk(9, text, len(text) - 1, len(text))]).rows
    chosen = chosen_in(other, text)
    ops = {op.layer: op for op in made.graph.blocks if isinstance(op, Experts)}
    assert chosen.keys() == ops.keys()
    kept = [(part, part.codes.copy()) for op in ops.values() for _, part in experts_of(made.native._weights, op)]
    try:
        for layer, op in ops.items():
            for expert, part in experts_of(made.native._weights, op):
                if expert not in chosen[layer]:
                    part.codes.fill(255)
        step = [third.chunk(9, text, len(text) - 1, len(text))]
        assert torch.equal(third.whole(step).rows, right)
        for layer, op in ops.items():
            next(part for expert, part in experts_of(made.native._weights, op) if expert in chosen[layer]).codes[:] = (
                255
            )
        assert third.whole(step).rows.isnan().all(), "a chosen one is read"
    finally:
        for part, codes in kept:
            part.codes[:] = codes


@each_isa
@examples(100)
@given(
    count=st.integers(1, 5),
    experts=st.integers(1, 40),
    chosen=st.integers(1, 40),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    renormalise=st.booleans(),
    gate=st.booleans(),
    groups=st.sampled_from([(1, 1, 1), (4, 2, 1), (4, 1, 2), (8, 5, 2)]),
    corrected=st.booleans(),
    steps=st.sampled_from([0, 2]),
    seed=st.integers(0, 10**6),
)
def test_the_choice_is_the_references(
    isa: str,
    count: int,
    experts: int,
    chosen: int,
    scores: str,
    renormalise: bool,
    gate: bool,
    groups: tuple[int, int, int],
    corrected: bool,
    steps: int,
    seed: int,
) -> None:
    """Rounded logits have many equals, of which the lowest numbers are chosen."""
    most, top, best = groups
    experts = experts if most == 1 else most * (1 + experts // most + best)
    factor = 2.5 if corrected else 1.0
    routing = Routing(experts, min(chosen, experts // most * top), scores, renormalise, gate, *groups, factor)
    logits = 2 * noise(count, experts + gate, seed=seed)
    logits = logits if not steps else (logits * steps).round() / steps
    correction = (2 * noise(experts, seed=seed + 1)).round() / 4 if corrected else None
    ids, weights = KERNELS[isa].route(logits, routing, correction)
    right_ids, right = ReferenceKernels().route(logits, routing, correction)
    assert torch.equal(ids, right_ids)
    torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-7)


@each_isa
def test_a_choice_among_values_that_are_no_numbers_is_still_one(isa: str) -> None:
    """A row of NaN chooses as many different experts as any other: no memory beyond the weights is read."""
    logits = torch.full((2, 12), float("nan"))
    logits[1, ::3] = 1.0
    for routing in (Routing(12, 5), Routing(12, 5, groups=4, chosen_groups=2, group_best=2)):
        ids, _ = KERNELS[isa].route(logits, routing, torch.zeros(12))
        assert [len(set(row)) for row in ids.tolist()] == [5, 5]
        assert ids.min() >= 0 and ids.max() < 12


def test_op_by_op_each_layer_is_seen_and_a_shared_expert_is_met_by_all() -> None:
    made = decoder("qwen2-moe", "float32", next(iter(KERNELS)))
    bench = Bench(made, KEPT["native"])
    text = prompt_of(7, seed=4)
    seen: list[tuple[Site, int]] = []
    batch = flatten(Step((bench.chunk(0, text, 0, 7),)))
    op_by_op(bench.backend, batch, lambda site, layer, x: seen.append((site, layer)))
    assert [layer for site, layer in seen if site is Site.MLP] == [0, 1, 2]
    [op, *_] = [op for op in made.graph.blocks if isinstance(op, Experts)]
    assert op.shared is not None
    assert replace(op, shared=None).multiplied == op.multiplied - 3 * 64 * 72
