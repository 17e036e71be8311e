"""Reads folders with quantised weights, by the tensors' names and shapes: lists of modules are not needed."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from tokenwright.arrays import Array
from tokenwright.checkpoints.files.json_keys import JsonKeys, shown
from tokenwright.checkpoints.files.safetensors import Stored, slices
from tokenwright.checkpoints.quantised.codecs import DEFAULTS, Compound, MatrixCodec, Parts, described_at
from tokenwright.checkpoints.quantised.integer_codecs import Awq, Gptq, PackedIntegers
from tokenwright.checkpoints.quantised.scaled_codecs import Fp4, Mlx, Scaled, four_bit
from tokenwright.checkpoints.quantised.ternary_codecs import Ternary
from tokenwright.checkpoints.tensor_reader import DTYPES
from tokenwright.errors import CheckpointError

Described = Mapping[str, Stored]  # a matrix's tensors by the last part of their names


_SCALES_OF_KV = re.compile(r".+\.(?:[kqv](?:_proj\.[kqv])?|kv|prob|\w_proj\.output)_(?:scale|zero_point)")

# Keys of Quark and AutoRound for rotations that the weights do not contain, and values that ask for them.
_ONLINE = re.compile(
    r'"(r[34]|online_r1_rotation|online_rotation_layers|hadamard_config)": (?!null|false|""|\[\]|\{\}|0[,}])'
)


class Scheme(NamedTuple):
    codec: Callable[[Parts, Described, str], MatrixCodec]  # from `read_first` and all shapes
    names: re.Pattern[str]  # groups: base, part
    main: tuple[str, ...]  # parts of which every quantised matrix has one
    read_first: str | None = None  # the part that describes the others
    unused: re.Pattern[str] = _SCALES_OF_KV  # tensors that describe no weights
    viewed: Callable[[dict[str, Stored]], dict[str, Stored]] = lambda parts: parts  # under the codecs' dtypes and names


def _names(*parts: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<base>.+)\.(?P<part>{'|'.join(parts)})")


def read_scheme(settings: dict[str, Any], where: str) -> Scheme | None:
    """Remove another tool's quantization_config; how its matrices are stored, or None. Raises CheckpointError."""
    key = described_at(settings)
    if key is None:
        return None
    keys = JsonKeys(settings[key], f"{where}: {key}")
    loads = any(keys.raw(f"load_in_{bits}bit") is True for bits in (4, 8))  # in old files
    method = keys.text("quant_method", "bitsandbytes" if loads else DEFAULTS[key]).lower()
    if method not in _METHODS:
        named = shown(method) if method else "a method without a name"
        raise keys.error(f"the weights are quantised by {named}; Tokenwright reads {', '.join(_METHODS)}")
    if rotated := _ONLINE.search(json.dumps(settings[key])):
        why = f"{rotated[1]} asks for inputs that are rotated while the model computes"
        raise keys.error(f"{why}, which Tokenwright does not have; export the weights without online rotations")
    scheme = _METHODS[method](keys)
    del settings[key]
    if method == "mlx":
        settings.pop("quantization_config", None)  # MLX writes the same there, without a method
    return scheme


def _gptq(keys: JsonKeys, default: str = "gptq") -> Scheme:
    keys.whole("bits", 4, most=64)
    version = keys.text("checkpoint_format", keys.text("format", default)).lower()
    if version not in ("gptq", "gptq_v2"):
        raise keys.error(f"checkpoint_format is {shown(version)}; Tokenwright reads gptq and gptq_v2")
    keys.only("is_marlin_format", False, why="Marlin's order of codes")

    def codec(first: Parts, parts: Described, name: str) -> MatrixCodec:  # noqa: ARG001
        bits = parts["qzeros"].shape[-1] * 32 // max(parts["scales"].shape[-1], 1)
        if bits not in (2, 3, 4, 8):
            raise ValueError(f"it has {bits} bits; Tokenwright reads 2, 3, 4, 8")
        return Gptq(bits, version == "gptq")

    return Scheme(codec, _names("qweight", "qzeros", "scales", "g_idx"), ("qweight",))


