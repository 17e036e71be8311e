"""K and V of the chat's last conversations in files that survive a reload: cache files, as LLM.save_cache writes them.

A file of another model, or of other weights, is refused by its fingerprint and removed. engine.ts mounts the folder
over this origin's private files.
"""

import hashlib
import logging
from pathlib import Path

from tokenwright.errors import TokenwrightError
from tokenwright.llm.llm import LLM

FOLDER = Path("/kept")
MOST_FILES, MOST_BYTES = 8, 200 * 10**6

log = logging.getLogger(__name__)


def keep(llm: LLM, conversation: str, ids: list[int]) -> None:
    """Write the pages of a text. conversation: names the file, so that its next state takes its place."""
    if not FOLDER.is_dir():
        return
    name = hashlib.sha256(conversation.encode()).hexdigest()[:16]
    try:
        llm.save_cache(FOLDER / f"{name}.kv", ids)
    except (TokenwrightError, OSError) as error:
        log.warning("K and V are not kept: %s", error)
    total = 0
    for count, file in enumerate(_newest()):
        total += file.stat().st_size
        if count and (count >= MOST_FILES or total > MOST_BYTES):
            file.unlink()


def restore(llm: LLM) -> None:
    """Put what is kept into the prefix cache, the newest last."""
    for file in reversed(_newest() if FOLDER.is_dir() else []):
        try:
            llm.load_cache(file)
        except (TokenwrightError, OSError):
            file.unlink()


def _newest() -> list[Path]:
    return sorted(FOLDER.glob("*.kv"), key=lambda file: file.stat().st_mtime, reverse=True)
