"""A checkpoint: a checked folder, local or from the hub, and its weights. Nothing in it is run or unpickled.

Missing or damaged files, unknown keys and wrong shapes are refused before memory for weights is allocated.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tokenwright.arrays import DTYPES as ARRAYS
from tokenwright.arrays import Array, finite, narrowed, widened
from tokenwright.backends.adapters import Update
from tokenwright.checkpoints.families.family import Family, TensorSource, next_layer, tower_of
from tokenwright.checkpoints.families.registry import family_of, parse_config, text_keys
from tokenwright.checkpoints.files import hub
from tokenwright.checkpoints.files.generation_config import GenerationDefaults, parse_generation
from tokenwright.checkpoints.files.hub_gguf import download_gguf, read_gguf_name
from tokenwright.checkpoints.files.json_keys import read_json, read_settings, shown
from tokenwright.checkpoints.files.local import local_folder, weight_files
from tokenwright.checkpoints.files.pooling import PoolingConfig, read_pooling
from tokenwright.checkpoints.files.safetensors import Stored, read_header
from tokenwright.checkpoints.fit import check_fit, few
from tokenwright.checkpoints.gguf.header import BLOCKS
from tokenwright.checkpoints.lora import Adapter, read_adapter
from tokenwright.checkpoints.memory_form import HeldTensors, as_stored, held, without
from tokenwright.checkpoints.packed_file import own_quantisation, read_packed_header
from tokenwright.checkpoints.quantised.codecs import Compound, described_at
from tokenwright.checkpoints.second_names import HEAD, respelled
from tokenwright.checkpoints.tensor_reader import DTYPES, piece_of, read_rows, read_whole
from tokenwright.config import ModelConfig
from tokenwright.errors import CheckpointError
from tokenwright.formats import DTYPE_BYTES, DType, WeightFormat
from tokenwright.models.graph import Graph
from tokenwright.models.op import Matrix
from tokenwright.text import Tokenizer
from tokenwright.text.files import TokenizerFiles
from tokenwright.text.metadata import read_metadata

if TYPE_CHECKING:
    from tokenwright.checkpoints.quantised.published import Scheme

log = logging.getLogger(__name__)

Report = Callable[[int, int], None]  # bytes read so far, total bytes
_Tensors = dict[str, Stored]

_MTP = "MTP layers"
_COMPARED = 1 << 24  # bytes read at a time to compare a tied head with the embeddings


@dataclass(frozen=True)
class Checkpoint:
    """A checked model folder, or a GGUF file. `config.dtype` is the dtype of most of the stored bytes."""

    path: Path  # of the folder, or of the first file
    config: ModelConfig
    graph: Graph  # the model's ops, and so the names and shapes of its tensors
    generation: GenerationDefaults
    sources: Mapping[str, TensorSource]  # our name -> the checkpoint's
    stored: Mapping[str, Stored]  # the checkpoint's name, without prefix and buffers -> its bytes
    stamps: Mapping[Path, tuple[int, int]]  # of the weight files: length in bytes, mtime in ns
    packed: WeightFormat | None = None  # set for a folder that `tokenwright quantize` wrote
    as_stored: Mapping[str, WeightFormat] = field(default_factory=dict)  # matrices that one of our forms holds exactly
    texts: TokenizerFiles | None = None  # the tokenizer in a GGUF file
    adapters: tuple[Adapter, ...] = ()  # merged as the weights are read
    following: Mapping[str, Stored] = field(default_factory=dict)  # MTP layers
    layout: Family | None = None  # the names in a GGUF file
    skipped: Mapping[str, int] = field(default_factory=dict)  # how many tensors each skipped part has, such as a tower
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    @classmethod
    def open(cls, name_or_path: str | Path, revision: str | None = None, progress: bool = False) -> "Checkpoint":
        """Open a folder, GGUF file, "stories", or owner/name[:FILE.gguf] on the hub. Raises CheckpointError."""
        folder = locate(name_or_path, revision, progress)
        if not folder.is_dir():
            return cls._open_gguf(folder)
        settings = read_settings(folder / "config.json")
        own = own_quantisation(settings, str(folder / "config.json"))
        scheme = _read_scheme(settings, str(folder / "config.json"))
        family, config, graph = parse_config(settings, str(folder / "config.json"))
        suggested = folder / "generation_config.json"
        about = text_keys(settings, str(folder / "config.json"))
        generation = parse_generation(read_json(suggested) if suggested.exists() else {}, about, str(suggested))
        generation = _within(generation, config.vocab_size, str(folder))
        if own is not None:
            form, dtype = own
            file = folder / hub.WEIGHTS
            stored = read_packed_header(file, graph, form)
            sources = {name: TensorSource(name) for name in stored}
            stamps = {file: stamp(file)}
            config, pooling = replace(config, dtype=dtype), read_pooling(folder)
            return cls(folder, config, graph, generation, sources, stored, stamps, form, pooling=pooling)
        stored, following, skipped = _read_headers(folder, family, config)
        graph = family.fitted(graph, stored)
        sources = family.sources(graph, plain=scheme is None)
        if scheme is not None:
            from tokenwright.checkpoints.quantised.published import gather

            stored, following = (gather(one, scheme, read_whole) for one in (stored, following))
        joined = {one.dtype for one in stored.values() if isinstance(one, Compound)}
        both = [stored[name] for name in (HEAD, sources["embed.weight"].name) if name in stored]
        if graph.tied_head and len(both) == 2 and not _same_numbers(*both):
            log.warning("%s ties the head to the embeddings, but its %s differs and is used", folder, HEAD)
            head = replace(graph.head, matrix=Matrix.single("head", graph.vocab_size, graph.width))
            graph, config = replace(graph, head=head), replace(config, tied_head=False)
            sources = family.sources(graph, plain=scheme is None)
        sources, stored, writers = respelled(graph, sources, stored)
        check_fit(folder, graph, sources, stored, dtypes=(*DTYPES, *joined), writers=writers)
        wanted = {source.name for source in sources.values()}
        dtype = _dtype_of(one for name, one in stored.items() if name in wanted and one.dtype in DTYPES)
        stamps = {file: stamp(file) for file in {one.file for one in stored.values()}}
        forms = as_stored(graph, sources, stored) if joined else {}
        found = (replace(config, dtype=dtype), graph, generation, sources, stored, stamps)
        return cls(folder, *found, as_stored=forms, following=following, skipped=skipped, pooling=read_pooling(folder))

    @classmethod
    def _open_gguf(cls, file: Path) -> "Checkpoint":
        from tokenwright.checkpoints.gguf.checkpoint import read_model
        from tokenwright.checkpoints.gguf.header import read_whole_gguf

        (file, *others), header = read_whole_gguf(file)
        model = read_model(header, str(file), lambda one: widened(read_rows(one, 0, one.shape[0])).flatten().tolist())
        check_fit(file, model.graph, model.sources, model.stored, "its metadata", (*DTYPES, *BLOCKS))
        texts = read_metadata(header.metadata, str(file))
        config = replace(model.config, dtype=_dtype_of_blocks(model.stored.values()))
        generation = _within(model.generation, config.vocab_size, str(file))
        forms = as_stored(model.graph, model.sources, model.stored)
        stamps = {one: stamp(one) for one in (file, *others)}
        found = (config, model.graph, generation, model.sources, model.stored, stamps, None, forms, texts)
        skipped = {_MTP: len(model.following)} if model.following else {}
        _tell_skipped(file, skipped, reads=model.layout.following is not None)
        beside = (model.following, model.layout, skipped, PoolingConfig(model.pooling or "mean"))
        return cls(file, *found, (), *beside)

    def adapter(self, folder: str | Path) -> Adapter:
        family = family_of(self.config.architecture)
        sources = family.sources(self.graph)
        ours = {source.name: name for name, source in sources.items()}
        ours |= {HEAD: "embed.weight"} if self.graph.tied_head else {}

        def copied(name: str, one: Stored) -> bool:
            source = self.sources.get(ours.get(name, ""))
            return source is not None and _same_numbers(self.stored[source.name], one)

        return read_adapter(Path(folder), self.graph, sources, family.bare, copied)

    def merged(self, folders: Sequence[str | Path]) -> "Checkpoint":
        """This checkpoint with LoRA adapters added to the weights as they are read: W + scale B A, in fp32.

        Raises CheckpointError as `adapter` does, and for a folder of packed weights.
        """
        if folders and self.packed is not None:
            raise CheckpointError(
                f"the weights in {self.path} are packed as {self.packed}, and an adapter is merged before packing; "
                "give the model that they were made from, or open it with the adapter beside them (adapters)"
            )
        adapters = tuple(self.adapter(folder) for folder in folders)
        changed = {part for one in adapters for part in one.updates}
        kept = without(self.graph, self.as_stored, changed)
        return replace(self, adapters=(*self.adapters, *adapters), as_stored=kept)

    @cached_property
    def updates(self) -> Mapping[str, tuple[Update, ...]]:
        names = {name for one in self.adapters for name in one.updates}
        return {name: tuple(one.updates[name] for one in self.adapters if name in one.updates) for name in names}

    def kept(self, form: WeightFormat) -> Mapping[str, WeightFormat]:
        """The matrices, and parts of joined ones, whose codes and scales are copied for `form`, with their formats."""
        return self.as_stored if form.name == "native" else {}

    def main_format(self, form: WeightFormat, dtype: DType) -> WeightFormat:
        """The format of most weights in memory for `form`, where native matrices are `dtype`."""
        form = (self.packed or form) if not self.kept(form) else form
        sizes = {form.resolved(dtype): 0}
        for part, kept in self.kept(form).items():
            sizes[kept] = sizes.get(kept, 0) + prod(self.graph.shapes[f"{part}.weight"])
        sizes[form.resolved(dtype)] = self.parameters - sum(sizes.values())
        return max(sizes, key=lambda one: sizes[one])

    def held(self, form: WeightFormat, dtype: DType) -> list[HeldTensors]:
        """How each type of a GGUF file, or of quantised matrices, is held in memory; else empty."""
        if self.path.is_dir() and not any(isinstance(one, Compound) for one in self.stored.values()):
            return []
        return held(self.graph, self.sources, self.stored, form.resolved(dtype), self.kept(form))

    def tokenizer(self) -> Tokenizer:
        if self.texts is not None:
            return Tokenizer(self.texts, self.config.vocab_size)
        return Tokenizer.load(self.path, vocab_size=self.config.vocab_size)

    @property
    def parameters(self) -> int:
        return self.graph.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as stored, a tied head counted once."""
        return sum(self.stored[name].nbytes for name in {one.name for one in self.sources.values()})

    def tensors(self, dtype: DType | None = None, report: Report | None = None) -> dict[str, Array]:
        """The weights under our names, linear ones as [out, in], in `dtype` (None: `config.dtype`).

        Raises CheckpointError for packed weights, and for values that are not finite before or after the conversion.
        """
        if self.packed is not None:
            kept_as = f"the weights in {self.path} are packed as {self.packed}"
            raise CheckpointError(f"{kept_as}; they are read only as such")
        target: DType = dtype or self.config.dtype
        users: dict[str, list[str]] = {}
        for ours, source in self.sources.items():
            users.setdefault(source.name, []).append(ours)
        found: dict[str, Array] = {}
        done, total = 0, self.nbytes
        for theirs in sorted(users, key=lambda name: (self.stored[name].file, self.stored[name].start)):
            stored = self.stored[theirs]
            raw = read_rows(stored, 0, stored.shape[0])
            for ours in users[theirs]:
                source = self.sources[ours]
                piece = piece_of(raw, source)
                for update in self.updates.get(ours.removesuffix(".weight"), ()):
                    piece = update.added_to(piece, 0)
                kept = narrowed(piece, ARRAYS["float32" if source.plus or source.wide else target])
                view = kept is piece and piece is not raw  # a view would keep all of `raw`
                found[ours] = np.array(kept, order="C") if view else np.ascontiguousarray(kept)
                if not finite(found[ours]):
                    refuse_values(raw, theirs, stored.file, target)
            done += self.stored[theirs].nbytes
            if report is not None:
                report(done, total)
        return {name: found[name] for name in self.graph.shapes if name in found}


