"""The native kernels, each instruction set of this processor: what they compute, alone and in company."""

import ctypes
import math
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.native import (
    FUSED,
    KERNELS,
    OF_FILES,
    WEIGHTS,
    Blocks,
    blocks,
    each_isa,
    needs_native,
    noise,
    packed,
    rows,
    threads,
)
from tests.profiles import examples
from tests.tensors import NativeOverTensors
from tokenwright.backends.native import structs
from tokenwright.backends.native.library import find, load
from tokenwright.backends.native.native_kernels import find_kernels, usable
from tokenwright.backends.packed import Packed
from tokenwright.backends.torch.kernels import Dense
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat
from tokenwright.models.rotary import Rotation

REFERENCE = ReferenceKernels(wide=torch.float64)
FLOATS = [form for form in WEIGHTS if "int" not in form]
INTEGERS = [form for form in WEIGHTS if "int" in form]

SIZES = st.integers(1, 300) | st.sampled_from([1024, 1100, 2065])  # beyond what is taken through at a time
COUNTS = st.integers(1, 40) | st.sampled_from([300, 520])


def integer_definition(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """A quantised linear [T, out]: whole numbers summed up over each group, and fp32 fused over the groups in order.

    A row's group is quantised by its own largest number, to codes from -127 to 127. Products and their sums are exact
    in fp64 here, so that each step is rounded once to fp32.
    """
    fill = (0, -weight.inner % weight.group)
    groups = torch.nn.functional.pad(x, fill).unflatten(1, (-1, weight.group))  # [T, G, group]
    most = groups.abs().amax(-1)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)  # a number / a tensor is rounded twice
    codes = (groups * inverse[..., None]).round().double()
    scales = most / 127

    plain = torch.nn.functional.pad(weight.unpack(), fill).unflatten(1, (-1, weight.group))  # [out, G, group]
    each = torch.from_numpy(weight.scales).view(-1, weight.depth // weight.group, 16).transpose(1, 2).flatten(0, 1)
    weight_scales = each[: weight.out, : plain.shape[1]].float()  # [out, G]
    step = torch.where(weight_scales == 0, 1, weight_scales)
    weight_codes = (plain / step[..., None]).round().double()

    total = torch.zeros(len(x), weight.out)
    for group in range(plain.shape[1]):
        whole = codes[:, group] @ weight_codes[:, group].T
        scale = (scales[:, group, None] * weight_scales[:, group]).double()
        total = (total.double() + whole * scale).float()
    return total if weight.bias is None else total + torch.from_numpy(weight.bias)


def terms(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """[T, out]: the sum of the magnitudes of what a linear adds up; rounding is relative to it."""
    bias = 0 if weight.bias is None else torch.from_numpy(weight.bias).abs().double()
    return x.abs().double() @ weight.unpack().abs().double().T + bias


@each_isa
@examples(80)
@given(
    form=st.sampled_from(FLOATS),
    out=st.integers(1, 300),
    inner=SIZES,
    count=COUNTS,
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_of_floats(isa: str, form: str, out: int, inner: int, count: int, bias: bool, seed: int) -> None:
    x, weight = rows(count, inner, seed), packed(form, out, inner, bias)
    if isa == "amx" and form == "bfloat16":
        x = x.bfloat16().float()  # what the matrix unit reads
    added = torch.from_numpy(weight.bias).double() if bias else None
    right = REFERENCE.linear(x.double(), Dense(weight.unpack().double(), added))
    error = (KERNELS[isa].linear(x, weight).double() - right).abs()
    assert (error <= 1e-5 * terms(x, weight) + 1e-37).all()


@each_isa
@examples(80)
@given(
    form=st.sampled_from(INTEGERS),
    out=st.integers(1, 300),
    inner=SIZES,
    count=COUNTS,
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_of_whole_numbers(isa: str, form: str, out: int, inner: int, count: int, bias: bool, seed: int) -> None:
    """To the bit what the definition says, wherever the processor fuses."""
    x, weight = rows(count, inner, seed), packed(form, out, inner, bias)
    ours, right = KERNELS[isa].linear(x, weight), integer_definition(x, weight)
    if isa in FUSED:
        assert torch.equal(ours, right)
    assert ((ours - right).abs() <= 1e-6 * terms(x, weight) + 1e-37).all()


@pytest.mark.skipif(len(FUSED) < 2, reason="this processor has fewer than two instruction sets that fuse")
@examples(40)
@given(form=st.sampled_from(INTEGERS), out=st.integers(1, 70), inner=SIZES, count=COUNTS, seed=st.integers(0, 99))
def test_quantised_weights_give_the_same_bits_everywhere(
    form: str, out: int, inner: int, count: int, seed: int
) -> None:
    x, weight = rows(count, inner, seed), packed(form, out, inner, bias=True)
    first, *others = [KERNELS[isa].linear(x, weight) for isa in FUSED]
    assert all(torch.equal(first, other) for other in others)


def definition_of_blocks(x: torch.Tensor, weight: Blocks) -> torch.Tensor:
    """As `integer_definition`; after each group's products comes minimum * -(scale of the row * sum of its codes).

    The factors of outputs come last, before the bias.
    """
    group = weight.packed.group
    groups = x.unflatten(1, (-1, group))  # [T, G, group]
    most = groups.abs().amax(-1)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    codes, scales = (groups * inverse[..., None]).round().double(), most / 127
    factors = -(scales * codes.sum(-1).float())
    theirs = weight.codes.double().unflatten(1, (-1, group))  # [out, G, group]
    total = torch.zeros(len(x), len(theirs))
    for at in range(groups.shape[1]):
        whole = codes[:, at] @ theirs[:, at].T
        total = (total.double() + whole * (scales[:, at, None] * weight.scales[:, at]).double()).float()
        total = (total.double() + factors[:, at, None].double() * weight.minima[:, at].double()).float()
    total = total * weight.factors
    return total if weight.packed.bias is None else total + torch.from_numpy(weight.packed.bias)


@each_isa
@examples(80)
@given(
    form=st.sampled_from(OF_FILES),
    out=st.integers(1, 70) | st.sampled_from([160]),
    supers=st.integers(1, 5),
    count=st.integers(1, 20) | st.sampled_from([33, 40, 300, 520]),
    seed=st.integers(0, 99),
)
def test_linear_of_blocks_of_files(isa: str, form: WeightFormat, out: int, supers: int, count: int, seed: int) -> None:
    """To the bit what the definition says, wherever the processor fuses; a row alone is the row in company."""
    inner = supers * (form.super or form.group)
    x, weight = rows(count, inner, seed), blocks(form, out, inner, bias=True, seed=seed)
    with threads(1 + seed % 3):
        ours = KERNELS[isa].linear(x, weight.packed)
        at = seed % count
        assert torch.equal(KERNELS[isa].linear(x[at : at + 1], weight.packed), ours[at : at + 1])
        assert torch.equal(KERNELS[isa].linear(x[at:], weight.packed), ours[at:])
    right = definition_of_blocks(x, weight)
    if isa in FUSED:
        assert torch.equal(ours, right)
    group = weight.packed.group
    sizes = x.abs().unflatten(1, (-1, group)).amax(-1) * group  # at least the sum of a group
    most = sizes @ (weight.scales.abs() * (1 << 7) + weight.minima.abs()).T * weight.factors
    assert ((ours - right).abs() <= 1e-6 * most + 1e-6 * right.abs() + 1e-37).all()


@each_isa
@examples(60)
@given(
    form=st.sampled_from(WEIGHTS),
    out=st.integers(1, 300),
    inner=SIZES,
    count=COUNTS,
    at=st.integers(0, 519),
    before=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_a_row_is_the_same_whatever_its_neighbours(
    isa: str, form: str, out: int, inner: int, count: int, at: int, before: int, seed: int
) -> None:
    """Alone, in other company and at another place, on one to three threads."""
    x, weight, kernels = rows(count, inner, seed), packed(form, out, inner, bias=True), KERNELS[isa]
    together = kernels.linear(x, weight)
    at %= count
    for team in (1, 2, 3):
        with threads(team):
            assert torch.equal(kernels.linear(x, weight), together)
            assert torch.equal(kernels.linear(x[at : at + 1], weight), together[at : at + 1])
            others = torch.cat((rows(before, inner, seed + 1), x[at:]))
            assert torch.equal(kernels.linear(others, weight)[before:], together[at:])


@each_isa
@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(isa: str, form: str, bad: float) -> None:
    """A row with such a number comes to no finite one; its neighbours do not notice."""
    x, weight = noise(5, 70), packed(form, 20, 70)
    right = KERNELS[isa].linear(x, weight)
    x[3, 40], x[3, 41] = bad, bad
    ours = KERNELS[isa].linear(x, weight)
    assert not ours[3].isfinite().any()
    assert torch.equal(ours[[0, 1, 2, 4]], right[[0, 1, 2, 4]])


@each_isa
@examples(60)
@given(
    count=st.integers(1, 9),
    size=st.integers(1, 600),
    eps=st.sampled_from([0.0, 1e-6, 1e-5, 1e-3]),
    mean=st.integers(-3, 3),
)
def test_norms(isa: str, count: int, size: int, eps: float, mean: int) -> None:
    x = mean + 3 * noise(2, count, size, seed=size)
    weight, bias = noise(size, seed=1), noise(size, seed=2)
    ours, right = KERNELS[isa].rms_norm(x, weight, eps), REFERENCE.rms_norm(x, weight, eps)
    torch.testing.assert_close(ours, right, rtol=2e-6, atol=1e-7)
    eps = max(eps, 1e-6)  # one number alone has no variance
    ours, right = KERNELS[isa].layer_norm(x, weight, bias, eps), REFERENCE.layer_norm(x, weight, bias, eps)
    # What the mean is off counts as much as the row's deviation is small beside it.
    slack = 1e-6 * (1 + (x.abs().amax(-1) / (x.var(-1, correction=0) + eps).sqrt()).max())
    torch.testing.assert_close(ours, right, rtol=2e-6, atol=float(slack))
    assert torch.equal(KERNELS[isa].rms_norm(x[:, :1], weight, eps), KERNELS[isa].rms_norm(x, weight, eps)[:, :1])


@each_isa
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_of_what_is_not_finite(isa: str, bad: float) -> None:
    x, weight = noise(3, 37), torch.ones(37)
    x[1, 5] = bad
    for ours in (KERNELS[isa].rms_norm(x, weight, 1e-5), KERNELS[isa].layer_norm(x, weight, weight, 1e-5)):
        assert ours[[0, 2]].isfinite().all()
        assert not ours[1, 5].isfinite()


EDGES = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1e-20,
    1.0,
    -1.0,
    17.3,
    -87.3,
    -88.0,
    -88.9,
    88.9,
    104.0,
    -104.0,
    1e4,
    -1e4,
    3e38,
    -3e38,
]


@each_isa
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations(isa: str, name: str) -> None:
    """Over all that fp32 can hold; in lengths that fill no register."""
    edges = torch.tensor(EDGES)
    for x in (10 * noise(3, 37), 200 * noise(1, 1001, seed=1), edges[None], noise(1, 5) * 1e30, noise(1, 16) * 1e-30):
        right = REFERENCE.activate(x.double(), name).float().double()  # a square may be beyond fp32
        torch.testing.assert_close(KERNELS[isa].activate(x, name).double(), right, rtol=2e-6, atol=2e-7)
        both = torch.cat((x, noise(*x.shape, seed=2)), -1)
        right = REFERENCE.gated(both.double(), name).float().double()
        torch.testing.assert_close(KERNELS[isa].gated(both, name).double(), right, rtol=2e-6, atol=1e-6)


@each_isa
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_of_what_is_not_finite(isa: str, name: str) -> None:
    x = torch.tensor([[math.nan, 1.0, math.inf, math.nan] * 5])
    ours = KERNELS[isa].activate(x, name)
    assert torch.equal(ours.isnan(), x.isnan())
    assert torch.equal(ours.isinf(), x.isinf())


@each_isa
def test_xielu(isa: str) -> None:
    """Its terms may cancel each other: the error is one of their magnitude."""
    facts = (0.7, 1.3, 0.5)
    for x in (10 * noise(3, 37), 200 * noise(1, 1001, seed=1), noise(1, 5) * 1e-3, torch.tensor([[0.0, -0.0, 1e15]])):
        right = REFERENCE.xielu(x.double(), facts)
        assert (
            (KERNELS[isa].xielu(x, facts).double() - right).abs() <= 4e-7 * (1 + x.abs()) + 2e-6 * right.abs()
        ).all()
    odd = torch.tensor([[math.nan, math.inf, 1.0] * 7])
    assert torch.equal(KERNELS[isa].xielu(odd, facts).isnan(), odd.isnan())


@each_isa
def test_soft_caps_are_within_three_units_in_the_last_place(isa: str) -> None:
    """cap tanh(x / cap), over all magnitudes, and on both sides of where the formula changes."""
    spread = torch.logspace(-30, 38, 60_001, dtype=torch.float64).float()
    for x in (spread, torch.linspace(0, 10, 200_001), torch.linspace(0.6, 0.65, 50_001)):
        ours = KERNELS[isa].soft_cap(torch.cat((x, -x)), 1.0)
        right = torch.cat((x, -x)).double().tanh()
        unit = torch.nextafter(right.abs().float(), torch.tensor(torch.inf)).double() - right.abs().float().double()
        assert ((ours.double() - right).abs() / unit).max() < 3
    x = 100 * noise(1, 1001, seed=3)
    right = REFERENCE.soft_cap(x.double(), 30.0)
    torch.testing.assert_close(KERNELS[isa].soft_cap(x, 30.0).double(), right, rtol=5e-7, atol=0)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    assert torch.equal(KERNELS[isa].soft_cap(odd, 5.0)[1:], torch.tensor([5.0, -5.0, -0.0]))
    assert KERNELS[isa].soft_cap(odd, 5.0)[0].isnan()


@each_isa
@examples(40)
@given(count=st.integers(1, 9), heads=st.integers(1, 5), half=st.integers(1, 70))
def test_rotate(isa: str, count: int, heads: int, half: int) -> None:
    x, angles = noise(count, heads, 2 * half), 9 * noise(count, half, seed=1).double()
    both = torch.cat((angles, angles), -1)
    rotation = Rotation(both.cos().float(), both.sin().float())
    ours, right = KERNELS[isa].rotate(x, rotation), REFERENCE.rotate(x, rotation)
    torch.testing.assert_close(ours, right, rtol=1e-6, atol=5e-7)


def summary(isa: str, x: torch.Tensor) -> tuple[int, float]:
    """The place of the largest and log(sum(exp)) of one row."""
    (best,), (log_total,) = KERNELS[isa].summarise(x[None])
    return best, log_total


@each_isa
@examples(60)
@given(
    size=st.integers(1, 70) | st.sampled_from([127, 128, 129, 2048, 2049, 5000]),
    wide=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 99),
)
def test_summary(isa: str, size: int, wide: float, seed: int) -> None:
    x = wide * noise(size, seed=seed)
    best, log_total = summary(isa, x)
    assert best == int(x.argmax())
    assert log_total == pytest.approx(float(x.double().logsumexp(0)), rel=1e-6, abs=2e-6)


@each_isa
@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
def test_summary_takes_the_first_of_equals(isa: str, size: int) -> None:
    for first in range(size):
        x = -noise(size).abs()
        x[first:] = 0.5
        assert summary(isa, x)[0] == first


@each_isa
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 16, 20, 100])
def test_summary_tells_what_is_not_finite(isa: str, bad: float, size: int) -> None:
    for at in range(size):
        x = noise(size)
        x[at] = bad
        best, log_total = summary(isa, x)
        assert math.isnan(log_total)
        assert 0 <= best < size


@each_isa
def test_the_error_function_over_all_magnitudes(isa: str) -> None:
    """gelu(x) = x (1 + erf(x / sqrt(2))) / 2 in fp32, against erf in fp64: within 2 ulp of x."""
    x = torch.cat([torch.logspace(-30, 1, 4001), torch.linspace(0.0003, 6, 20011)])
    x = torch.cat([x, -x])[None]
    right = 0.5 * x.double() * (1 + torch.erf(x.double() / math.sqrt(2)))
    apart = (KERNELS[isa].activate(x, "gelu").double() - right).abs() / x.double().abs() * 2**23
    assert float(apart.max()) < 2


INEXACT = re.compile(r" U ((?:exp|log|erf|pow|sin|cos|tan|gamma)\w*)@")  # whose bits differ between C libraries


@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="symbols as ELF files have them")
def test_no_bit_depends_on_the_c_library() -> None:
    """The kernels import no function of it that is not rounded correctly."""
    symbols = subprocess.run(["nm", "-D", str(find())], capture_output=True, text=True, check=True).stdout
    assert " U sqrt" in symbols or " U memcpy" in symbols, "nm tells what is imported"
    assert INEXACT.findall(symbols) == []


