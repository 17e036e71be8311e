"""Write a GGUF file: BF16, or int8 and int4 as Q8_0 and Q4_0. Its metadata, read back, must give the model's graph."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import BFLOAT16, Array, Bytes, Floats, as_bytes, finite, narrowed, widened
from tokenwright.backends.layout import format_of
from tokenwright.backends.native.native_kernels import find_kernels
from tokenwright.backends.packed import LANES, Packed
from tokenwright.checkpoints.files.generation_config import GenerationDefaults
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.folder import Checkpoint, Report, refuse_values
from tokenwright.checkpoints.gguf.checkpoint import ROPE_FACTORS, SAMPLING, read_model
from tokenwright.checkpoints.gguf.header import SUFFIX, Header, block_bytes
from tokenwright.checkpoints.gguf.tensor_names import LAYOUTS
from tokenwright.checkpoints.packing.folder_writer import check_unpacked
from tokenwright.checkpoints.quantised.codecs import Compound
from tokenwright.checkpoints.tensor_reader import piece_of, read_rows
from tokenwright.config import LinearScaling, Llama3Scaling, ModelConfig, NoScaling, Rope, YarnScaling
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.formats import WeightFormat
from tokenwright.models.rotary import llama3_frequencies
from tokenwright.regular_file import draft_file, sweep
from tokenwright.text.files import read_folder
from tokenwright.text.metadata import WHOLE
from tokenwright.text.to_metadata import Nearest, tokenizer_metadata

_TYPES: Mapping[str, str] = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_FILE_TYPES: Mapping[str, int] = {"bfloat16": 32, "int8": 7, "int4": 2}  # general.file_type
_KINDS = {LAYOUTS[kind].model: kind for kind in ("llama", "qwen2", "qwen3")}  # that can be written
_SLAB = 1 << 24  # bytes of fp32 converted together
_THREADS = 2
_NUMBERS = np.dtype(np.float32)  # the writer is given shapes of numbers, not of bytes


class Contents:
    """Metadata and tensor types of a file to write. remarks: facts that it cannot hold. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, form: WeightFormat) -> None:
        config = checkpoint.config
        if config.architecture not in _KINDS:
            raise CheckpointError(
                f"{config.architecture} cannot be written as a GGUF file; {', '.join(_KINDS)} can, and all models as a "
                "folder"
            )
        self.checkpoint, self.form, self.kind = checkpoint, form, _KINDS[config.architecture]
        self.paired = config.head_size if LAYOUTS[self.kind].neighbours else 0
        sources = LAYOUTS[self.kind].family.sources(checkpoint.graph)
        self.names = {name: source.name for name, source in sources.items()}
        self.turned = {name for name, source in sources.items() if source.order is not None}  # q and k
        self.types = {name: self._type(name) for name in checkpoint.graph.shapes}
        texts = checkpoint.texts if checkpoint.texts is not None else read_folder(checkpoint.path)
        self.metadata = _facts(checkpoint, self.kind, form)
        said, nearest = tokenizer_metadata(texts, checkpoint.generation.eos_ids, config.vocab_size)
        self.metadata |= said
        self.remarks = tuple(_remarks(checkpoint.generation, nearest))
        self.factors = _rope_factors(checkpoint)
        self._check()

    def _type(self, name: str) -> str:
        shape = self.checkpoint.graph.shapes[name]
        if len(shape) == 1:
            return "F32"
        form = format_of(name.removesuffix(".weight"), self.form)
        if self.form.quantised and shape[1] % 32:
            raise CheckpointError(
                f"{name} has {shape[1]} inputs, which are no blocks of 32; give --weights bfloat16, or write a folder"
            )
        return _TYPES[form.name]

    def _check(self) -> None:
        stored = {
            self.names[name]: Stored(Path("the file"), self.types[name], shape, 0, 0)
            for name, shape in self.checkpoint.graph.shapes.items()
        }
        factors = [] if self.factors is None else self.factors.tolist()
        if self.factors is not None:
            stored[ROPE_FACTORS] = Stored(Path("the file"), "F32", (len(factors),), 0, 0)
        read = read_model(Header(self.metadata, stored, 0), "the GGUF file", lambda _: factors)
        if read.graph != self.checkpoint.graph or read.generation.eos_ids != self.checkpoint.generation.eos_ids:
            raise CheckpointError(
                f"the metadata of a GGUF file cannot say all that config.json in {self.checkpoint.path} does; write a "
                "folder instead"
            )

    def data(self, name: str) -> Iterator[Bytes]:
        checkpoint, kind = self.checkpoint, self.types[name]
        source, updates = checkpoint.sources[name], checkpoint.updates.get(name.removesuffix(".weight"), ())
        stored = checkpoint.stored[source.name]
        whole = isinstance(stored, Compound) or source.transpose or source.rows is not None or len(stored.shape) == 1
        step = stored.shape[0] if whole else _rows(stored.shape, source.order.block if source.order else self.paired)
        for first in range(0, stored.shape[0], step):
            raw = read_rows(stored, first, min(first + step, stored.shape[0]))
            ours = np.ascontiguousarray(widened(piece_of(raw, source)))
            for update in updates:
                ours = update.added_to(ours, first if source.order is None else source.order.ours(first))
            found = _as_bytes(_in_pairs(ours, self.paired) if name in self.turned else ours, kind)
            if found is None:
                refuse_values(raw, source.name, stored.file, {"F32": "float32", "BF16": "bfloat16"}.get(kind, "int8"))
            yield found


