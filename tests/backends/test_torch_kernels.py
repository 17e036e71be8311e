"""Every reference kernel against the definition, written as plain loops in float64."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.poison import poison
from tests.profiles import examples
from tests.tensors import decode, encode, kv_memory
from tokenwright.backends.protocol import Scored as Scoring
from tokenwright.backends.torch.kernels import Dense, Kernels
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.cache import ChunkRows, Heads, KVStore, LayerSpec
from tokenwright.cache.codec import CODECS, Codec
from tokenwright.engine.layer_group import AttentionWindow, PageTable
from tokenwright.models.rotary import Rotation

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
    near(KERNELS.linear(x, Dense(weight, b)), right)


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
    "relu2": lambda x: max(x, 0.0) ** 2,
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


CPU = torch.device("cpu")
FULL = AttentionWindow()
SIZE = 34  # of a head: a whole group of a codec and a bit


def spec_of(
    heads: Heads, window: AttentionWindow = FULL, k: str = "float32", v: str = "float32", first: int = 0
) -> LayerSpec:
    return LayerSpec(heads, window, CODECS[k], CODECS[v], first, native=CODECS["float32"])


def store_of(spec: LayerSpec, pages: int, page_size: int) -> KVStore:
    """Memory of one layer, full of NaN: what is read must have been written."""
    store = KVStore([spec], pages, page_size)
    poison(store)
    return store


def fill(store: KVStore, tables: Sequence[PageTable], k: torch.Tensor, v: torch.Tensor) -> None:
    """Store K and V [t, G, D] of the first t positions of a text."""
    slots = [store.slots(group, table.pages, range(len(k))) for group, table in enumerate(tables)]
    KERNELS.store(store.view(0), slots, k, v)


def test_store_writes_the_named_slots_and_no_others(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    store = store_of(spec_of(Heads(2, 5), k=name, v=name), 4, 3)
    k, v = noise(3, 2, 5).to(dtype), noise(3, 2, 5, seed=1).to(dtype)
    KERNELS.store(store.view(0), [torch.tensor([7, 0, 8])], k, v)
    for memory, rows in zip(kv_memory(store, 0), (k, v), strict=True):
        for row, (page, slot) in enumerate([(2, 1), (0, 0), (2, 2)]):
            assert torch.equal(memory[0, page, slot], rows[row])
        assert int(memory.isnan().any(-1).any(-1).sum()) == 15 - 3


def attended(
    q: torch.Tensor, sink_q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int, window: AttentionWindow
) -> list[float]:
    """One query [D] at position `at` over keys and values [t, D], by the definition; a score is 0.7 q k."""
    size = at + 1 if window.size is None else window.size
    read = [j for j in range(at + 1) if j < window.sinks or at - j < size]
    scores = [0.7 * float((sink_q if j < window.sinks else q).double() @ k[j]) for j in read]
    shares = [math.exp(score - max(scores)) for score in scores]
    mixed = sum(share * v[j].double() for j, share in zip(read, shares, strict=True))
    return (mixed / sum(shares)).tolist()


def kept(x: torch.Tensor, codec: Codec, first: int) -> torch.Tensor:
    """Rows [t, G, D] as they come back: the `first` as they were."""
    rest = decode(codec, encode(codec, x[first:]), SIZE, torch.float64)
    return torch.cat((x[:first].double(), rest))


REACHES = st.builds(AttentionWindow, st.sampled_from([None, 1, 2, 5, 12, 40]), st.sampled_from([0, 0, 1, 3, 6])).filter(
    lambda window: window.size is not None or not window.sinks
)


@examples(150)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]),
    window=REACHES,
    codecs=st.tuples(st.sampled_from(sorted(CODECS)), st.sampled_from(sorted(CODECS))),
    first=st.sampled_from([0, 0, 1, 4, 9, 100]),
    wide=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_attention_over_scattered_pages(
    lengths: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    window: AttentionWindow,
    codecs: tuple[str, str],
    first: int,
    wide: torch.dtype,
    seed: int,
) -> None:
    """Several sequences, each with some tokens in the cache and a chunk of new ones, on pages in any order.

    Of a sequence that is read nothing is there but the pages that its new rows read.
    """
    (queries, kv_heads), new = heads, sum(n for _, n in lengths)
    spec = spec_of(Heads(kv_heads, SIZE), window, *codecs, first)
    counts = [-(-(start + n) // page_size) for start, n in lengths]
    store = store_of(spec, sum(counts) + 2, page_size)
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(sum(counts) + 2, generator=random).split([*counts, 2]) for _ in store.groups]
    q, sink_q = (2 * noise(new, queries, SIZE, seed=seed + i) / SIZE**0.5 for i in (0, 5000))
    right = torch.empty(new, queries, SIZE, dtype=torch.float64)
    chunks: list[ChunkRows] = []
    row = 0
    for number, (start, n) in enumerate(lengths):
        tables = [PageTable(dict(enumerate(order[number].tolist()))) for order in orders]
        k, v = (noise(start + n, kv_heads, SIZE, seed=seed + 10 * number + i) for i in (1, 2))
        fill(store, tables, k, v)
        for group, table in zip(store.groups, tables, strict=True):
            needed = {page for pages in group.window.pages(start, start + n, page_size) for page in pages}
            for page in table.keys() - needed:
                del table[page]
        chunks.append(store.chunk_rows([table.pages for table in tables], range(row, row + n), start))
        k, v = kept(k, spec.k, first), kept(v, spec.v, first)
        for i in range(n):
            for head in range(queries):
                mine, at = head // (queries // kv_heads), row + i
                args = q[at, head], sink_q[at, head], k[:, mine], v[:, mine], start + i, window
                right[at, head] = torch.tensor(attended(*args), dtype=torch.float64)
        row += n
    kernels = ReferenceKernels(wide)
    near(kernels.attention(q, store.view(0), chunks, Scoring(0.7), sink_q if window.sinks else None), right)


@pytest.mark.parametrize("most", [1, 60, 100])
def test_a_long_chunk_is_computed_in_blocks_of_rows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(spec_of(Heads(2, 4), AttentionWindow(5, 2)), 4, 4)
    table = PageTable({page: page for page in range(4)})
    fill(store, [table], noise(16, 2, 4), noise(16, 2, 4, seed=1))
    q, sink_q = noise(13, 4, 4, seed=2), noise(13, 4, 4, seed=3)
    chunks = [store.chunk_rows([table.pages], range(13), 3)]
    whole = KERNELS.attention(q, store.view(0), chunks, Scoring(0.5), sink_q)
    monkeypatch.setattr("tokenwright.backends.torch.reference_kernels.MOST_WEIGHTS", most)
    torch.testing.assert_close(KERNELS.attention(q, store.view(0), chunks, Scoring(0.5), sink_q), whole)


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
def test_the_mask_of_a_chunk(window: int | None, sinks: int) -> None:
    """Weights are positive where the naive loop attends, zero elsewhere, and sum to one."""
    start, n, kv_heads = 4, 3, 2
    q, k, positions = noise(n, 4, 4), noise(7, kv_heads, 4, seed=1), torch.arange(7)
    weights = ReferenceKernels().weights(q, k, positions, start, AttentionWindow(window, sinks), Scoring(0.5))
    assert weights.shape == (kv_heads, 2, n, start + n)
    for i in range(n):
        for j in range(start + n):
            seen = j <= start + i and (window is None or j < sinks or start + i - j < window)
            assert bool((weights[:, :, i, j] > 0).all()) is seen
            assert bool((weights[:, :, i, j] == 0).all()) is not seen
    torch.testing.assert_close(weights.sum(-1), torch.ones(kv_heads, 2, n))


def test_attention_keeps_the_dtype_and_sums_in_fp32(dtype: torch.dtype) -> None:
    """300 equal keys: the mean of the values, which a sum in bf16 would miss by far."""
    name = str(dtype).removeprefix("torch.")
    store = store_of(spec_of(Heads(1, 2), k=name, v=name), 1, 300)
    v = (1 + noise(300, 1, 2, seed=1) / 100).to(dtype)
    table = PageTable({0: 0})
    fill(store, [table], torch.ones(300, 1, 2, dtype=dtype), v)
    chunk = store.chunk_rows([table.pages], range(1), 299)
    out = KERNELS.attention(torch.ones(1, 1, 2, dtype=dtype), store.view(0), [chunk], Scoring(1.0))
    assert out.dtype == dtype
    torch.testing.assert_close(
        out[0].double(), v.double().mean(0), rtol=2 ** (-8 if dtype == torch.bfloat16 else -11), atol=0
    )


WIDE = ReferenceKernels(torch.float64)


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What sums in fp64 give: the exact value, rounded once."""
    return exact.to(dtype)


