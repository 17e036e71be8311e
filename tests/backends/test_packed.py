"""Packed weights: their layout against a plain reading of native/api.h, their numbers against the definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.native import OF_FILES, blocks
from tests.profiles import examples
from tests.tensors import TensorPacked
from tokenwright.arrays import place_of
from tokenwright.backends.native.library import find, load
from tokenwright.backends.native.native_kernels import find_kernels, usable
from tokenwright.backends.packed import LANES, Packed, packed_sizes
from tokenwright.backends.rounding import DIVISORS
from tokenwright.backends.torch import reference_kernels as reference
from tokenwright.backends.torch.border import array
from tokenwright.backends.torch.kernels import Dense
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.errors import RequestError
from tokenwright.formats import TABLES, WeightFormat

FORMATS = ["float32", "bfloat16", "float16", "int8", "int8:32", "int4", "int4:64"]
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIBRARY = find()
ISAS = usable(load(LIBRARY)) if LIBRARY else []


def noise(out: int, inner: int, seed: int = 0, kind: str = "plain") -> torch.Tensor:
    """[out, inner] of numbers that are hard in one way or another; fp32."""
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(out, inner, generator=random)
    match kind:
        case "tiny":  # scales are subnormal float16, or 0
            return w * 1e-6
        case "spread":
            return w * torch.exp(3 * torch.randn(out, inner, generator=random))
        case "whole":  # ties, zeros of both signs, groups of zeros
            return w.round() * (torch.rand(out, 1, generator=random) > 0.3)
        case "large":
            return w * 1e4
    return w


KINDS = ("plain", "tiny", "spread", "whole", "large")


def packed(w: torch.Tensor, form: str) -> Packed:
    rows, columns = w.shape
    made = TensorPacked.empty(rows, columns, WeightFormat.parse(form))
    assert made.pack_rows(0, w) == 0
    return made


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("out", "inner"), [(16, 64), (33, 70), (5, 3), (1, 129)])
def test_every_number_lies_where_the_layout_says(form: str, out: int, inner: int) -> None:
    """Byte for byte, by the words of api.h. The codes are what `blocks` decodes, divided by their scales."""
    w = noise(out, inner)
    made = packed(w, form)
    name, group = made.format, made.group
    per_slab = {"float32": 16, "bfloat16": 32, "float16": 32, "int8": 64, "int4": 64}[name]
    slab_bytes = 512 if name == "int4" else 1024
    slabs, blocks = math.ceil(inner / per_slab), math.ceil(out / 16)
    assert made.codes.size == blocks * slabs * slab_bytes
    assert place_of(made.codes) % 64 == 0
    memory = bytes(made.codes)
    for block, lane, at in [(b, lane, i) for b in range(blocks) for lane in range(16) for i in range(slabs * per_slab)]:
        row, start, i = 16 * block + lane, (block * slabs + at // per_slab) * slab_bytes, at % per_slab
        there = row < out and at < inner
        if name in FLOATS:
            size = FLOATS[name].itemsize
            place = start + (i * 16 + lane) * 4 if size == 4 else start + ((i // 2 * 16 + lane) * 2 + i % 2) * 2
            kept = torch.frombuffer(bytearray(memory[place : place + size]), dtype=FLOATS[name])[0]
            assert kept == (w[row, at].to(FLOATS[name]) if there else 0)
            continue
        scale = made.scales[((block * slabs * per_slab // group) + at // group) * 16 + lane].astype(np.float32)
        if name == "int8":
            code = memory[start + (i // 4 * 16 + lane) * 4 + i % 4] - 128
        else:
            both = memory[start + (i % 32 // 4 * 16 + lane) * 4 + i % 4]
            code = (both & 15 if i < 32 else both >> 4) - 8
        if there:
            assert code == (w[row, at] / scale).round().clamp(
                -127 if name == "int8" else -8, 127 if name == "int8" else 7
            )
        else:
            assert code == 0
        if row >= out or at // group * group >= inner:
            assert scale == 0


@pytest.mark.parametrize("form", [*map(WeightFormat.parse, FORMATS), *OF_FILES], ids=str)
def test_a_cut_has_the_codes_of_its_rows(form: WeightFormat) -> None:
    """Of rows in whole blocks, of others, and of rows that leave a block in the middle."""
    out, inner = 70, 2 * max(form.super, 64)
    whole = blocks(form, out, inner, bias=True).packed if form in OF_FILES else packed(noise(out, inner), str(form))
    assert whole.cut(np.arange(0)).nbytes == 0
    for ids in ([*range(16, 48)], [*range(32, 70)], [*range(8), *range(40, 48)], [3, 69, 0]):
        cut, kept = whole.cut(np.array(ids, np.int64)), whole.unpack()[ids]
        assert np.array_equal(cut.unpack(), kept)
        assert (cut.out, cut.form, cut.bias is None) == (len(ids), whole.form, whole.bias is None)
        assert cut.bias is None or np.array_equal(cut.bias, whole.bias[ids])


@pytest.mark.parametrize("form", OF_FILES, ids=str)
def test_blocks_of_files_lie_where_the_layout_says(form: WeightFormat) -> None:
    """Byte for byte, by the words of api.h; and the decoded weights are scale * code - minimum in fp32."""
    inner, out = 2 * max(form.super, 32), 35
    made = blocks(form, out, inner)
    kinds = {"int5": (640, 512, 1), "int6": (768, 512, 2), "int2": (256, 0, 2), "int1": (128, 0, 1)}
    slab_bytes, lower, upper = kinds.get(form.name, (512, 512, 0))
    slabs, span, fields = -(-inner // 64), form.super or form.group, 1 + form.minima
    stepped = form.super and lower
    record = LANES * fields * (2 + (form.super // form.group if stepped else 0))
    codes, scales = bytes(made.packed.codes), bytes(made.packed.scales)
    assert (len(codes), len(scales)) == (3 * slabs * slab_bytes, 3 * (slabs * 64 // span) * record)

    def level(row: int, at: int, which: int) -> float:
        start = (row // 16 * (slabs * 64 // span) + at // span) * record
        place = start + 32 * which + row % 16 * 2
        half = float(torch.frombuffer(bytearray(scales[place : place + 2]), dtype=torch.float16)[0])
        if not stepped:
            return half
        byte = scales[start + 32 * fields + (at % span // form.group * fields + which) * 16 + row % 16]
        return half * (byte - 256 if byte > 127 else byte)

    for row in range(out):
        for at in range(inner):
            i, start = at % 64, (row // 16 * slabs + at // 64) * slab_bytes
            both = codes[start + (i % 32 // 4 * 16 + row % 16) * 4 + i % 4] if lower else 0
            code = both & 15 if i < 32 else both >> 4
            if upper:
                each = 8 // upper
                line = codes[start + lower + (i // 4 // each * 16 + row % 16) * 4 + i % 4]
                code += (line >> i // 4 % each * upper) % (1 << upper) << (4 if lower else 0)
            if form.name in TABLES:
                code = TABLES[form.name][code]
            elif not lower:
                code = code - 1 if upper == 2 else 2 * code - 1
            elif not form.minima:
                code -= 8 << upper
            assert code == made.codes[row, at]
        for at in range(0, inner, form.group):
            assert level(row, at, 0) == made.scales[row, at // form.group]
            assert not form.minima or level(row, at, 1) == made.minima[row, at // form.group]
    scaled, minima = (one.repeat_interleave(form.group, 1) for one in (made.scales, made.minima))
    assert torch.equal(made.packed.unpack(), (made.codes * scaled - minima) * made.factors[:, None])
    ids = torch.tensor([34, 0, 17, 17])
    assert torch.equal(made.packed.rows(ids), made.packed.unpack()[ids])
    assert made.packed.form == form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMATS)
def test_numbers_come_back_within_half_a_step(form: str, kind: str) -> None:
    w = noise(37, 150, kind=kind)
    made = packed(w, form)
    back = made.unpack()
    if made.format in FLOATS:
        assert torch.equal(back, w.to(FLOATS[made.format]).float())
        return
    groups = torch.nn.functional.pad(w, (0, -150 % made.group)).view(37, -1, made.group)
    most = groups.abs().amax(-1)
    # half a step, and what the float16 scale is off; an int4 scale may leave the extreme itself outside of its range
    step = most / (127 if made.format == "int8" else -DIVISORS[0])
    slack = 0.5 * step + most * 2**-11 + 2.0**-24 * 127
    errors = (groups - torch.nn.functional.pad(back, (0, -150 % made.group)).view_as(groups)).abs()
    inside = errors <= 1.001 * slack[..., None]
    if made.format == "int4":
        inside |= groups.abs() == most[..., None]
    assert inside.float().mean() > (0.999 if made.format == "int8" else 0.98)
    assert (errors <= 1.001 * torch.maximum(slack, most / 3)[..., None]).all()


def test_int8_scales_by_the_largest() -> None:
    w = noise(20, 200)
    made = packed(w, "int8")
    most = torch.nn.functional.pad(w, (0, 56)).view(20, 4, 64).abs().amax(-1)
    assert torch.equal(made.rows(torch.arange(20)).abs().amax(-1), made.unpack().abs().amax(-1))
    scales = torch.from_numpy(made.scales).view(2, 4, LANES).transpose(1, 2).reshape(32, 4)
    assert torch.equal(scales[:20], (most / 127).half())


@pytest.mark.parametrize("form", ["int4", "int4:64"])
def test_int4_takes_the_scale_of_the_least_error(form: str) -> None:
    """Each group's squared error, in fp64, is the least that any candidate gives, but for what 12 bits cannot tell."""
    w = noise(24, 128, seed=3)
    made = packed(w, form)
    groups = w.double().view(24, -1, made.group)
    errors = (groups - made.unpack().double().view_as(groups)).square().sum(-1)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    each = []
    for divisor in DIVISORS:
        scale = (extreme.float() * (1 / divisor)).half().double()
        each.append((groups - (groups / scale).round().clamp(-8, 7) * scale).square().sum(-1))
    assert torch.allclose(errors, torch.stack(each).amin(0), rtol=1e-3)
    alone = each[DIVISORS.index(-8.0)].sum()
    assert errors.sum() < 0.93 * alone  # the search is worth it


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_packed_alone(form: str) -> None:
    """Whatever the cuts, the bytes are the same; and what lies outside of the rows is left as it was."""
    w = noise(50, 90)
    whole = packed(w, form)
    parts = TensorPacked.empty(50, 90, WeightFormat.parse(form))
    for first, last in ((20, 37), (0, 3), (37, 50), (3, 20)):
        assert parts.pack_rows(first, w[first:last]) == 0
    assert np.array_equal(parts.codes, whole.codes)
    assert np.array_equal(parts.scales, whole.scales)
    before = whole.unpack()
    whole.pack_rows(18, torch.zeros(5, 90))
    after = whole.unpack()
    assert torch.equal(after[:18], before[:18])
    assert torch.equal(after[23:], before[23:])
    assert not after[18:23].any()