def check_writing(checkpoint: Checkpoint, file: Path, form: WeightFormat) -> Contents:
    """The contents that `write_gguf` would write. Raises RequestError or CheckpointError for what it refuses."""
    if form.name not in _TYPES:
        raise RequestError(f"a GGUF file is written with --weights bfloat16, int8 or int4, not {form}", "weights")
    check_unpacked(checkpoint)
    if file.exists() or file.is_symlink():
        raise RequestError(f"{file} exists already and is not overwritten; remove it, or give another file")
    checkpoint.check_tied_head()
    return Contents(checkpoint, WeightFormat(form.name, 32 if form.quantised else 0))


def write_gguf(contents: Contents, file: Path, report: Report | None = None) -> int:
    """Write a GGUF file, complete or not at all; returns the bytes of its tensors. Raises CheckpointError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        sweep(file.parent, file.name)
        with draft_file(file) as draft:
            return _write(contents, draft, report)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error


def _write(contents: Contents, draft: Path, report: Report | None) -> int:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    writer = GGUFWriter(draft, contents.kind)
    for key, value in contents.metadata.items():
        if key != "general.architecture":  # the writer has written it
            is_whole = type(value) is int
            writer.add_key_value(key, value, GGUFValueType.UINT32 if is_whole else GGUFValueType.get_type(value))
    if contents.factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, contents.factors.shape, _NUMBERS, contents.factors.nbytes)
    sizes: dict[str, int] = {}
    for name, shape in contents.checkpoint.graph.shapes.items():
        kind = contents.types[name]
        sizes[name] = math.prod(shape) * 4 if kind == "F32" else block_bytes(kind, math.prod(shape))
        writer.add_tensor_info(contents.names[name], shape, _NUMBERS, sizes[name], raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _append(contents, draft, sizes, report)
    return sum(sizes.values())


def _append(contents: Contents, draft: Path, sizes: Mapping[str, int], report: Report | None) -> None:
    done, total = 0, sum(sizes.values())
    with draft.open("ab") as stream:
        stream.write(bytes(-stream.tell() % 32))
        if contents.factors is not None:
            stream.write(contents.factors.tobytes())
        for name, size in sizes.items():
            stream.write(bytes(-stream.tell() % 32))
            before = stream.tell()
            for piece in contents.data(name):
                done += stream.write(piece.data)
                if report is not None:
                    report(done, total)
            assert stream.tell() - before == size, f"{name} has its bytes"
        stream.write(bytes(-stream.tell() % 32))
        stream.flush()
        os.fsync(stream.fileno())


def _remarks(generation: GenerationDefaults, nearest: Nearest | None) -> Iterator[str]:
    dropped = [name for name in generation.sampling if name not in SAMPLING.values()]
    if dropped := [*dropped, *generation.unsupported]:
        yield f"a GGUF file cannot hold {', '.join(dropped)}, which generation_config.json suggests"
    if nearest is not None and nearest.texts:
        yield (
            f"the tokenizer splits text in a way that has no name in GGUF. The file holds it whole ({WHOLE}), which "
            f"Tokenwright reads; to other programs it says {nearest.name}, with other ids for such texts as "
            f"{min(nearest.texts, key=len)[:24]!r}"
        )


def _facts(checkpoint: Checkpoint, kind: str, form: WeightFormat) -> dict[str, Any]:
    config = checkpoint.config
    own: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": _context(config),
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), config.head_size),
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
        **_rope(config.positions),
    }
    general: dict[str, Any] = {
        "general.architecture": kind,
        "general.type": "model",
        "general.name": _name(checkpoint.path),
        "general.file_type": _FILE_TYPES[form.name],
    }
    if form.quantised:
        general["general.quantization_version"] = 2
    suggested = checkpoint.generation.sampling
    general |= {f"general.sampling.{key}": suggested[name] for key, name in SAMPLING.items() if name in suggested}
    return general | {f"{kind}.{key}": value for key, value in own.items()}


def _name(path: Path) -> str:
    if path.suffix.lower() == SUFFIX:
        return path.stem
    return path.parent.parent.name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name


def _context(config: ModelConfig) -> int:
    """With linear scaling, the context before it."""
    positions = config.positions
    if isinstance(positions, Rope) and isinstance(positions.scaling, LinearScaling):
        return int(config.context / positions.scaling.factor)
    return config.context


def _rope(positions: object) -> dict[str, Any]:
    if not isinstance(positions, Rope):
        raise CheckpointError("a GGUF file of these architectures has rotary positions; write a folder instead")
    base = {"rope.freq_base": positions.theta}
    match positions.scaling:
        case NoScaling() | Llama3Scaling():
            return base
        case LinearScaling(factor):
            return base | {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling(factor, original):
            yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
            return base | yarn | {"rope.scaling.original_context_length": original}
        case other:
            raise CheckpointError(f"a GGUF file cannot say {type(other).__name__} of rotary positions; write a folder")


def _rope_factors(checkpoint: Checkpoint) -> Floats | None:
    """Divisors [head_size / 2] of the frequencies, in fp32, for Llama 3.1's scaling."""
    positions = checkpoint.config.positions
    if not isinstance(positions, Rope) or not isinstance(positions.scaling, Llama3Scaling):
        return None
    pairs = checkpoint.config.head_size // 2
    plain = np.array([positions.theta ** (-at / pairs) for at in range(pairs)], np.float64)
    return (plain / llama3_frequencies(plain, positions.scaling)).astype(np.float32)


