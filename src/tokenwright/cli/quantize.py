"""`tokenwright quantize`: write a model with quantised weights to a folder that opens like any other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tokenwright.cli import options as opt
from tokenwright.cli.facts import binary
from tokenwright.cli.output import bar, write
from tokenwright.config import WeightFormat

Folder = Annotated[Path, Argument(help="Where to write it; it must not exist yet.")]
Format = Annotated[str, Option("--weights", help="int8 or int4, and perhaps a group, such as int4:64.")]


def quantize(
    model: Annotated[str, Argument(help="A Hugging Face name, a folder, or stories for the model inside.")],
    folder: Folder,
    weights: Format = "int8",
    revision: opt.Revision = None,
) -> None:
    """Write MODEL with quantised weights to FOLDER: config, tokenizer, and weights in the kernels' packed layout."""
    from tokenwright.backends.layout import nbytes
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.checkpoints.packing import pack_checkpoint
    from tokenwright.checkpoints.quantize import check_quantising, write_folder

    form = WeightFormat.parse(weights)
    checkpoint = Checkpoint.open(model, revision, progress=sys.stderr.isatty())
    check_quantising(checkpoint, folder, form)
    with bar("packing") as report:
        packed = pack_checkpoint(checkpoint, form, report)
    with bar("writing") as report:
        write_folder(checkpoint, folder, form, packed, report)
    write(f"{folder}: {form} weights, {binary(nbytes(packed))} (before: {binary(checkpoint.nbytes)})\n")