@pytest.mark.parametrize("out", [100, 8192, 8200])
def test_large_matrices_have_memory_of_their_own(out: int) -> None:
    """Aligned, as long as it must be, and not shared with another; large pages or not."""
    made, other = (TensorPacked.empty(out, 1024, WeightFormat("int8", 64)) for _ in range(2))
    assert made.codes.size == packed_sizes(out, 1024, WeightFormat("int8", 64))[0]
    assert place_of(made.codes) % 64 == 0
    made.codes.fill(1)
    other.codes.fill(2)
    assert (made.codes == 1).all()


@pytest.mark.parametrize("form", FORMATS)
def test_rows_and_blocks_agree(form: str) -> None:
    made = packed(noise(40, 70), form)
    ids = torch.tensor([39, 0, 17, 17])
    assert torch.equal(made.rows(ids), made.unpack()[ids])
    assert torch.equal(made.blocks(1, 3), made.unpack()[16:])
    assert made.nbytes == sum(one.nbytes for one in (made.codes, made.scales))
    assert (made.codes.size, made.scales.size) == packed_sizes(40, 70, WeightFormat.parse(form))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_not_finite_is_counted(form: str, bad: float) -> None:
    w = noise(10, 70)
    w[7, 66] = bad
    group = WeightFormat.parse(form).group
    expected = 1 if not group else 70 - 66 // group * group
    assert TensorPacked.empty(10, 70, WeightFormat.parse(form)).pack_rows(0, w) == expected