def _rows(shape: tuple[int, ...], paired: int) -> int:
    unit = math.lcm(LANES, paired or 1)
    return max(1, _SLAB // (4 * shape[1] * unit)) * unit


def _in_pairs(rows: Array, size: int) -> Array:
    """Rows 0, size / 2, 1, size / 2 + 1, ... of each head of `size` rows: the inverse of `piece_of`."""
    return rows.reshape(-1, 2, size // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _as_bytes(rows: Array, kind: str) -> Bytes | None:
    """Rows [n, in] (or a vector) in fp32 as flat bytes of a type; None if values are not finite in it."""
    if kind in ("F32", "BF16"):
        numbers = np.ascontiguousarray(rows if kind == "F32" else narrowed(rows, BFLOAT16))
        return as_bytes(numbers) if finite(numbers) else None
    packed = Packed.empty(len(rows), rows.shape[1], WeightFormat("int8" if kind == "Q8_0" else "int4", 32))
    kernels = find_kernels()
    bad = packed.pack_rows(0, rows) if kernels is None else kernels.pack(packed, 0, rows, _THREADS)
    if bad:
        return None
    codes, scales = packed.stored_rows()
    blocks = codes.reshape(len(rows), -1, 32)
    blocks = blocks ^ 0x80 if kind == "Q8_0" else blocks[..., :16] | blocks[..., 16:] << 4
    head = np.ascontiguousarray(scales).view(np.uint8).reshape(len(rows), -1, 2)
    return np.concatenate((head, blocks), -1).reshape(-1)
