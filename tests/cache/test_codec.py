"""Every codec: its bytes, how near it comes, and that it hides nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensors import decode, encode
from tokenwright.backends.torch.border import TORCH_DTYPES, torch_dtype
from tokenwright.cache.codec import CODECS, GROUP, LEVEL_DIVISORS, LEVELS, Codec
from tokenwright.formats import KV_NAMES

SCALED = [CODECS["int8"], CODECS["int4"]]
QUANTISED = [*SCALED, CODECS["fp8"]]
INT8, INT4 = SCALED
STEP = 2**-24  # the smallest float16


@pytest.fixture(params=CODECS.values(), ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def back(codec: Codec, x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return decode(codec, encode(codec, x), x.shape[-1], dtype)


def test_the_names_are_those_that_can_be_asked_for() -> None:
    assert {"native", *CODECS} == set(KV_NAMES)
    assert all(codec.name == name for name, codec in CODECS.items())


def test_bytes_are_those_of_the_parts(codec: Codec) -> None:
    for count in range(1, 201):
        parts = encode(codec, noise(2, 3, count))
        assert [(part.dtype, tuple(part.shape)) for part in parts] == [
            (torch_dtype(dtype), (2, 3, length)) for dtype, length in codec.parts(count)
        ]
        assert sum(part.nbytes for part in parts) == 6 * codec.nbytes(count)


def test_the_bytes_of_a_head() -> None:
    sizes = {name: codec.nbytes(80) for name, codec in CODECS.items()}
    assert sizes == {"float32": 320, "bfloat16": 160, "float16": 160, "int8": 86, "int4": 46, "fp8": 80}


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_native_is_what_the_dtype_is(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    x = noise(4, 7)
    assert torch.equal(back(CODECS[name], x), x.to(dtype).double())
    stored = x.to(dtype)
    [part] = encode(CODECS[name], stored)
    assert part is stored, "nothing is converted"
    assert decode(CODECS[name], (part,), 7, dtype).data_ptr() == part.data_ptr()


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=100),
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=100),
    st.lists(st.floats(-(2**-20), 2**-20, width=32), min_size=1, max_size=100),
)


@given(row=ROWS)
def test_a_number_comes_back_within_half_a_step(row: list[float]) -> None:
    """Beside half a step there are the scale's own rounding, to the nearest float16, and what is out of its range."""
    got = back(INT8, torch.tensor(row)).tolist()
    for first in range(0, len(row), GROUP):
        group = row[first : first + GROUP]
        largest = max(map(abs, group))
        step = min(largest / 127, 65504.0)  # before it is rounded to float16
        rounding = 127 * max(step * 2**-11, STEP / 2)
        beyond = max(0.0, largest - 127 * step)
        for x, y in zip(group, got[first:], strict=False):
            assert abs(x - y) <= (step / 2 + rounding) * (1 + 1e-6) + beyond
            assert math.isfinite(y)


def test_codes_are_the_nearest() -> None:
    """By hand: steps of 1, of 1/2, and a short last group with steps of 4."""
    x = torch.zeros(2 * GROUP + 3)
    x[0], x[1], x[2], x[3] = 127, 2.4, -3.6, 0.4
    x[GROUP], x[GROUP + 1] = 63.5, 1.3
    x[2 * GROUP], x[2 * GROUP + 1], x[2 * GROUP + 2] = 508, 9, -7
    expected = torch.zeros_like(x)
    expected[0], expected[1], expected[2] = 127, 2, -4
    expected[GROUP], expected[GROUP + 1] = 63.5, 1.5
    expected[2 * GROUP], expected[2 * GROUP + 1], expected[2 * GROUP + 2] = 508, 8, -8
    assert torch.equal(back(INT8, x), expected.double())
    assert encode(INT8, x)[1].tolist() == [1.0, 0.5, 4.0]


def hadamard(size: int) -> torch.Tensor:
    """Of signs: row i and column j have -1 where i and j share an odd number of bits."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]).double()


def of_group(count: int) -> torch.Tensor:
    """The matrix of a group of `count` numbers: blocks of the largest power of two that divides it."""
    size = count & -count
    return torch.block_diag(*[hadamard(size)] * (count // size))


@given(seed=st.integers(0, 10**6), count=st.integers(1, 100), size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_int4_is_its_definition(seed: int, count: int, size: float) -> None:
    """The nearest levels to a group times the Hadamard matrix, under the best scale, as searched in fp64.

    The first of two codes is in a byte's lower half. A scale between two numbers of fp16 may become either: the extreme
    is a sum in fp32.
    """
    x = size * noise(count, seed=seed) * noise(count, seed=seed + 1).exp()
    packed, scales = encode(INT4, x)
    codes = [half for byte in packed.tolist() for half in (byte % 16, byte // 16)][:count]
    levels = torch.tensor(LEVELS).double()
    got = back(INT4, x)
    for first, scale in zip(range(0, count, GROUP), scales.double(), strict=True):
        group = x[first : first + GROUP].double()
        matrix = of_group(len(group))
        turned, its = matrix @ group, levels[codes[first : first + GROUP]]
        extreme = turned[turned.abs().argmax()]
        errors = []
        for divisor in LEVEL_DIVISORS:
            steps = (extreme * torch.tensor([1 - 1e-6, 1 + 1e-6]) / -divisor).half().double()
            errors.append(max((turned[:, None] - levels * step).square().amin(-1).sum() for step in steps))
        assert (turned - its * scale).square().sum() <= min(errors) * (1 + 1e-4)
        assert torch.equal(got[first : first + GROUP], matrix @ its * scale / (len(group) & -len(group)))


def test_fp8_is_e4m3() -> None:
    """All its numbers come back, what lies between goes to the nearest, and beyond 448 is 448."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # the two that are NaN
    values = decode(CODECS["fp8"], (codes,), len(codes), torch.float32)
    assert values.max() == 448 and values[values > 0].min() == 2**-9
    assert torch.equal(encode(CODECS["fp8"], values)[0], codes)
    x = torch.tensor([1.07, 1e-9, 460.0, 470.0, -1e30, 447.0])
    assert back(CODECS["fp8"], x).tolist() == [1.125, 0.0, 448.0, 448.0, -448.0, 448.0]
    random = 400 * noise(3000)
    known = values.double().sort().values
    nearest = (random.double().clamp(-448, 448)[:, None] - known).abs().amin(-1)
    assert torch.equal((random.double().clamp(-448, 448) - back(CODECS["fp8"], random)).abs(), nearest)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_hidden(codec: Codec, bad: float) -> None:
    for place in (0, 33, 39):
        x = noise(2, 40)
        x[1, place] = bad
        got = back(codec, x)
        assert not got[1, place].isfinite()
        if codec in QUANTISED:
            assert got[1, place].isnan()
        group = range(place - place % GROUP, min(40, place - place % GROUP + GROUP)) if codec.group else [place]
        others = [i for i in range(40) if i not in group]
        assert got[0].isfinite().all() and got[1, others].isfinite().all()
        if codec.group:
            assert got[1, list(group)].isnan().all()


