"""Every codec: its bytes, how near it comes, and that it hides nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensors import decode, encode
from tokenwright.backends.torch.border import TORCH_DTYPES, torch_dtype
from tokenwright.cache.codec import CODECS, GROUP, Codec
from tokenwright.formats import KV_NAMES

SCALED = [CODECS["int8"], CODECS["int4"]]
QUANTISED = [*SCALED, CODECS["fp8"]]
LEVELS = {"int8": 127, "int4": 8}  # codes of the largest number
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


def scale_of(codec: Codec, group: list[float]) -> float:
    """The size of a step in this group, before it is rounded to float16."""
    return max(map(abs, group)) / LEVELS[codec.name]


@pytest.mark.parametrize("codec", SCALED, ids=lambda codec: codec.name)
@given(row=ROWS)
def test_a_number_comes_back_within_half_a_step(codec: Codec, row: list[float]) -> None:
    """Beside half a step there are the scale's own rounding, to the nearest float16, and what is out of range.

    That is what float16 cannot scale (beyond 65504 a step), and in int4, which has one code fewer on the other side of
    the group's extreme, up to half a step more there.
    """
    got = back(codec, torch.tensor(row)).tolist()
    for first in range(0, len(row), GROUP):
        group = row[first : first + GROUP]
        step = min(scale_of(codec, group), 65504.0)
        largest = max(map(abs, group))
        rounding = LEVELS[codec.name] * max(step * 2**-11, STEP / 2)
        for x, y in zip(group, got[first:], strict=False):
            lacking = step / 2 if codec.name == "int4" and abs(x) > 7.4 * step else 0.0
            beyond = max(0.0, largest - LEVELS[codec.name] * step)
            assert abs(x - y) <= (step / 2 + lacking + rounding) * (1 + 1e-6) + beyond
            assert math.isfinite(y)


@pytest.mark.parametrize("codec", SCALED, ids=lambda codec: codec.name)
def test_codes_are_the_nearest(codec: Codec) -> None:
    """By hand: steps of 1, of 1/2, and a short last group with steps of 4."""
    most = LEVELS[codec.name]
    sign = -1 if codec.name == "int4" else 1  # so that the scale is positive in either
    x = torch.zeros(2 * GROUP + 3)
    x[0], x[1], x[2], x[3] = sign * most, 2.4, -3.6, 0.4
    x[GROUP], x[GROUP + 1] = sign * most / 2, 1.3
    x[2 * GROUP], x[2 * GROUP + 1], x[2 * GROUP + 2] = sign * most * 4, 9, -7
    expected = torch.zeros_like(x)
    expected[0], expected[1], expected[2] = sign * most, 2, -4
    expected[GROUP], expected[GROUP + 1] = sign * most / 2, 1.5
    expected[2 * GROUP], expected[2 * GROUP + 1], expected[2 * GROUP + 2] = sign * most * 4, 8, -8
    assert torch.equal(back(codec, x), expected.double())
    assert encode(codec, x)[1].tolist() == [1.0, 0.5, 4.0]


def test_int4_keeps_the_extreme_of_a_group_whatever_its_sign() -> None:
    for extreme in (8.0, -8.0):
        x = torch.tensor([extreme, 3.0, -3.0, -0.95 * extreme, 0.0])
        assert back(CODECS["int4"], x).tolist() == [extreme, 3.0, -3.0, -extreme * 7 / 8, 0.0]


@pytest.mark.parametrize("count", [1, 2, 3, 31, 33, 65])
def test_int4_packs_two_codes_a_byte(count: int) -> None:
    """The first in the lower half; an odd row leaves the last upper half alone."""
    x = torch.arange(count) % 15 - 8.0
    packed, scales = encode(CODECS["int4"], x)
    extremes = [max(group.tolist(), key=abs) for group in x.split(GROUP)]
    assert scales.tolist() == [extreme / -8 for extreme in extremes]
    halves = [half for byte in packed.tolist() for half in (byte % 16, byte // 16)]
    codes = [round(value / (extremes[i // GROUP] / -8)) + 8 for i, value in enumerate(x.tolist())]
    assert halves[:count] == codes
    assert len(packed) == (count + 1) // 2


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
@pytest.mark.parametrize("size", [1e-45, 1e-30, 6e-8, 3e-6, 1e-4, 1e-2, 1e4, 1e6, 1e9, 3e38])
def test_tiny_and_huge_numbers(codec: Codec, size: float) -> None:
    """Nothing of them is infinite; where a scale can say it, the largest keeps its size."""
    x = size * noise(5, 64).clamp(-1, 1)
    got = back(codec, x)
    assert got.isfinite().all()
    assert (got.abs() <= x.double().abs().amax() * 1.5 + STEP).all()
    if codec.group and 1e-2 <= size <= 1e5:
        assert (got.abs().amax() / x.abs().amax() - 1).abs() < 0.01
    if size == 3e38:
        most = 448 if codec.name == "fp8" else LEVELS[codec.name] * 65504
        assert got.abs().amax() == most


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
    """The other int4: -7..7 by max |x| / 7."""
    groups = x.unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    return ((groups / scales).round().clamp(-7, 7) * scales).flatten(-2)


@pytest.mark.parametrize("tails", ["gauss", "laplace", "student"])
def test_int4_errs_less_than_the_other_int4(tails: str) -> None:
    torch.manual_seed(0)
    x = {
        "gauss": torch.randn(4000, 64),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((4000, 64)),
        "student": torch.distributions.StudentT(3.0).sample((4000, 64)),
    }[tails]
    other = float((seven(x) - x).pow(2).mean() / x.pow(2).mean())
    assert 0.74 < errors(CODECS["int4"], x) / other < 0.82


def test_how_much_each_errs() -> None:
    """Relative mean squared error on Gaussian rows, as a guard: a coarser codec would pass all bounds above."""
    x = noise(4000, 64)
    assert errors(CODECS["int8"], x) < 3e-5
    assert errors(CODECS["int4"], x) < 8e-3
    assert errors(CODECS["fp8"], x) < 8e-4
