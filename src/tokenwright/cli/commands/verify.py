"""`tokenwright verify`: whether this machine computes the published bits."""

from typer import Exit

from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import write, write_json


def verify(json_: opt.Json = False) -> None:
    """Compute the logits of the model inside, and compare their bits with the published ones.

    Exits with 1 if they differ.
    """
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
    if found != expected:
        raise Exit(1)