# ---- Which kernels ----


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`find_kernels` as at the first call."""
    monkeypatch.delenv("TOKENWRIGHT_ISA", raising=False)
    monkeypatch.delenv("TOKENWRIGHT_KERNELS", raising=False)
    monkeypatch.setattr("tokenwright.backends.native.native_kernels.find_kernels", find_kernels.__wrapped__)


@each_isa
def test_an_instruction_set_can_be_asked_for(isa: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_ISA", isa)
    kernels = find_kernels.__wrapped__()
    assert kernels is not None
    assert kernels.isa == isa
    x, weight = noise(3, 40), packed("bfloat16", 20, 40)
    assert torch.equal(NativeOverTensors(kernels).linear(x, weight), KERNELS[isa].linear(x, weight))


@needs_native
def test_the_best_is_taken_and_what_lacks_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = find_kernels.__wrapped__()
    assert kernels is not None
    assert kernels.isa == usable(kernels.library)[0]
    with pytest.raises(RequestError, match=r"no mmx kernels; use .*portable"):
        find_kernels.__wrapped__(isa="mmx")
    monkeypatch.setenv("TOKENWRIGHT_KERNELS", "reference")
    assert find_kernels.__wrapped__() is None


def test_without_a_library_the_reference_computes(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that says what to install; but who asks for native kernels is refused."""
    monkeypatch.setattr("tokenwright.backends.native.native_kernels.lib.find", lambda: None)
    assert find_kernels.__wrapped__() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install a C++ compiler" in caplog.text
    with pytest.raises(RequestError, match="install a C\\+\\+ compiler"):
        find_kernels.__wrapped__("native")