@pytest.mark.parametrize(("form", "most"), [("float16", 7e4), ("int8", 9e6), ("int4", 8e5)])
def test_what_does_not_fit_is_counted(form: str, most: float) -> None:
    w = noise(3, 32)
    w[1, 2] = most
    assert TensorPacked.empty(3, 32, WeightFormat.parse(form)).pack_rows(0, w) > 0
    w[1, 2] = most / 2
    assert TensorPacked.empty(3, 32, WeightFormat.parse(form)).pack_rows(0, w) == 0


@pytest.mark.parametrize("form", ["int8", "int4", "int4:64"])
def test_zeros_have_no_sign(form: str) -> None:
    """Where all of a group is 0, the signs of its zeros leave no trace, whoever packs."""
    plain, signed = torch.zeros(32, 128), torch.zeros(32, 128).copysign(noise(32, 128))
    signed[16:] = -0.0
    expected, made = packed(plain, form), packed(signed, form)
    assert np.array_equal(made.codes, expected.codes)
    assert np.array_equal(made.scales.view(np.int16), expected.scales.view(np.int16))
    for isa in ISAS:
        kernels = find_kernels("native", isa)
        assert kernels is not None
        kernels.pack(made, 0, signed.numpy())
        assert np.array_equal(made.scales.view(np.int16), expected.scales.view(np.int16))


