"""Folders with quantised weights: GPTQ, AWQ, fp8, compressed-tensors, bitsandbytes, MXFP4, ModelOpt's fp8 and MLX.

A quantised matrix is several tensors of a file: codes, scales, zeros, an order. `gather` joins them to one `Compound`
under the name that the unquantised weight would have; the names of the tensors tell which matrices are quantised, so
that config.json's lists of modules left out are not needed. `published_codecs` says where the arithmetic is.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from tokenwright.arrays import Array
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored
from tokenwright.checkpoints.quantised.codecs import MatrixCodec, Parts
from tokenwright.checkpoints.quantised.compound import DEFAULTS, Compound, described_at
from tokenwright.checkpoints.quantised.integer_codecs import Awq, Gptq, PackedIntegers
from tokenwright.checkpoints.quantised.mlx_codec import Mlx
from tokenwright.checkpoints.quantised.scaled_codecs import Mxfp4, Scaled
from tokenwright.checkpoints.quantised.table_codecs import four_bit
from tokenwright.errors import CheckpointError, fetch_again


class Scheme(NamedTuple):
    """How a folder's matrices are quantised: `codec` for each, and the names of a matrix's tensors."""

    codec: Callable[[Parts], MatrixCodec]  # called with the tensors in `read_first`
    names: re.Pattern[str]  # groups: base, part
    main: str  # the part that every quantised matrix has; the other parts alone are not one
    read_first: str | None = None  # a part that describes the others
    unused: re.Pattern[str] | None = None  # names of tensors that describe no weights


def _names(*parts: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<base>.+)\.(?P<part>{'|'.join(parts)})")


def read_scheme(settings: dict[str, Any], where: str) -> Scheme | None:
    """Remove another tool's quantization_config from a config.json; return how its matrices are stored.

    None if there is none, or our own. Raises CheckpointError for a method or a variant that Tokenwright lacks.
    """
    key = described_at(settings)
    if key is None:
        return None
    keys = JsonKeys(settings[key], f"{where}: {key}")
    method = keys.text("quant_method", DEFAULTS[key])
    if method not in _METHODS:
        return None
    scheme = _METHODS[method](keys)
    del settings[key]
    if method == "mlx":
        settings.pop("quantization_config", None)  # MLX writes the same there, without a method
    return scheme


def _gptq(keys: JsonKeys) -> Scheme:
    bits = _bits(keys, "bits", (4, 8))
    version = keys.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise keys.error(f"checkpoint_format is {shown(version)}; Tokenwright reads gptq and gptq_v2")
    keys.only("is_marlin_format", False, why="Marlin's order of codes")
    keys.only("dynamic", {}, why="other bits for some modules")
    codec = Gptq(bits, version == "gptq")
    return Scheme(lambda _: codec, _names("qweight", "qzeros", "scales", "g_idx"), "qweight")


def _awq(keys: JsonKeys) -> Scheme:
    _bits(keys, "bits", (4,))
    version = keys.text("version", "gemm").lower()
    if version != "gemm":
        raise keys.error(f"version is {shown(version)}; Tokenwright reads gemm")
    if (maker := keys.text("backend", "autoawq")) == "llm-awq":
        raise keys.error(f"backend is {maker}, with another order of codes; Tokenwright reads autoawq's")
    return Scheme(lambda _: Awq(), _names("qweight", "qzeros", "scales"), "qweight")


def _fp8(keys: JsonKeys) -> Scheme:
    if (kind := keys.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise keys.error(f"fmt is {shown(kind)}; Tokenwright reads e4m3")
    block = keys.raw("weight_block_size")
    if block is not None and not (_is_list(block, 2) and all(type(n) is int and 0 < n < 1 << 16 for n in block)):
        raise keys.error(f"weight_block_size is {shown(block)}, not two sizes")
    scale = "weight_scale" if block is None else "weight_scale_inv"
    codec = Scaled("fp8", "F8_E4M3", scale, block and (block[0], block[1]))
    return Scheme(lambda _: codec, _names("weight", scale, "input_scale", "activation_scale"), scale)


def _compressed(keys: JsonKeys) -> Scheme:
    """compressed-tensors: one description of the weights for all its groups of modules."""
    for key in ("transform_config", "sparsity_config"):
        if _is_object(keys.raw(key)) and keys.raw(key).get("format", key) != "dense":
            keys.only(key, {}, why="transformed or sparse weights")
    groups = keys.raw("config_groups")
    described = [one.get("weights") for one in groups.values() if _is_object(one)] if _is_object(groups) else []
    weights = [JsonKeys(one, keys.where) for one in described if _is_object(one)]
    if len(weights) != len(described) or not weights:
        raise keys.error("config_groups describes no weights")
    bits = {_bits(one, "num_bits", (4, 8)) for one in weights}
    kind = keys.text("format", "")
    if kind == "pack-quantized" and len(bits) == 1:
        packed = PackedIntegers(min(bits))
        parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale")
        return Scheme(lambda _: packed, _names(*parts), "weight_packed")
    dtypes = {"float-quantized": "F8_E4M3", "int-quantized": "I8"}
    if kind not in dtypes or bits != {8}:
        raise keys.error(
            f"format is {shown(kind)} with {shown(sorted(bits))} bits; Tokenwright reads pack-quantized (4 or 8), "
            "int-quantized and float-quantized (8)"
        )
    scaled = Scaled(f"compressed-tensors {kind.partition('-')[0]}8", dtypes[kind], "weight_scale")
    names = _names("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")
    return Scheme(lambda _: scaled, names, "weight_scale")


def _bitsandbytes(keys: JsonKeys) -> Scheme:
    if keys.flag("load_in_8bit", False) or keys.flag("_load_in_8bit", False):
        codec = Scaled("bitsandbytes int8", "I8", "SCB", None, 1 / 127)
        return Scheme(lambda _: codec, _names("weight", "SCB", "weight_format"), "SCB")
    described = "absmax|quant_map|nested_absmax|nested_quant_map|quant_state\\.bitsandbytes__(?:nf4|fp4)"
    names = re.compile(rf"(?P<base>.+)\.weight(?:\.(?P<part>{described}))?")
    return Scheme(four_bit, names, "quant_state", "quant_state")


def _modelopt(keys: JsonKeys) -> Scheme:
    """ModelOpt: one scale for each matrix, or for each output. Those of K and V are its cache's, not the weights'."""
    kind = keys.text("quant_algo", "")
    if kind not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        named = f"ModelOpt's {_MODELOPT.get(kind, kind or 'format without quant_algo')}"
        raise keys.error(f"the weights are in {named}, which Tokenwright does not have; it reads ModelOpt's FP8")
    codec = Scaled("ModelOpt fp8", "F8_E4M3", "weight_scale")
    unused = re.compile(r".*\.[kv](?:_proj\.[kv])?_scale")
    return Scheme(lambda _: codec, _names("weight", "weight_scale", "input_scale"), "weight_scale", unused=unused)


def _mlx(keys: JsonKeys) -> Scheme:
    if (mode := keys.text("mode", "affine")) != "affine":
        raise keys.error(f"the weights are in MLX's mode {shown(mode)}; Tokenwright reads affine")
    codec = Mlx(_bits(keys, "bits", (4, 8)), keys.whole("group_size", 64, most=1 << 12))
    names = (key for key in keys.names if isinstance(keys.raw(key), dict))
    for name in names:
        own = JsonKeys(keys.raw(name), f"{keys.where}: {name}")
        if (own.whole("bits", codec.bits), own.whole("group_size", codec.group)) != (codec.bits, codec.group):
            raise own.error("other bits or groups for some modules, which Tokenwright does not have")
    return Scheme(lambda _: codec, _names("weight", "scales", "biases"), "scales")


def _mxfp4(keys: JsonKeys) -> Scheme:
    keys.only("dequantize", False, True, why="weights in another form")
    names = re.compile(r"(?P<base>.+\.(?:gate_up|down)_proj)_(?P<part>blocks|scales)")
    return Scheme(lambda _: Mxfp4(), names, "blocks")


def _is_list(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _bits(keys: JsonKeys, key: str, known: tuple[int, ...]) -> int:
    bits = keys.whole(key, known[0], most=64)
    if bits not in known:
        raise keys.error(f"{key} is {bits}; Tokenwright reads {' and '.join(map(str, known))}")
    return bits


_METHODS: Mapping[str, Callable[[JsonKeys], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "mlx": _mlx,
}
_MODELOPT = {
    "NVFP4": "NVFP4 (4-bit floats in groups of 16 with fp8 scales)",
    "W4A8_AWQ": "W4A8 (4-bit integers with fp8 activations)",
}


Read = Callable[[Stored], Array]


def gather(stored: Mapping[str, Stored], scheme: Scheme, read: Read) -> dict[str, Stored]:
    """The tensors of a folder with each quantised matrix as one Compound under `base.weight`.

    `read` reads a whole tensor. Raises CheckpointError for tensors that do not fit together.
    """
    named: dict[str, dict[str, str]] = {}  # of a module: part -> name of the tensor
    for name in stored:
        if match := scheme.names.fullmatch(name):
            part = (match["part"] or "weight").partition(".")[0]  # quant_state.bitsandbytes__nf4
            named.setdefault(match["base"], {})[part] = name
    quantised = {base: parts for base, parts in named.items() if scheme.main in parts}
    taken = {name for parts in quantised.values() for name in parts.values()}
    taken |= {name for name in stored if scheme.unused is not None and scheme.unused.fullmatch(name)}
    found = {name: one for name, one in stored.items() if name not in taken}
    for base, parts in quantised.items():
        found[f"{base}.weight"] = _compound(base, {part: stored[name] for part, name in parts.items()}, scheme, read)
    return found


def _compound(base: str, parts: dict[str, Stored], scheme: Scheme, read: Read) -> Compound:
    main = parts.get("weight", parts[scheme.main])
    try:
        first = {} if scheme.read_first is None else {scheme.read_first: read(parts[scheme.read_first])}
        codec = scheme.codec(first)
        shape = codec.shape(parts)
        if shape is None:
            sizes = ", ".join(f"{part} {one.dtype} {list(one.shape)}" for part, one in sorted(parts.items()))
            raise ValueError(f"its tensors do not fit together ({sizes})")
        form = codec.form({name: read(parts[name]) for name in codec.small if name in parts}, shape[1])
    except KeyError as error:
        raise CheckpointError(
            f"{shown(base)} in {main.file} has no {error.args[0]}; {fetch_again(main.file)}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{shown(base)} in {main.file} is damaged: {error}; {fetch_again(main.file)}") from error
    nbytes = sum(one.nbytes for one in parts.values())
    return Compound(main.file, codec.title, shape, main.start, nbytes, parts, codec, form)