def test_zeros_stay_zeros(codec: Codec) -> None:
    x = torch.zeros(3, 50)
    x[1, :GROUP] = noise(GROUP)
    got = back(codec, x)
    assert torch.equal(got[[0, 2]], torch.zeros(2, 50, dtype=torch.float64))
    assert torch.equal(got[1, GROUP:], torch.zeros(50 - GROUP, dtype=torch.float64))


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("size", [1e-45, 1e-30, 6e-8, 3e-6, 1e-4, 1e-2, 1e4, 1e6, 1e9, 1e37])
def test_tiny_and_huge_numbers(codec: Codec, size: float) -> None:
    """Nothing of them is infinite; where a scale can say it, the largest keeps its size."""
    x = size * noise(5, 64).clamp(-1, 1)
    got = back(codec, x)
    assert got.isfinite().all()
    assert (got.abs() <= x.double().abs().amax() * 1.5 + STEP).all()
    if codec.group and 1e-2 <= size <= 1e5:
        assert (got.abs().amax() / x.abs().amax() - 1).abs() < (0.2 if codec is INT4 else 0.01)
    if size == 1e37:
        most = {"fp8": 448, "int8": 127 * 65504, "int4": -LEVELS[0] * 65504}[codec.name]
        assert most / 8 < got.abs().amax() <= most


@given(seed=st.integers(0, 100), count=st.integers(1, 70), rows=st.integers(1, 9), name=st.sampled_from(sorted(CODECS)))
def test_a_row_does_not_depend_on_the_others(seed: int, count: int, rows: int, name: str) -> None:
    """The same bytes, whatever is stored with it and however the tensor lies in memory."""
    codec = CODECS[name]
    x = noise(rows, 2, count, seed=seed) * 10.0 ** noise(rows, 1, 1, seed=seed + 1)
    whole = encode(codec, x)
    strided = encode(codec, x.transpose(0, 1).contiguous().transpose(0, 1))
    for i in range(rows):
        alone = encode(codec, x[i, 1])
        for part, other, single in zip(whole, strided, alone, strict=True):
            assert torch.equal(part[i, 1], single) and torch.equal(other[i, 1], single)
        decoded = decode(codec, whole, count, torch.float32)[i, 1]
        assert torch.equal(decoded, decode(codec, alone, count, torch.float32))


def test_no_rows_are_no_rows(codec: Codec) -> None:
    assert back(codec, torch.empty(0, 2, 40)).shape == (0, 2, 40)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_goes_in_and_comes_out(codec: Codec, dtype: torch.dtype) -> None:
    """What comes out is rounded once: codes times scales are exact in fp32."""
    x = noise(3, 40).to(dtype)
    exact = back(codec, x)
    assert torch.equal(exact, back(codec, x.double()))
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        got = back(codec, x, wanted)
        assert got.dtype == wanted
        assert torch.equal(got, exact.float().to(wanted))
    if codec in QUANTISED:
        assert torch.equal(exact, exact.float().double())


def errors(codec: Codec, x: torch.Tensor) -> float:
    return float((back(codec, x) - x.double()).pow(2).mean() / x.double().pow(2).mean())


def seven(x: torch.Tensor) -> torch.Tensor:
    """Another int4: round(x / scale) in -7..7, with scale = max |x| / 7."""
    groups = x.unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    return ((groups / scales).round().clamp(-7, 7) * scales).flatten(-2)


@pytest.mark.parametrize(
    ("tails", "most"), [("gauss", 0.64), ("laplace", 0.5), ("student", 0.4), ("one channel 30 times larger", 0.2)]
)
def test_int4_errs_less_than_plain_rounding(tails: str, most: float) -> None:
    torch.manual_seed(0)
    x = {
        "gauss": torch.randn(4000, 64),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((4000, 64)),
        "student": torch.distributions.StudentT(3.0).sample((4000, 64)),
        "one channel 30 times larger": torch.randn(4000, 64) * torch.tensor([30.0, *[1.0] * 63]),
    }[tails]
    other = float((seven(x) - x).pow(2).mean() / x.pow(2).mean())
    assert errors(INT4, x) / other < most


def test_how_much_each_errs() -> None:
    """Relative mean squared error on Gaussian rows, as a guard: a coarser codec would pass all bounds above."""
    x = noise(4000, 64)
    assert errors(INT8, x) < 3e-5
    assert errors(INT4, x) < 6e-3
    assert errors(CODECS["fp8"], x) < 8e-4