def stamp(file: Path) -> tuple[int, int]:
    """A file's length in bytes and its mtime in nanoseconds."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def locate(name_or_path: str | Path, revision: str | None, progress: bool) -> Path:
    """The model's folder or GGUF file; a local folder takes precedence over the hub."""
    folder = local_folder(name_or_path, revision)
    if folder is None and read_gguf_name(str(name_or_path)):
        return download_gguf(str(name_or_path), revision, progress)
    return hub.download(str(name_or_path), revision, progress, check_config) if folder is None else folder


def check_config(folder: Path) -> None:
    """Raises CheckpointError for a model that Tokenwright cannot run, before its weights are downloaded."""
    where = str(folder / "config.json")
    settings = read_settings(folder / "config.json")
    own_quantisation(settings, where)
    _read_scheme(settings, where)
    parse_config(settings, where)


def _read_scheme(settings: dict[str, Any], where: str) -> "Scheme | None":
    if described_at(settings) is None:
        return None
    from tokenwright.checkpoints.quantised.published import read_scheme

    return read_scheme(settings, where)


def _within(generation: GenerationDefaults, vocab_size: int, where: str) -> GenerationDefaults:

    def within(key: str, ids: Sequence[int]) -> tuple[int, ...]:
        if beyond := [str(token) for token in ids if token >= vocab_size]:
            log.warning("%s: %s has %s, beyond the model's %d ids; left out", where, key, few(beyond), vocab_size)
        return tuple(token for token in ids if token < vocab_size)

    own, banned = within("eos_token_id", generation.eos_ids), within("suppress_tokens", generation.banned_ids or ())
    return replace(generation, eos_ids=own, banned_ids=banned or None)


