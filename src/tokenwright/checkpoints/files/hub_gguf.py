"""Downloads GGUF files from the hub: `owner/name:file.gguf`, or `owner/name:Q4_K_M` for the file of that type."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from tokenwright.checkpoints.files import hub
from tokenwright.errors import CheckpointError

_NAME = re.compile(r"(?P<name>[^:]+|https?://[^:]+):(?P<file>\w[\w.+/ -]*)", re.ASCII)
_PART = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.DOTALL)
_MOST_PARTS = 4096
_SUFFIX = ".gguf"
_SHOWN = 12  # files named in a message


class GgufName(NamedTuple):
    repository: str
    file: str  # its path in the repository, or a part of its name


def read_gguf_name(text: str) -> GgufName | None:
    """A GGUF file's name on the hub, or None.

    >>> read_gguf_name("Qwen/Qwen3-0.6B-GGUF:Q8_0")
    GgufName(repository='Qwen/Qwen3-0.6B-GGUF', file='Q8_0')
    """
    match = _NAME.fullmatch(text)
    if match is None or not hub.is_hub_name(match["name"]) or ".." in match["file"]:
        return None
    return GgufName(match["name"], match["file"])


def part_names(name: str) -> list[str]:
    """The files of a split model in order; only the name itself if it is not split."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) <= _MOST_PARTS:
        return [name]
    count = int(match["count"])
    return [f"{match['base']}-{number:05}-of-{count:05}{match['suffix']}" for number in range(1, count + 1)]


def model_files(folder: Path) -> dict[str, list[Path]]:
    """The GGUF models below a folder: each model's files, by the name of the first."""
    names = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.suffix.lower() == _SUFFIX)
    found = {_parts(name)[0]: _parts(name) for name in names}
    return {first: [folder / name for name in parts if (folder / name).exists()] for first, parts in found.items()}


def download_gguf(text: str, revision: str | None, progress: bool, *, again: bool = False) -> Path:
    """Download a GGUF file and its model's other parts; return the first one's path."""
    found = read_gguf_name(text)
    if found is None:
        raise CheckpointError(f"{text[:200]} is no GGUF file on the hub; give owner/name:FILE.gguf or owner/name:Q8_0")
    name, revision = hub.named(found.repository, revision)
    offline = hub.unreachable(name, revision, refuse=again)
    if offline:
        commit = hub.snapshot(name, revision, [], progress, offline)
        files = sorted(str(one.relative_to(commit)) for one in commit.rglob("*") if one.is_file())
    else:
        files = hub.listing(name, revision)
    wanted = _parts(_chosen(found.file, files, name, offline))
    folder = hub.snapshot(name, revision, wanted, progress, offline)
    if missing := [one for one in wanted if not (folder / one).is_file()]:
        lacks = f"{name} on the hub lacks {missing[0]}, a part of its model"
        raise CheckpointError(hub.incomplete(name, offline) if offline else lacks)
    hub.warn(offline, name)
    return folder / wanted[0]


def _parts(file: str) -> list[str]:
    folder, slash, last = file.rpartition("/")
    return [folder + slash + one for one in part_names(last)]


def _chosen(wanted: str, files: Iterable[str], name: str, offline: str) -> str:
    models = sorted({_parts(one)[0] for one in files if one.lower().endswith(_SUFFIX)})
    where = f"{name} in the local cache (the hub cannot be reached: {offline})" if offline else f"{name} on the hub"
    if not models:
        raise CheckpointError(f"{where} has no GGUF file; leave out :{wanted}, or give another repository")
    if wanted.lower().endswith(_SUFFIX):
        found = [one for one in models if any(wanted in (part, part.rpartition("/")[2]) for part in _parts(one))]
    else:
        part = re.escape(wanted)
        found = [one for one in models if re.search(rf"(?<![a-z0-9_]){part}(?![a-z0-9_])", one, re.IGNORECASE)]
        found = found or [one for one in models if wanted.lower() in one.lower()]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{wanted} fits {len(found)} files of {where}: {_few(found)}; give the name of one")
    words = {word: one for one in models for word in (*re.split(r"[-./]", one.lower()), one.lower().rpartition("/")[2])}
    near = get_close_matches(wanted.lower(), words, 1, 0.6)
    meant = f"did you mean {words[near[0]]}? It" if near else "it"
    raise CheckpointError(f"{where} has no GGUF file {wanted}; {meant} has {_few(models)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
