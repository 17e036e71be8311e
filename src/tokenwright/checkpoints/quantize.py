"""Write a folder of packed weights, which opens like any other model folder."""

import json
import os
import shutil
from pathlib import Path

from tokenwright.backends.layout import Weights
from tokenwright.checkpoints import hub
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.packed_file import quantisation, write_weights
from tokenwright.checkpoints.strict import read_json
from tokenwright.config import WeightFormat
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.text import Tokenizer


def check_quantising(checkpoint: Checkpoint, folder: Path, form: WeightFormat) -> None:
    """Raises RequestError, before any work, if `write_folder` would refuse these arguments.

    Raises CheckpointError for a model without a usable tokenizer.
    """
    if not form.quantised:
        raise RequestError(f"{form} is no quantised format; choose int8 or int4, and perhaps a group, such as int4:64")
    if checkpoint.packed is not None:
        raise RequestError(
            f"{checkpoint.path} is quantised already ({checkpoint.packed}); give the model it is made from"
        )
    if folder.exists() or folder.is_symlink():
        raise RequestError(f"{folder} exists already and is not overwritten; remove it, or give another folder")
    Tokenizer.load(checkpoint.path, vocab_size=checkpoint.config.vocab_size)  # without it the folder cannot be opened


def write_folder(
    checkpoint: Checkpoint, folder: Path, form: WeightFormat, weights: Weights, report: Report | None = None
) -> None:
    """Write a new folder with packed weights, config.json and the model's other small files.

    The folder appears complete or not at all. Raises RequestError as `check_quantising` does, CheckpointError if it
    cannot be written. `report` is called with (bytes written, total bytes).
    """
    check_quantising(checkpoint, folder, form)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        settings = read_json(checkpoint.path / "config.json")
        settings["quantization_config"] = quantisation(form, checkpoint.config.dtype)
        (beside / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for name in hub.SMALL:
            if name not in ("config.json", hub.INDEX) and (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, beside / name)
        write_weights(beside / hub.WEIGHTS, weights, form, report)
        beside.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
