"""Every reference kernel against the definition, written as plain loops in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenwright.cache import Full, Heads, KVView, LayerSpec, Window
from tokenwright.kernels import Kernels, Linear, ReferenceKernels, Rotation, Span

KERNELS: Kernels = ReferenceKernels()
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(ours: torch.Tensor, right: list[list[float]] | torch.Tensor) -> None:
    wide = torch.as_tensor(right, dtype=torch.float64)
    assert ours.shape == wide.shape
    close = CLOSE[ours.dtype]
    torch.testing.assert_close(ours.double(), wide, rtol=close, atol=close)


@pytest.fixture(params=CLOSE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype: torch.dtype, bias: bool) -> None:
    x, weight = noise(3, 5).to(dtype), noise(4, 5, seed=1).to(dtype)
    b = noise(4, seed=2).to(dtype) if bias else None
    right = [
        [sum(float(x[t, i]) * float(weight[o, i]) for i in range(5)) + (float(b[o]) if bias else 0.0) for o in range(4)]
        for t in range(3)
    ]
    near(KERNELS.linear(x, Linear(weight, b)), right)


def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight, eps = 3 * noise(2, 3, 8).to(dtype), noise(8, seed=1).to(dtype), 1e-3
    right = torch.empty(2, 3, 8, dtype=torch.float64)
    for i in range(2):
        for j in range(3):
            mean = sum(float(value) ** 2 for value in x[i, j]) / 8
            for d in range(8):
                right[i, j, d] = float(x[i, j, d]) / math.sqrt(mean + eps) * float(weight[d])
    near(KERNELS.rms_norm(x, weight, eps), right)


def test_rms_norm_of_large_numbers_does_not_overflow() -> None:
    x = torch.full((1, 4), 1000.0, dtype=torch.float16)  # its square is beyond fp16
    assert torch.equal(KERNELS.rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_layer_norm(dtype: torch.dtype) -> None:
    x, weight, bias, eps = noise(3, 8).to(dtype), noise(8, seed=1).to(dtype), noise(8, seed=2).to(dtype), 1e-3
    right = []
    for row in x.double().tolist():
        mean = sum(row) / 8
        variance = sum((value - mean) ** 2 for value in row) / 8
        scaled = [(value - mean) / math.sqrt(variance + eps) for value in row]
        right.append([s * w + b for s, w, b in zip(scaled, weight.tolist(), bias.tolist(), strict=True)])
    near(KERNELS.layer_norm(x, weight, bias, eps), right)


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    x = 3 * noise(4, 10).to(dtype)
    act = ACTIVATIONS[name]
    near(KERNELS.activate(x, name), [[act(value) for value in row] for row in x.tolist()])
    gates, values = x[:, :5].tolist(), x[:, 5:].tolist()
    right = [[act(g) * v for g, v in zip(*pair, strict=True)] for pair in zip(gates, values, strict=True)]
    near(KERNELS.gated(x, name), right)


def test_the_two_gelus_are_told_apart() -> None:
    x = torch.tensor([[-2.0]])
    assert (KERNELS.activate(x, "gelu") - KERNELS.activate(x, "gelu_tanh")).abs() > 5e-5


def test_rotate(dtype: torch.dtype) -> None:
    """Dimension d is paired with d + D / 2: (a, b) -> (a cos - b sin, b cos + a sin)."""
    x, angles = noise(3, 2, 6).to(dtype), 5 * noise(3, 3, seed=1).double()
    both = torch.cat((angles, angles), -1)
    right = torch.empty(3, 2, 6, dtype=torch.float64)
    for t in range(3):
        for head in range(2):
            for d in range(3):
                a, b, angle = float(x[t, head, d]), float(x[t, head, d + 3]), float(angles[t, d])
                right[t, head, d] = a * math.cos(angle) - b * math.sin(angle)
                right[t, head, d + 3] = b * math.cos(angle) + a * math.sin(angle)
    near(KERNELS.rotate(x, Rotation(both.cos().float(), both.sin().float())), right)


def view_of(pages: int, page_size: int, kv_heads: int, size: int, window: int | None, dtype: torch.dtype) -> KVView:
    """Memory full of NaN: what is read must have been written."""
    reach = Full() if window is None else Window(window)
    memory = torch.full((2, pages, page_size, kv_heads, size), math.nan, dtype=dtype)
    return KVView(LayerSpec(Heads(kv_heads, size), reach, "float32"), memory[0], memory[1])


def test_store_writes_the_named_slots_and_no_others(dtype: torch.dtype) -> None:
    view = view_of(4, 3, 2, 5, None, dtype)
    k, v = noise(3, 2, 5).to(dtype), noise(3, 2, 5, seed=1).to(dtype)
    KERNELS.store(view, torch.tensor([7, 0, 8]), k, v)
    for row, (page, slot) in enumerate([(2, 1), (0, 0), (2, 2)]):
        assert torch.equal(view.k[page, slot], k[row])
        assert torch.equal(view.v[page, slot], v[row])
    assert int(view.k.isnan().any(-1).any(-1).sum()) == int(view.v.isnan().any(-1).any(-1).sum()) == 12 - 3


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int, window: int | None, scale: float
) -> list[float]:
    """One query [D] at position `at` over keys and values [t, D], by the definition."""
    first = 0 if window is None else max(0, at - window + 1)
    scores = [scale * float(q.double() @ k[j].double()) for j in range(first, at + 1)]
    shares = [math.exp(score - max(scores)) for score in scores]
    return [
        sum(share * float(v[j, d]) for j, share in enumerate(shares, first)) / sum(shares) for d in range(v.shape[1])
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]),
    window=st.sampled_from([None, 1, 2, 5, 40]),
    seed=st.integers(0, 1000),
)
def test_attention_over_scattered_pages(
    lengths: list[tuple[int, int]], page_size: int, heads: tuple[int, int], window: int | None, seed: int
) -> None:
    """Several sequences, each with some tokens in the cache and a chunk of new ones, on pages in any order."""
    size, scale = 4, 0.7
    (queries, kv_heads), new = heads, sum(n for _, n in lengths)
    counts = [-(-(start + n) // page_size) for start, n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).split([*counts, 2])
    view = view_of(sum(counts) + 2, page_size, kv_heads, size, window, torch.float32)
    q = 2 * noise(new, queries, size, seed=seed)
    right = torch.empty(new, queries, size, dtype=torch.float64)
    spans: list[Span] = []
    row = 0
    for number, ((start, n), pages) in enumerate(zip(lengths, order, strict=False)):
        k, v = (noise(start + n, kv_heads, size, seed=seed + 10 * number + i) for i in (1, 2))
        places = torch.arange(start + n)
        KERNELS.store(view, pages[places // page_size] * page_size + places % page_size, k, v)
        spans.append(Span(range(row, row + n), start, pages))
        for i in range(n):
            for head in range(queries):
                mine = head // (queries // kv_heads)
                right[row + i, head] = torch.tensor(
                    attended(q[row + i, head], k[:, mine], v[:, mine], start + i, window, scale)
                )
        row += n
    near(KERNELS.attention(q, view, spans, scale), right)


@pytest.mark.parametrize("most", [1, 60, 100])
def test_a_long_chunk_is_computed_in_blocks_of_rows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(4, 4, 2, 4, 5, torch.float32)
    KERNELS.store(view, torch.arange(16), noise(16, 2, 4), noise(16, 2, 4, seed=1))
    q, spans = noise(13, 4, 4, seed=2), [Span(range(13), 3, torch.arange(4))]
    whole = KERNELS.attention(q, view, spans, 0.5)
    monkeypatch.setattr("tokenwright.kernels.reference.MOST_WEIGHTS", most)
    torch.testing.assert_close(KERNELS.attention(q, view, spans, 0.5), whole)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
def test_the_mask_of_a_chunk(window: int | None) -> None:
    """Weights are positive where the naive loop attends, zero elsewhere, and sum to one."""
    start, n, kv_heads = 4, 3, 2
    view = view_of(1, 8, kv_heads, 4, window, torch.float32)
    weights = ReferenceKernels().weights(noise(n, 4, 4), noise(7, kv_heads, 4, seed=1), start, view, 0.5)
    assert weights.shape == (kv_heads, 2, n, start + n)
    for i in range(n):
        for j in range(start + n):
            seen = j <= start + i and (window is None or start + i - j < window)
            assert bool((weights[:, :, i, j] > 0).all()) is seen
            assert bool((weights[:, :, i, j] == 0).all()) is not seen
    torch.testing.assert_close(weights.sum(-1), torch.ones(kv_heads, 2, n))


def test_attention_keeps_the_dtype_and_sums_in_fp32(dtype: torch.dtype) -> None:
    """300 equal keys: the mean of the values, which a sum in bf16 would miss by far."""
    view = view_of(1, 300, 1, 2, None, dtype)
    v = (1 + noise(300, 1, 2, seed=1) / 100).to(dtype)
    KERNELS.store(view, torch.arange(300), torch.ones(300, 1, 2, dtype=dtype), v)
    out = KERNELS.attention(torch.ones(1, 1, 2, dtype=dtype), view, [Span(range(1), 299, torch.tensor([0]))], 1.0)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out[0].double(), v.double().mean(0), rtol=2 ** (-8 if dtype == torch.bfloat16 else -11), atol=0
    )
