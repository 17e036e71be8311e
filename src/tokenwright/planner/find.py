"""Find a model's graph by the model's name or path."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenwright.backends.adapters import beside_bytes, not_beside
from tokenwright.backends.towers.picture_memory import PICTURE_MEMORY
from tokenwright.checkpoints.families.registry import family_of, parse_config, text_keys
from tokenwright.checkpoints.files import hub
from tokenwright.checkpoints.files.hub_gguf import download_gguf
from tokenwright.checkpoints.files.json_keys import read_settings
from tokenwright.checkpoints.files.known import KNOWN, known_name
from tokenwright.checkpoints.files.local import local_config
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.gguf.header import SUFFIX
from tokenwright.checkpoints.gguf.tower_files import projector_beside
from tokenwright.checkpoints.lora import read_adapter
from tokenwright.checkpoints.packed_file import own_quantisation
from tokenwright.checkpoints.quantised.published import read_scheme
from tokenwright.checkpoints.towers.families import NamedTower
from tokenwright.checkpoints.towers.open_vision import described_tower, read_vision
from tokenwright.errors import CheckpointError
from tokenwright.formats import DTYPE_BYTES, DType, WeightFormat
from tokenwright.models.graph import Graph
from tokenwright.pictures.processors import largest
from tokenwright.units import binary


@dataclass(frozen=True)
class Blueprint:
    """A model's graph and formats. dtype: before quantisation."""

    graph: Graph
    dtype: DType
    packed: WeightFormat | None = None  # of a folder that `quantize` wrote
    remarks: tuple[str, ...] = ()
    kept: Mapping[str, WeightFormat] = field(default_factory=dict)  # of matrices that are copied unchanged
    main: WeightFormat | None = None  # of most matrices


def find(model: str | Path) -> tuple[str, Blueprint]:
    """The model's display name and blueprint; a local path wins. Raises CheckpointError."""
    name, file = str(model), local_config(model)
    if file is None:
        known = known_name(name)
        if known is not None:
            return known, _drawn(KNOWN[known], known)
        of_hub = hub.is_hub_name(name)
        file = hub.fetch_config(name) if of_hub else download_gguf(name, None, progress=False)
    if file.suffix.lower() == SUFFIX:
        return name, _in_file(file)
    return name, _drawn(read_settings(file), str(file))


def adapter_bytes(graph: Graph, folder: Path) -> int:
    family = family_of(graph.architecture)
    adapter = read_adapter(folder, graph, family.sources(graph), family.bare, lambda *_: True)
    if unable := not_beside(graph, adapter.updates):
        raise CheckpointError(
            f"{folder} updates {unable[0]}, so it can only be merged; leave it out, as a merged adapter takes no memory"
        )
    return beside_bytes(graph, adapter.updates)


def _in_file(path: Path) -> Blueprint:
    found, native = Checkpoint.open(path), WeightFormat("native")
    dtype = found.config.dtype
    held = "; ".join(map(str, found.held(native, dtype)))
    main = found.main_format(native, dtype)
    what = "file" if path.is_file() else "folder"
    remarks: tuple[str, ...] = (f"the {what} has {held}",)
    with suppress(CheckpointError):  # raised again when the tower is used
        if path.is_file() and (beside := projector_beside(path)) is not None:
            remarks += _with_tower(read_vision(found, found.tokenizer(), beside).sight, dtype)
    return Blueprint(found.graph, dtype, None, remarks, found.kept(native), main)


def _with_tower(sight: NamedTower, dtype: DType) -> tuple[str, str]:
    size, most = sight.tower.parameters * DTYPE_BYTES[dtype], largest(sight.processor)
    kept = f"a tower of {binary(size)}, and {binary(PICTURE_MEMORY)} at most for the rows of pictures"
    work = f"{binary(sight.tower.working_bytes(most))} while one of {most:,} pixels, the most, is computed"
    return f"the text model alone; the first picture adds {kept}", f"a picture adds {work}"


def _drawn(config: Mapping[str, Any], where: str) -> Blueprint:
    settings = dict(config)
    own = own_quantisation(settings, where)
    scheme = read_scheme(settings, where)
    if scheme is not None and any(Path(where).parent.glob("*.safetensors")):
        return _in_file(Path(where).parent)
    _, parsed, graph = parse_config(settings, where)
    if own is not None:
        return Blueprint(graph, own[1], own[0])
    about = text_keys(config, where)
    named = str(about.get("dtype") or about.get("torch_dtype")).removeprefix("torch.")
    remarks: tuple[str, ...] = ()
    if named != parsed.dtype:
        remarks += ("config.json names no dtype that we know: float32 is assumed",)
    try:
        remarks += _with_tower(described_tower(config, parsed, where), parsed.dtype)
    except CheckpointError:
        remarks += ("the text model alone, without its image encoder",) if config.get("text_config") else ()
    if parsed.next_layers:
        remarks += ("without the layers that predict a second token (MTP)",)
    if scheme is not None:
        remarks += (
            f"its files hold weights that another tool quantised; native is {parsed.dtype}, what they decode to",
        )
    return Blueprint(graph, parsed.dtype, remarks=remarks)