@pytest.mark.skipif(not ISAS, reason="no native kernels were compiled")
@examples(150)
@given(
    form=st.sampled_from(FORMATS),
    source=st.sampled_from(sorted(FLOATS)),
    isa=st.sampled_from(ISAS),
    out=st.integers(1, 50),
    inner=st.integers(1, 200),
    kind=st.sampled_from([*KINDS, "not finite"]),
    seed=st.integers(0, 1000),
    cut=st.integers(0, 50),
    threads=st.integers(1, 3),
)
def test_native_packing_gives_the_same_bytes(
    form: str, source: str, isa: str, out: int, inner: int, kind: str, seed: int, cut: int, threads: int
) -> None:
    kernels = find_kernels("native", isa)
    assert kernels is not None
    w = noise(out, inner, seed, kind)
    if kind == "not finite":
        w[torch.rand(out, inner, generator=torch.Generator().manual_seed(seed)) < 0.05] = (math.nan, math.inf)[seed % 2]
    wide = torch.full((out, inner + 7), math.nan, dtype=FLOATS[source])  # rows need not follow each other
    wide[:, :inner] = w
    rows = wide[:, :inner]
    matrices = [TensorPacked.empty(out, inner, WeightFormat.parse(form)) for _ in range(2)]
    for made in matrices:
        made.codes.fill(7)
        made.scales.fill(3)
    pieces = [(first, last) for first, last in ((min(cut, out), out), (0, min(cut, out))) if first < last]
    counts = [
        (
            matrices[0].pack_rows(first, rows[first:last]),
            kernels.pack(matrices[1], first, array(rows[first:last]), threads),
        )
        for first, last in pieces
    ]
    assert all(ours == theirs for ours, theirs in counts)
    if not any(ours for ours, _ in counts):
        assert np.array_equal(matrices[0].codes, matrices[1].codes)
        assert np.array_equal(matrices[0].scales.view(np.int16), matrices[1].scales.view(np.int16))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_the_reference_computes_with_packed_weights(
    form: str, wide: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the decoded weights, however many blocks are decoded at a time."""
    w, x, bias = noise(70, 90), noise(6, 90, seed=1), noise(1, 70, seed=2)[0]
    made = TensorPacked.empty(70, 90, WeightFormat.parse(form), bias.numpy())
    made.pack_rows(0, w)
    kernels = ReferenceKernels(wide)
    expected = kernels.linear(x, Dense(made.unpack(), bias))
    assert torch.allclose(kernels.linear(x, made), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(reference, "MOST_DECODED", 2 * LANES * 90)
    assert torch.allclose(kernels.linear(x, made), expected, rtol=1e-5, atol=1e-5)
    assert kernels.linear(x.bfloat16(), made).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("text", "name", "group"),
    [
        ("native", "native", 0),
        ("int8", "int8", 64),
        ("INT4", "int4", 32),
        (" int8 : 32 ", "int8", 32),
        ("int4:64", "int4", 64),
    ],
)
def test_formats_are_read(text: str, name: str, group: int) -> None:
    form = WeightFormat.parse(text)
    assert (form.name, form.group) == (name, group)
    assert WeightFormat.parse(str(form)) == form


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int3",
        "fp8",
        "int8:",
        "int8:16",
        "int5:32",
        "int4:32/256+min",
        "int8:x",
        "int8:-32",
        "bfloat16:32",
        "int8:32:1",
        "native:64",
        "int4:\u0663",
    ],
)
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"weights"):
        WeightFormat.parse(text)


def test_native_means_what_is_computed_in() -> None:
    assert WeightFormat.parse("native").resolved("bfloat16") == WeightFormat("bfloat16")
    assert WeightFormat.parse("int4").resolved("bfloat16") == WeightFormat("int4", 32)