def _read_headers(folder: Path, family: Family, config: ModelConfig) -> tuple[_Tensors, _Tensors, dict[str, int]]:
    found, following, skipped = _Tensors(), _Tensors(), dict[str, int]()
    for file in weight_files(folder):
        for name, one in read_header(file).items():
            bare = family.bare(name)
            beside = tower_of(name) or (_MTP if next_layer(bare, config) else None)
            if beside is not None:
                skipped[beside] = skipped.get(beside, 0) + 1
                if tower_of(name) is None:
                    following[bare] = replace(one, shape=family.shape_of(bare, one.shape))
                continue
            if family.inert_in(bare, config):
                continue
            if bare in found:
                raise CheckpointError(
                    f"{shown(bare)} lies twice in {folder}: in {found[bare].file.name} and {file.name}; "
                    "remove the file that does not belong to the model"
                )
            found[bare] = replace(one, shape=family.shape_of(bare, one.shape))
    _tell_skipped(folder, skipped, reads=family.following is not None)
    return found, following, skipped


def _tell_skipped(where: Path, skipped: Mapping[str, int], *, reads: bool) -> None:
    if skipped:
        parts = ", ".join(f"{tower} ({count} tensors)" for tower, count in skipped.items())
        beside = f", and drafts with {_MTP} (speculate mtp)" if _MTP in skipped and reads else ""
        log.warning("%s: skipped %s, which texts do not need%s", where, parts, beside)


