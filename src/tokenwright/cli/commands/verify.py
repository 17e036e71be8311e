"""`tokenwright verify`: check that this machine computes the published bits, or its GPU the CPU's numbers."""

from typing import Annotated

from typer import Exit, Option

from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import write, write_json
from tokenwright.errors import RequestError

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")  # of the weights on a GPU
Place = Annotated[
    str, Option(help="cpu: compare with the published bits; gpu or gpu:N: compare a GPU's kernels with the CPU's.")
]


def verify(device: Place = "cpu", json_: opt.Json = False) -> None:
    """Compare the bits of the built-in model's logits with the published ones, or check a GPU's kernels.

    Exits with 1 if they differ.
    """
    from tokenwright.backends.device import resolve_device

    place = resolve_device(device)
    if place.type not in ("cpu", "gpu"):
        raise RequestError(f"device {device!r} has no published bits; use cpu, gpu or gpu:N", "device")
    if not (_gpu(place.index, json_) if place.type == "gpu" else _cpu(json_)):
        raise Exit(1)


def _cpu(json_: bool) -> bool:
    from tokenwright.backends.native.native_kernels import arithmetic
    from tokenwright.bench import published_bits as bits

    isa = bits.verified_kernels()
    rounding = arithmetic(isa)
    expected = bits.published()[rounding]
    found = {form: bits.logits_hash(form) for form in bits.FORMATS}
    if json_:
        rows = {form: {"sha256": one, "published": expected[form]} for form, one in found.items()}
        write_json({"kernels": isa, "arithmetic": rounding, "same": found == expected, "formats": rows}, indent=2)
    else:
        for form, one in found.items():
            write(f"{form:<8}  {one}  {'as published' if one == expected[form] else f'published: {expected[form]}'}\n")
        says = "computes the published bits" if found == expected else "does not compute the published bits"
        write(f"this machine {says} ({isa} kernels, {rounding} arithmetic)\n")
    return found == expected


def _gpu(index: int | None, json_: bool) -> bool:
    from dataclasses import asdict

    from tokenwright.backends.wgpu.gpu import open_gpu
    from tokenwright.backends.wgpu.proof import proof
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.checkpoints.packing.packer import load_packed
    from tokenwright.formats import WeightFormat

    gpu, checkpoint, found, alike = open_gpu(index), Checkpoint.open("stories"), {}, True
    for form in FORMATS:
        gpu.proved.clear()  # prove all again
        weights = load_packed(checkpoint, WeightFormat.parse(form), "float32")
        found[form], wide = proof(gpu, checkpoint.graph, weights, "float32")
        alike = alike and wide
    sound = all(one.sound for each in found.values() for one in each)
    if json_:
        formats = {form: [asdict(one) for one in each] for form, each in found.items()}
        write_json({"adapter": gpu.name, "same": sound, "alike": alike, "formats": formats}, indent=2)
        return sound
    write("weights   cache   difference  allowed  kernel\n")
    for form, one in ((form, one) for form, each in found.items() for one in each):
        told = f"{one.difference:10.1e}  {one.allowed:7.1e}  {one.kernel}{'' if one.sound else '  DIFFERS'}"
        write(f"{form:<8}  {one.kv:<6}  {told}\n")
    bits = "with the same bits in any batch" if alike else "row by row, as its wider tiles have other bits"
    write(f"{gpu.name} computes {f'the numbers of the CPU, {bits}' if sound else 'other numbers than the CPU'}\n")
    return sound