def test_wide_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """To the bit, where sums in fp32 miss by roundings."""
    x, weight, bias = noise(5, 300).to(dtype), noise(40, 300, seed=1).to(dtype), noise(40, seed=2).to(dtype)
    wide = x.double()
    product = Dense(weight, bias)
    assert torch.equal(WIDE.linear(x, product), rounded(wide @ weight.double().T + bias.double(), dtype))
    scaled = rounded(wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(), dtype)
    assert torch.equal(WIDE.rms_norm(x, weight[0], 1e-5), weight[0] * scaled)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (wide.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    layered = rounded(normed * weight[0].double() + weight[1].double(), dtype)
    assert torch.equal(WIDE.layer_norm(x, weight[0], weight[1], 1e-5), layered)
    assert torch.equal(WIDE.activate(x, "silu"), rounded(wide / (1 + (-wide).exp()), dtype))
    gates, values = x.chunk(2, -1)
    assert torch.equal(WIDE.gated(x, "silu"), WIDE.activate(gates, "silu") * values)
    heads, angles = x[:, :30].view(5, 3, 10), noise(5, 10, seed=3)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = heads.double() * cos + torch.cat((-heads[..., 5:], heads[..., :5]), -1).double() * sin
    assert torch.equal(WIDE.rotate(heads, Rotation(cos[:, 0], sin[:, 0])), rounded(turned, dtype))


def test_what_is_not_wide_is_left_as_it_is() -> None:
    """The default sums in fp32: its results are torch's own, to the bit."""
    x, weight = noise(5, 300), noise(40, 300, seed=1)
    assert torch.equal(KERNELS.linear(x, Dense(weight)), torch.nn.functional.linear(x, weight))
    assert not torch.equal(KERNELS.linear(x, Dense(weight)), WIDE.linear(x, Dense(weight)))
    assert torch.equal(KERNELS.activate(x, "silu"), torch.nn.functional.silu(x))
    with pytest.raises(AssertionError, match="at least fp32"):
        ReferenceKernels(torch.bfloat16)


@pytest.mark.parametrize("codec", ["float32", "int8", "int4"])
def test_a_wide_row_does_not_depend_on_its_neighbours(codec: str) -> None:
    """One row of a chunk, alone and among the others, to the bit; sums in fp32 would differ here."""
    store = store_of(spec_of(Heads(2, SIZE), AttentionWindow(20, 3), codec, codec, 5), 8, 16)
    tables = [PageTable({page: page for page in range(8)})] * len(store.groups)
    fill(store, tables, noise(100, 2, SIZE), noise(100, 2, SIZE, seed=1))
    q, sink_q = noise(60, 4, SIZE, seed=2), noise(60, 4, SIZE, seed=3)

    def over(first: int, stop: int) -> torch.Tensor:
        chunk = store.chunk_rows([table.pages for table in tables], range(stop - first), 40 + first)
        return WIDE.attention(q[first:stop], store.view(0), [chunk], Scoring(0.3), sink_q[first:stop])

    assert torch.equal(over(0, 60), torch.cat([over(i, i + 1) for i in range(60)]))