@needs_native
def test_dense_weights_are_refused() -> None:
    with pytest.raises(RequestError, match="load_packed"):
        next(iter(KERNELS.values())).linear(noise(1, 4), Dense(noise(3, 4)))


def test_structs_are_read_from_their_declarations() -> None:
    text = """
constexpr int64_t MOST = 3;
struct Inside {
  double a, b;
};
struct Whole {
  int64_t first, second;
  const float *one, *other;
  const int32_t* const* tables;
  Inside inside;
  int64_t sizes[MOST];
  Inside two[2];

  void run() const;
};
struct Unread {
  uint8_t byte;
};
"""
    found = structs._structs(text)
    assert found.keys() == {"Inside", "Whole"}
    whole = found["Whole"]
    assert [name for name, _ in whole._fields_] == [
        *("first", "second", "one", "other", "tables", "inside", "sizes", "two")
    ]
    assert (whole.tables.offset, whole.inside.offset, whole.two.offset) == (32, 40, 80)
    assert (ctypes.sizeof(whole), ctypes.sizeof(found["Inside"])) == (112, 16)


@pytest.mark.skipif(find() is None, reason="no native kernels were compiled")
@pytest.mark.parametrize("name", ["Norm", "AttentionOp", "Batch"])
def test_a_library_of_other_headers_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [*structs.STRUCTS[name]._fields_, ("more", ctypes.c_int64)]
    monkeypatch.setitem(structs.STRUCTS, name, type(f"C{name}", (ctypes.Structure,), {"_fields_": fields}))
    file = find()
    assert file is not None
    with pytest.raises(RequestError, match="compiled from other sources"):
        load.__wrapped__(file)
