"""`tokenwright quantize`: write a model with quantised weights: a folder that opens like any other, or a GGUF file."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tokenwright.checkpoints.files.local import local_folder
from tokenwright.checkpoints.packing.target import check_target
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.interrupt import interruptible
from tokenwright.cli.terminal.output import bar, remark, write
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat
from tokenwright.units import binary

SUFFIX, BLOCK = ".gguf", 32  # of a GGUF file, whose reader is slow to import

Paths = Annotated[
    list[str],
    Argument(
        metavar="[MODEL] TARGET",
        help="A Hugging Face name, a folder, or stories, the model inside, unless -m gives it; and where to write the "
        "quantised model: a folder, or a file OUT.gguf, that does not exist yet.",
        show_default=False,
    ),
]
Format = Annotated[
    str,
    Option(
        "--weights",
        help="int8 or int4, and perhaps a group, such as int4:64. In a GGUF file int8 (Q8_0), int4 (Q4_0) or bfloat16.",
    ),
]


def quantize(
    folder: Paths,
    model: opt.Model = None,
    weights: Format = "int8",
    lora: opt.Lora = None,
    revision: opt.Revision = None,
) -> None:
    """Write a model with quantised weights: a folder with the kernels' packed layout, or a GGUF file."""
    if len(folder) > 2:
        raise RequestError(f"two arguments are taken, the model and what to write, not {len(folder)}")
    named, target = (folder[0] if len(folder) == 2 else None), Path(folder[-1])
    if named is None and model is None:
        raise RequestError("a model and what to write are needed: tokenwright quantize MODEL FOLDER, or MODEL OUT.gguf")
    source, form = opt.the_model(named, model), WeightFormat.parse(weights)
    if target.suffix.lower() == SUFFIX:
        _write_file(source, target, form, weights, lora or [], revision)
        return
    check_target(target, form)
    local_folder(source, revision)
    from tokenwright.backends.layout import nbytes
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.checkpoints.packing.folder_writer import check_quantising, write_folder
    from tokenwright.checkpoints.packing.packer import pack_checkpoint

    with interruptible():
        checkpoint = Checkpoint.open(source, revision, progress=sys.stderr.isatty()).merged(lora or [])
        check_quantising(checkpoint, target, form)
        with bar("packing") as report:
            packed = pack_checkpoint(checkpoint, form, report)
        with bar("writing") as report:
            write_folder(checkpoint, target, form, packed, report)
    write(f"{target}: {form} weights, {binary(nbytes(packed))} (before: {binary(checkpoint.nbytes)})\n")


def _write_file(
    source: str, target: Path, form: WeightFormat, typed: str, lora: list[Path], revision: str | None
) -> None:
    if ":" in typed and form.group != BLOCK:
        raise RequestError(f"the blocks of a GGUF file have {BLOCK} inputs; give --weights {form.name}", "weights")
    local_folder(source, revision)
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.checkpoints.packing.gguf_writer import check_writing, write_gguf

    with interruptible():
        checkpoint = Checkpoint.open(source, revision, progress=sys.stderr.isatty()).merged(lora)
        contents = check_writing(checkpoint, target, form)
        with bar("writing") as report:
            nbytes = write_gguf(contents, target, report)
    for one in contents.remarks:
        remark(f"note: {one}")
    write(f"{target}: {form.name} weights, {binary(nbytes)} (before: {binary(checkpoint.nbytes)})\n")