def _auto_round(keys: JsonKeys) -> Scheme:
    """`auto_round` itself and `gptqmodel` store GPTQ's zeros as they are, `auto_gptq` less one."""
    packing = keys.text("packing_format", "auto_round:auto_gptq")
    kinds: dict[str, Callable[[JsonKeys], Scheme]] = {
        "auto_gptq": _gptq,
        "auto_awq": _awq,
        **dict.fromkeys(("auto_round", "gptqmodel"), lambda keys: _gptq(keys, "gptq_v2")),
        **dict.fromkeys(("llm_compressor", "nv_fp", "mx_fp", "fp8", "fp8_static"), lambda _: _by_dtype("AutoRound")),
    }
    kind = packing.removeprefix("auto_round:")
    if kind not in kinds:
        raise keys.error(f"packing_format is {shown(packing)}; Tokenwright reads {', '.join(kinds)}")
    return kinds[kind](keys)


def _awq(keys: JsonKeys) -> Scheme:
    keys.only("bits", 4, why="codes of other bits")
    version = keys.text("version", "gemm").lower()
    if version != "gemm":
        raise keys.error(f"version is {shown(version)}; Tokenwright reads gemm")
    if (maker := keys.text("backend", "autoawq")) == "llm-awq":
        raise keys.error(f"backend is {maker}, with another order of codes; Tokenwright reads autoawq's")
    return Scheme(lambda *_: Awq(), _names("qweight", "qzeros", "scales"), ("qweight",))


def _by_dtype(maker: str = "", block: tuple[int, int] | None = None, *, packed: str = "U8") -> Scheme:
    """fp8, int8, MXFP4 or NVFP4, by the tensors' dtypes. packed: the dtype of two codes of 4 bits in `weight`."""
    scales = ("weight_scale", "weight_scale_inv", "scale_inv")  # the last if all experts are in one tensor

    def codec(first: Parts, parts: Described, name: str) -> MatrixCodec:  # noqa: ARG001
        scale = next((one for one in scales if one in parts), scales[0])
        if "weight_packed" in parts:
            nvidia = parts[scale].dtype == "F8_E4M3"
            facts = ("NVFP4", 16) if nvidia else ("MXFP4", 32)
            return Fp4(*facts, "weight_packed", scale, "weight_global_scale" if nvidia else "", nvidia)
        kind = parts["weight"].dtype
        if kind not in ("U8", "I8", "F8_E4M3"):
            raise ValueError(f"it has numbers of {kind}; Tokenwright reads F8_E4M3, I8 and U8")
        if kind == "U8":
            second = "weight_scale_2"
            return Fp4("NVFP4", 16, "weight", scale, second) if second in parts else Fp4("MXFP4", 32, "weight", scale)
        return Scaled(f"{maker} {'int8' if kind == 'I8' else 'fp8'}".strip(), kind, scale, block)

    def viewed(parts: dict[str, Stored]) -> dict[str, Stored]:
        other = {packed: "U8"} if "weight" in parts and parts["weight"].dtype == packed else {"U8": "F8_E8M0"}
        seen = {part: replace(one, dtype=other.get(one.dtype, one.dtype)) for part, one in parts.items()}
        flat = {part: replace(one, shape=one.shape[::2]) for part, one in seen.items() if len(one.shape) == 4}  # 1 each
        return seen | flat | {part: one for part, one in parts.items() if part == "weight_packed"}

    unused = ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "input_zero_point")
    more = ("weight_packed", "weight_scale_2", "weight_global_scale", "weight_zero_point", "input_global_scale")
    parts = "|".join(("weight", *scales, *more, *unused))
    main = (*scales, "weight_packed")
    return Scheme(codec, re.compile(rf"(?P<base>.+?)(?:[._](?P<part>{parts}))?"), main, viewed=viewed)


