"""Checks the arguments of `tokenwright quantize`, without torch and before the model is opened."""

from pathlib import Path

from tokenwright.errors import RequestError
from tokenwright.formats import WeightFormat


def check_target(folder: Path, form: WeightFormat) -> None:
    """Raises RequestError for a format that is not quantised and for a folder that exists or cannot be made."""
    if folder.suffix.lower() == ".gguf":
        raise RequestError(
            "Tokenwright reads GGUF files and writes none; llama.cpp's convert_hf_to_gguf.py writes them"
        )
    if not form.quantised:
        raise RequestError(f"{form} is no quantised format; choose int8 or int4, and perhaps a group, such as int4:64")
    try:
        there = folder.exists() or folder.is_symlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RequestError(f"{str(folder)[:200]!r} cannot be written: {error}") from error
    if there:
        raise RequestError(f"{folder} exists already and is not overwritten; remove it, or give another folder")
