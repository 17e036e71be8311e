"""The model that was probably meant by a name that nothing has: a hint for the end of an error message.

Known are the model inside the package, model folders and GGUF files beside the path, models in the hub's cache, and
published models whose architecture we have.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from tokenwright.checkpoints.families import FAMILIES
from tokenwright.checkpoints.known import KNOWN

_ALIKE = 0.75  # of difflib's measure, from 0 to 1
_MOST = 2_000  # entries of a folder that are looked at


def nearest(text: str, *, planned: bool = False) -> str | None:
    """The known name that is most like `text`, as one would type it, or None.

    planned: published models that cannot be run but planned count too.
    """
    if len(text) > 200:
        return None
    runs = {name for family in FAMILIES for name in family.architectures}
    published = [name for name, config in KNOWN.items() if planned or config["architectures"][0] in runs]
    hub = [*_cached(), *published]
    known = {name.partition("/")[2].lower(): name for name in hub} | {name.lower(): name for name in hub}
    known |= {"stories": "stories"} | {name.lower(): name for name in _beside(text)}
    known = {key: name for key, name in known.items() if name != text}  # it was looked for under this very name
    found = get_close_matches(text.lower().rstrip("/"), known, 1, _ALIKE)
    return known[found[0]] if found else None


def _beside(text: str) -> Iterator[str]:
    """Model folders and GGUF files in the folder that a path names, written as the path is."""
    typed = text.rstrip("/")
    folder = typed[: typed.rfind("/") + 1]
    try:
        for one in islice(Path(folder).expanduser().iterdir(), _MOST):
            if one.suffix.lower() == ".gguf" or (one / "config.json").is_file():
                yield folder + one.name
    except (OSError, RuntimeError, ValueError):  # the folder is not there either, its user is unknown, or a NUL
        return


def _cached() -> Iterator[str]:
    """The names of the models in the hub's cache."""
    from huggingface_hub import constants

    try:
        for one in islice(Path(constants.HF_HUB_CACHE).iterdir(), _MOST):
            if one.name.startswith("models--"):
                yield one.name.removeprefix("models--").replace("--", "/", 1)
    except OSError:
        return