def _fp8(keys: JsonKeys) -> Scheme:
    if (kind := keys.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise keys.error(f"fmt is {shown(kind)}; Tokenwright reads e4m3")
    block = keys.raw("weight_block_size")
    if block is not None and not _is_block(block):
        raise keys.error(f"weight_block_size is {shown(block)}, not two sizes")
    return _by_dtype("", None if block is None else (block[0], block[1]), packed="I8")


def _compressed(keys: JsonKeys) -> Scheme:
    for key in ("transform_config", "sparsity_config"):
        if _is_object(keys.raw(key)) and keys.raw(key).get("format", key) != "dense":
            keys.only(key, {}, why="transformed or sparse weights")
    groups = keys.raw("config_groups")
    described = [one.get("weights") for one in groups.values() if _is_object(one)] if _is_object(groups) else []
    weights = [JsonKeys(one, keys.where) for one in described if _is_object(one)]
    if len(weights) != len(described) or not (weights or keys.raw("kv_cache_scheme")):
        raise keys.error("config_groups describes no weights")
    kinds = {keys.text("format", "")} | {
        str(one.get("format") or "") for one in (groups or {}).values() if _is_object(one)
    }
    packings = ("pack", "int", "float", "naive", "nvfp4-pack", "mxfp4-pack", "mxfp8")
    known = ("", "mixed-precision", *(f"{one}-quantized" for one in packings))
    if unknown := sorted(kinds.difference(known)):
        raise keys.error(f"format is {shown(unknown[0])}; Tokenwright reads {', '.join(known[1:])}")
    bits = {one.whole("num_bits", 4, most=32) for one in weights} or {4}
    blocks = [JsonKeys(one, keys.where).raw("block_structure") for one in described if _is_object(one)]
    floats = _by_dtype("compressed-tensors", next(((one[0], one[1]) for one in blocks if _is_block(one)), None))

    def codec(first: Parts, parts: Described, name: str) -> MatrixCodec:
        if "weight_packed" not in parts or parts["weight_packed"].dtype != "I32":
            return floats.codec(first, parts, name)
        words = parts["weight_packed"].shape[-1]
        inner = int(first["weight_shape"].reshape(-1)[-1]) if "weight_shape" in first else words * (32 // min(bits))
        fits = (one for one in (*sorted(bits), 2, 3, 4, 5, 6, 7, 8) if one <= 8 and -(-inner // (32 // one)) == words)
        return PackedIntegers(next(fits, min(bits)), inner)

    parts = ("packed", "scale", "zero_point", "g_idx", "shape", "global_scale")
    of_inputs = ("input_scale", "input_zero_point", "input_global_scale")
    names = _names("weight", *(f"weight_{one}" for one in parts), *of_inputs)
    return Scheme(codec, names, ("weight_packed", "weight_scale"), "weight_shape", viewed=floats.viewed)


def _bitsandbytes(keys: JsonKeys) -> Scheme:
    if keys.flag("load_in_8bit", False) or keys.flag("_load_in_8bit", False):
        codec = Scaled("bitsandbytes int8", "I8", "SCB", None, 1 / 127)
        return Scheme(lambda *_: codec, _names("weight", "SCB", "weight_format"), ("SCB",))
    described = "absmax|quant_map|nested_absmax|nested_quant_map|quant_state\\.bitsandbytes__(?:nf4|fp4)"
    names = re.compile(rf"(?P<base>.+)\.weight(?:\.(?P<part>{described}))?")
    return Scheme(lambda first, *_: four_bit(first), names, ("quant_state",), "quant_state", viewed=_as_bytes)


def _as_bytes(parts: dict[str, Stored]) -> dict[str, Stored]:
    """bitsandbytes' codes may lie in a tensor of any dtype (bnb_4bit_quant_storage)."""
    codes = {part: replace(one, dtype="U8", shape=(one.nbytes,)) for part, one in parts.items() if part == "weight"}
    return parts | codes


def _modelopt(keys: JsonKeys) -> Scheme:
    """ModelOpt: the scales of K and V are for its cache, not for weights."""
    if _is_object(inside := keys.raw("quantization")):  # as its first versions write it
        keys = JsonKeys(inside, keys.where)
    kind = keys.text("quant_algo", "" if keys.raw("kv_cache_quant_algo") is None else "FP8").upper()
    known = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
    if kind not in known:
        named = f"ModelOpt's {kind or 'format without quant_algo'}"
        raise keys.error(f"the weights are in {named}, which Tokenwright does not have; it reads FP8, MXFP8 and NVFP4")
    return _by_dtype("ModelOpt")


def _mlx(keys: JsonKeys) -> Scheme:
    if (mode := keys.text("mode", "affine")) not in ("affine", "mxfp4", "nvfp4", "mxfp8"):
        modes = "affine, mxfp4, nvfp4 and mxfp8"
        raise keys.error(f"the weights are in MLX's mode {shown(mode)}; Tokenwright reads {modes}")
    group = keys.whole("group_size", 64, most=1 << 12)
    keys.whole("bits", 4, most=64)
    own = {
        name: JsonKeys(one, f"{keys.where}: {name}").whole("group_size", group, most=1 << 12)
        for name in keys.names
        if isinstance(one := keys.raw(name), dict)
    }

    def codec(first: Parts, parts: Described, name: str) -> MatrixCodec:  # noqa: ARG001
        if parts["weight"].dtype == "U8":
            nvidia = parts["scales"].dtype == "F8_E4M3"
            return Fp4("NVFP4" if nvidia else "MXFP4", 16 if nvidia else 32, "weight", "scales")
        if parts["weight"].dtype == "F8_E4M3":
            return Scaled("MXFP8", "F8_E4M3", "scales")
        size = next((one for key, one in own.items() if key == name or key.endswith(f".{name}")), group)
        bits = parts["weight"].shape[-1] * 32 / (parts["scales"].shape[-1] * size)
        if bits not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"it has {bits:g} bits; Tokenwright reads 2, 3, 4, 5, 6 and 8")
        return Mlx(int(bits), size)

    return Scheme(codec, _names("weight", "scales", "biases", "qbiases"), ("scales",), viewed=_mlx_floats)


def _mlx_floats(parts: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors of a mode of floats by their dtypes: a word has 8 codes of 4 bits, or 4 of 8."""
    found = {part.removeprefix("q"): one for part, one in parts.items()}  # qbiases: transformers'
    words, scales = found.get("weight"), found["scales"]
    if words is None or "biases" in found or words.dtype != "U32" or scales.dtype != "U8":
        return found
    eights, sixteens = (words.shape[-1] == count * scales.shape[-1] for count in (8, 2))
    codes = replace(words, dtype="F8_E4M3" if eights else "U8", shape=(*words.shape[:-1], words.shape[-1] * 4))
    return {"weight": codes, "scales": replace(scales, dtype="F8_E4M3" if sixteens else "F8_E8M0")}


def _bitnet(keys: JsonKeys) -> Scheme:
    keys.only("use_rms_norm", False, why="a norm of its own before each linear")
    keys.number("rms_norm_eps", 1e-6)
    whole, divides = keys.text("quantization_mode", "offline"), keys.text("linear_class", "bitlinear") == "bitlinear"
    if whole not in ("offline", "online"):
        raise keys.error(f"quantization_mode is {shown(whole)}; Tokenwright reads offline and online")

    def codec(first: Parts, parts: Described, name: str) -> MatrixCodec:  # noqa: ARG001
        if (kind := parts["weight"].dtype) == "U8":
            return Ternary(divides)
        return Ternary(False, DTYPES[kind]) if whole == "online" else Scaled("BitNet, unpacked", kind, "weight_scale")

    names = re.compile(r"(?P<base>.+_proj)\.(?P<part>weight|weight_scale)")
    return Scheme(codec, names, ("weight",) if whole == "online" else ("weight_scale",))


def _mxfp4(keys: JsonKeys) -> Scheme:
    keys.only("dequantize", False, True, why="weights in another form")
    names = re.compile(r"(?P<base>.+\.(?:gate_up|down)_proj)_(?P<part>blocks|scales)")
    return Scheme(lambda *_: Fp4(), names, ("blocks",))


def _is_block(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 16 for n in value)


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


_METHODS: Mapping[str, Callable[[JsonKeys], Scheme]] = {
    "gptq": _gptq,
    **dict.fromkeys(("auto-round", "intel/auto-round", "auto_round"), _auto_round),
    "awq": _awq,
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp8"), _fp8),
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "bitnet": _bitnet,
    "mxfp4": _mxfp4,
    **dict.fromkeys(("modelopt", "modelopt_fp4"), _modelopt),
    **dict.fromkeys(("mlx", "metal"), _mlx),
    "quark": lambda _: _by_dtype("Quark"),
}
Read = Callable[[Stored], Array]


def gather(stored: Mapping[str, Stored], scheme: Scheme, read: Read) -> dict[str, Stored]:
    """A folder's tensors, each quantised matrix as one Compound under `base.weight`. Raises CheckpointError."""
    named: dict[str, dict[str, str]] = {}  # of a module: part -> name of the tensor
    for name in stored:
        if match := scheme.names.fullmatch(name):
            part = (match["part"] or "weight").partition(".")[0]  # quant_state.bitsandbytes__nf4
            named.setdefault(match["base"], {})[part] = name
    quantised = {base: parts for base, parts in named.items() if any(one in parts for one in scheme.main)}
    taken = {name for parts in quantised.values() for name in parts.values()}
    taken |= {name for name in stored if scheme.unused.fullmatch(name)}
    found = {name: one for name, one in stored.items() if name not in taken}
    for base, names in quantised.items():
        for at, parts in _matrices({part: stored[name] for part, name in names.items()}):
            found[f"{base}{at}.weight"] = _compound(base, parts, scheme, read)
    return found


def _matrices(parts: dict[str, Stored]) -> Iterator[tuple[str, dict[str, Stored]]]:
    """The tensors of a matrix, or of each one of a stack [n, out, ...], with the end of its name."""
    sizes = {len(one.shape) for one in parts.values()}, {one.shape[0] for one in parts.values() if one.shape}
    if sizes[0] - {2, 3} or 3 not in sizes[0] or len(sizes[1]) > 1:
        yield "", parts
        return
    each = {part: [*slices(one)] for part, one in parts.items()}
    for at in range(sizes[1].pop()):
        yield f".{at}", {part: some[at] for part, some in each.items()}


def _compound(base: str, stored: dict[str, Stored], scheme: Scheme, read: Read) -> Compound:
    main = stored.get("weight", next(stored[one] for one in scheme.main if one in stored))
    try:
        parts = scheme.viewed(stored)
        first = {} if scheme.read_first not in parts else {scheme.read_first: read(parts[scheme.read_first])}
        codec = scheme.codec(first, parts, base)
        shape = codec.shape(parts)
        if shape is None:
            sizes = ", ".join(f"{part} {one.dtype} {list(one.shape)}" for part, one in sorted(parts.items()))
            raise ValueError(f"its tensors do not fit together as {codec.title} ({sizes})")
        form = codec.form({name: read(parts[name]) for name in codec.small if name in parts}, shape[1])
    except KeyError as error:
        raise CheckpointError(f"{shown(base)} in {main.file} has no {error.args[0]}") from error
    except (ValueError, IndexError, ZeroDivisionError) as error:  # the last two: of shapes such as [] and [0]
        raise CheckpointError(f"{shown(base)} in {main.file} cannot be read: {error}") from error
    nbytes = sum(one.nbytes for one in parts.values())
    return Compound(main.file, codec.title, shape, main.start, nbytes, parts, codec, form)