def _dtype_of(stored: Iterable[Stored]) -> DType:
    sums: dict[DType, int] = {}
    for one in stored:
        name = DTYPES[one.dtype]
        sums[name] = sums.get(name, 0) + one.nbytes
    return max(sums, key=lambda name: sums[name])


def _dtype_of_blocks(stored: Iterable[Stored]) -> DType:
    """The dtype of most bytes of matrices without blocks; bfloat16 if all have blocks."""
    plain = [one for one in stored if len(one.shape) > 1 and one.dtype not in BLOCKS]
    return _dtype_of(plain) if plain else "bfloat16"


def refuse_values(raw: Array, name: str, file: Path, form: str) -> NoReturn:
    if finite(raw):
        wider = "float32" if form == "bfloat16" else "bfloat16 or float32"
        option = "dtype" if form in DTYPE_BYTES else "weights"
        raise CheckpointError(f"{name} in {file} does not fit {form}; give {option} {wider}", option)
    raise CheckpointError(f"{name} in {file} has values that are not finite; the file is damaged or badly trained")


def _same_numbers(one: Stored, other: Stored) -> bool:
    if one.shape != other.shape or not {one.dtype, other.dtype} <= DTYPES.keys():
        return False
    if not one.nbytes:
        return True  # not a matrix; `check_fit` refuses it
    rows, step = one.shape[0], max(1, _COMPARED * one.shape[0] // one.nbytes)
    pieces = ((at, min(at + step, rows)) for at in range(0, rows, step))
    return all(np.array_equal(widened(read_rows(one, *piece)), widened(read_rows(other, *piece))) for piece in pieces)
