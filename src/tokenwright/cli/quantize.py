"""`tokenwright quantize`: write a model with quantised weights to a folder that opens like any other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tokenwright.checkpoints.local import local_folder
from tokenwright.checkpoints.target import check_target
from tokenwright.cli import options as opt
from tokenwright.cli.facts import binary
from tokenwright.cli.interrupt import interruptible
from tokenwright.cli.output import bar, write
from tokenwright.config import WeightFormat
from tokenwright.errors import RequestError

Paths = Annotated[
    list[str],
    Argument(
        metavar="[MODEL] FOLDER",
        help="A Hugging Face name, a folder, or stories, the model inside, unless -m gives it; and where to write the "
        "quantised model: a folder that does not exist yet.",
        show_default=False,
    ),
]
Format = Annotated[str, Option("--weights", help="int8 or int4, and perhaps a group, such as int4:64.")]


def quantize(
    folder: Paths,
    model: opt.Model = None,
    weights: Format = "int8",
    revision: opt.Revision = None,
) -> None:
    """Write a model with quantised weights to FOLDER: config, tokenizer, and weights in the kernels' packed layout."""
    if len(folder) > 2:
        raise RequestError(f"two arguments are taken, the model and the folder to write, not {len(folder)}")
    named, target = (folder[0] if len(folder) == 2 else None), Path(folder[-1])
    if named is None and model is None:
        raise RequestError("a model and a folder to write are needed: tokenwright quantize MODEL FOLDER")
    source, form = opt.the_model(named, model), WeightFormat.parse(weights)
    check_target(target, form)
    local_folder(source, revision)
    from tokenwright.backends.layout import nbytes
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.checkpoints.packing import pack_checkpoint
    from tokenwright.checkpoints.quantize import check_quantising, write_folder

    with interruptible():
        checkpoint = Checkpoint.open(source, revision, progress=sys.stderr.isatty())
        check_quantising(checkpoint, target, form)
        with bar("packing") as report:
            packed = pack_checkpoint(checkpoint, form, report)
        with bar("writing") as report:
            write_folder(checkpoint, target, form, packed, report)
    write(f"{target}: {form} weights, {binary(nbytes(packed))} (before: {binary(checkpoint.nbytes)})\n")
