"""Write a folder of packed weights, which opens like any other model folder."""

import json
import shutil
from pathlib import Path

from tokenwright.backends.layout import Weights
from tokenwright.checkpoints.files import hub
from tokenwright.checkpoints.files.json_keys import BESIDE, read_json
from tokenwright.checkpoints.folder import Checkpoint, Report
from tokenwright.checkpoints.packed_file import quantisation, write_weights
from tokenwright.checkpoints.packing.target import check_target
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.regular_file import draft_folder, sweep


def check_quantising(checkpoint: Checkpoint, folder: Path, form: WeightFormat) -> None:
    """Raises RequestError or CheckpointError, before any work, if `write_folder` would refuse these arguments."""
    check_target(folder, form)
    if checkpoint.path.is_file():
        kind = f"{checkpoint.path} is a GGUF file, which is not written as a folder"
        raise RequestError(f"{kind}; open it with --weights {form}")
    if checkpoint.packed is not None:
        kept = f"{checkpoint.path} is quantised already ({checkpoint.packed})"
        raise RequestError(f"{kept}; give the model it is made from")
    checkpoint.tokenizer()  # a folder without one does not open


def write_folder(
    checkpoint: Checkpoint, folder: Path, form: WeightFormat, weights: Weights, report: Report | None = None
) -> None:
    """Write a new folder of packed weights with the model's small files. Raises RequestError, CheckpointError."""
    check_quantising(checkpoint, folder, form)
    sweep(folder.parent, folder.name)
    try:
        with draft_folder(folder) as draft:
            settings = read_json(checkpoint.path / "config.json")
            settings.pop("quantization", None)  # MLX's
            if not checkpoint.graph.tied_head:  # also if the config says otherwise
                settings["tie_word_embeddings"] = False
                settings.get("text_config", {}).update(tie_word_embeddings=False)
            settings["quantization_config"] = quantisation(form, checkpoint.config.dtype)
            (draft / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            for name in set(hub.SMALL) - {"config.json", hub.INDEX, *BESIDE}:
                for file in checkpoint.path.glob(name):
                    copy = draft / file.relative_to(checkpoint.path)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy)
            write_weights(draft / hub.WEIGHTS, weights, form, report)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
