"""`tokenwright quantize`: write a folder with quantised weights, which opens like any other model."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tokenwright.checkpoints.files.local import local_folder
from tokenwright.checkpoints.packing.target import check_target
from tokenwright.cli.options.shared import Lora, Model, Revision, the_model
from tokenwright.cli.terminal.interrupt import interruptible
from tokenwright.cli.terminal.output import bar, write
from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat
from tokenwright.units import binary

Paths = Annotated[
    list[str],
    Argument(
        metavar="[MODEL] FOLDER",
        help="The model (a Hugging Face name, a folder, or stories) unless -m gives it, and the folder to write, which "
        "must not exist.",
        show_default=False,
    ),
]
Format = Annotated[str, Option("--weights", help="int8 or int4, with a group size if given, as in int4:64.")]


def quantize(
    folder: Paths, model: Model = None, weights: Format = "int8", lora: Lora = None, revision: Revision = None
) -> None:
    """Write a folder of the model with quantised weights, in the kernels' packed layout."""
    if len(folder) > 2:
        raise RequestError(f"give two arguments, MODEL and FOLDER, not {len(folder)}")
    named, target = (folder[0] if len(folder) == 2 else None), Path(folder[-1])
    if named is None and model is None:
        raise RequestError("give the model and the folder to write: tokenwright quantize MODEL FOLDER")
    source, form = the_model(named, model), WeightFormat.parse(weights)
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
