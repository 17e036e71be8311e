"""Folders as other tools quantise them, by the published definition of each format.

    write(folder, plain, "gptq", group=32)      # the folder's linear layers quantised, as AutoGPTQ stores them

`plain` becomes the same folder with the numbers that the codes stand for, in fp32: what the quantised one must compute.
Everything is written number by number from the definitions, in numpy; nothing of ours takes part.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Written = tuple[torch.Tensor, Tensors]  # the numbers [out, in] in fp32, and the tensors by the end of their names
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word, from the lowest
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
FP8 = {"format": "float-quantized", "bits": 8}
MXFP8 = {"powers": "as bytes", "block": [1, 32]}
AUTO_ROUND = {"quant_method": "auto-round"}
FUSED = {"name": "rotation", "r1": True, "r2": True, "r3": False, "online_config": None}  # into the weights
OTHER_KEY = {"format": "gptq_v2", "checkpoint_format": None}
# How a folder is written, and the packed form that holds its matrices as they are.
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "gptq-128": ("gptq", {}, "int4:64"),
    "gptq-64-v2": ("gptq", {"group": 64, "version": "gptq_v2"}, "int4:64"),
    "gptq-32": ("gptq", {"group": 32}, "int4"),
    "gptq-whole": ("gptq", {"group": -1}, "int4:64"),
    "gptq-zeros": ("gptq", {"group": 32, "sym": False}, "int8:32"),
    "gptq-order": ("gptq", {"group": 32, "act_order": True}, None),
    "gptq-order-zeros": ("gptq", {"group": 32, "act_order": True, "sym": False}, None),
    "gptq-zeros-v2": ("gptq", {"group": 32, "sym": False, "version": "gptq_v2"}, "int8:32"),
    "gptq-unsaid": ("gptq", {"group": 32, "sym": False, "version": None}, "int8:32"),  # as AutoGPTQ wrote before v2
    **{f"gptq-{bits}": ("gptq", {"bits": bits, "sym": False}, None) for bits in (2, 3, 8)},
    "awq": ("awq", {}, "int4:32/128+min"),
    "awq-32": ("awq", {"group": 32}, "int8:32"),
    "fp8-blocks": ("fp8", {}, None),
    "fp8-odd-blocks": ("fp8", {"block": [48, 100]}, None),
    "fp8-whole": ("fp8", {"block": None}, None),
    "compressed-4": ("compressed", {}, "int4"),
    "compressed-zeros": ("compressed", {"sym": False, "group": 128}, "int4:32/128+min"),
    **{f"compressed-{bits}": ("compressed", {"bits": bits, "sym": False}, None) for bits in (3, 5, 6)},
    "compressed-8": ("compressed", {"bits": 8, "group": 128}, None),
    "compressed-int8": ("compressed", {"format": "int-quantized", "bits": 8}, None),
    "compressed-blocks": ("compressed", {"format": "float-quantized", "bits": 8, "block": [128, 128]}, None),
    "compressed-fp8": ("compressed", {"format": "float-quantized", "bits": 8}, None),
    "nf4": ("nf4", {}, None),
    "nf4-plain": ("nf4", {"nested": False}, None),
    "bitsandbytes-8": ("int8", {}, None),
    "modelopt": ("modelopt", {}, None),
    "modelopt-outputs": ("modelopt", {"algorithm": "FP8_PER_CHANNEL_PER_TOKEN"}, None),
    "modelopt-nvfp4": ("modelopt", {"algorithm": "NVFP4"}, "fp4:16+factor"),
    "compressed-nvfp4": ("compressed", {"format": "nvfp4-pack-quantized"}, "fp4:16+factor"),
    "compressed-mxfp4": ("compressed", {"format": "mxfp4-pack-quantized"}, "fp4:32"),
    "bitnet": ("bitnet", {}, "int2:64/64+factor"),
    "bitnet-auto": ("bitnet", {"linear": "autobitlinear"}, "int2:64/64+factor"),
    "bitnet-online": ("bitnet", {"mode": "online", "linear": "autobitlinear"}, "int2:64/64+factor"),
    "bitnet-unpacked": ("bitnet", {"mode": "unpacked", "linear": "autobitlinear"}, None),
    "mlx-4": ("mlx", {}, None),
    "mlx-8": ("mlx", {"bits": 8, "group": 32}, None),
    "mlx-mixed": ("mlx", {"wide": "down_proj"}, None),
    **{f"mlx-{bits}": ("mlx", {"bits": bits}, None) for bits in (2, 3, 5, 6)},
    "mlx-mxfp4": ("mlx floats", {"mode": "mxfp4"}, "fp4:32"),
    "mlx-nvfp4": ("mlx floats", {"mode": "nvfp4"}, "fp4:16+factor"),
    "mlx-mxfp8": ("mlx floats", {"mode": "mxfp8"}, None),
    "metal": ("metal", {"bits": 8}, None),
    "fp8-powers": ("fp8", {"powers": True}, None),
    "mxfp8": ("fp8", MXFP8 | {"config": {"quant_method": "mxfp8"}}, None),
    "fbgemm": ("compressed", FP8 | {"config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}, None),
    "quark-fp8": ("compressed", FP8 | {"config": {"quant_method": "quark", "algo_config": [FUSED]}}, None),
    "quark-mxfp4": ("quark", {}, "fp4:32"),
    "fp4-experts": ("quark", {"signed": True}, "fp4:32"),
    "gptq-dynamic": ("gptq", {"config": {"dynamic": {"-:.*lm_head.*": {}, "+:.*down.*": {"bits": 4}}}}, "int4:64"),
    "auto-round": (
        *("gptq", {"config": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}}),
        "int4:64",
    ),
    "auto-round-zeros": (
        "gptq",
        {"group": 32, "sym": False, "version": "gptq_v2"}
        | {"config": AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "checkpoint_format": None}},
        "int8:32",
    ),
    "auto-round-nvfp4": (
        "compressed",
        {"format": "nvfp4-pack-quantized", "config": AUTO_ROUND | {"packing_format": "auto_round:nv_fp"}},
        "fp4:16+factor",
    ),
    "gptq-format": ("gptq", {"group": 32, "sym": False, "version": "gptq_v2"} | {"config": OTHER_KEY}, "int8:32"),
    "nf4-bfloat16": ("nf4", {"storage": torch.bfloat16}, None),
    "modelopt-blocks": ("fp8", {"deep": True, "config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}}, None),
    "modelopt-nested": (
        *("fp8", {"config": {"quant_method": "modelopt", "quantization": {"quant_algo": "fp8_pb_wo"}}}),
        None,
    ),
    "modelopt-weights-alone": ("modelopt", {"algorithm": "W4A16_NVFP4"}, "fp4:16+factor"),
    "modelopt-mxfp8": ("fp8", MXFP8 | {"config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}, None),
}
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


MLX_KEYS = ("quantization", "quantization_config")


def write(folder: Path, plain: Path, method: str, **options: Any) -> Path:
    """Quantise the linear layers of `folder` in place, but the head; `plain` gets the numbers that they stand for."""
    shutil.copytree(folder, plain)
    settings = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    quantise, config = METHODS[method](options)
    config |= options.get("config", {})
    numbers: Tensors = dict(tensors)
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
        base = name.removesuffix(".weight")
        numbers[name], parts = quantise(tensors.pop(name).float(), {**options, "name": name})
        tensors |= {f"{base}.{part}": one.contiguous() for part, one in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    if method == "modelopt":  # as it wrote before config.json had its description
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}} | config))
    elif method.startswith("mlx"):
        (folder / "config.json").write_text(json.dumps(settings | dict.fromkeys(MLX_KEYS, config)))
    else:
        (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return folder


def packed(codes: numpy.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Unsigned codes [n, m] as int32 words [n bits / 32, m], the first in the lowest bits."""
    words = numpy.zeros((-(-len(codes) * bits // 32) + 1, codes.shape[1]), dtype=numpy.uint64)
    for at, row in enumerate(codes):
        shifted = row.astype(numpy.uint64) << numpy.uint64(at * bits % 32)
        words[at * bits // 32] |= shifted & numpy.uint64(0xFFFFFFFF)
        words[at * bits // 32 + 1] |= shifted >> numpy.uint64(32)
    return torch.from_numpy(words[:-1].astype(numpy.uint32).view(numpy.int32))


def grouped(weight: torch.Tensor, bits: int, group: int, zeros: bool, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes [out, in], zeros [out, groups] and fp16 scales [out, groups] of the groups in `order` [in]."""
    out, top = len(weight), (1 << bits) - 1
    count = int(order.max()) + 1
    codes, middle = torch.zeros_like(weight), torch.zeros(out, count)
    scales = torch.zeros(out, count, dtype=torch.float16)
    for at in range(count):
        mine = weight[:, order == at]
        low, high = (mine.amin(1), mine.amax(1)) if zeros else (-mine.abs().amax(1), mine.abs().amax(1))
        scales[:, at] = ((high - low) / top).clamp(min=1e-4).half()
        step = scales[:, at].float()
        middle[:, at] = (-low / step).round().clamp(0, top) if zeros else (top + 1) // 2
        codes[:, order == at] = (mine / step[:, None] + middle[:, at : at + 1]).round().clamp(0, top)
    return codes, middle, scales


def _numbers(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, order]) * scales.float()[:, order]


def _gptq(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    bits, group = options.get("bits", 4), options.get("group", 128)
    sym, version = options.get("sym", True), options.get("version", "gptq")
    config = {
        "bits": bits, "group_size": group, "desc_act": options.get("act_order", False), "sym": sym,
        "quant_method": "gptq", "checkpoint_format": version, "damp_percent": 0.1, "lm_head": False,
        "true_sequential": True, "static_groups": False, "meta": {"quantizer": "gptqmodel:1.0"},
    }  # fmt: skip
    if version is None:  # older files do not say
        del config["checkpoint_format"]

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        inner = weight.shape[1]
        order = torch.arange(inner) // (inner if group == -1 else group)
        if options.get("act_order"):
            order = order[torch.randperm(inner, generator=torch.Generator().manual_seed(inner))]
        codes, zeros, scales = grouped(weight, bits, group, not sym, order)
        stored = zeros if version == "gptq_v2" else zeros - 1
        stored = stored.remainder(1 << bits)
        parts = {
            "qweight": packed(codes.t().numpy(), bits),
            "qzeros": packed(stored.numpy(), bits).t(),
            "scales": scales.t(),
            "g_idx": order.to(torch.int32),
        }
        return _numbers(codes, zeros, scales, order), parts

    return quantise, config


def _awq(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    group = options.get("group", 128)
    config = {
        "bits": 4, "group_size": group, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    }  # fmt: skip

    def words(columns: torch.Tensor) -> torch.Tensor:
        """[n, out] as [n, out / 8] in AWQ's order."""
        shuffled = columns.unflatten(1, (-1, 8))[:, :, list(AWQ)].flatten(1)
        return packed(shuffled.t().numpy(), 4).t()

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        order = torch.arange(weight.shape[1]) // group
        codes, zeros, scales = grouped(weight, 4, group, True, order)
        parts = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t()}
        return _numbers(codes, zeros, scales, order), parts

    return quantise, config


def _fp8(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    block = options.get("block", [128, 128])
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": block} if block else {}

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        outs, inputs = block or weight.shape
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        numbers = torch.zeros_like(weight)
        scales = torch.zeros(-(-len(weight) // outs), -(-weight.shape[1] // inputs))
        for row in range(len(scales)):
            for column in range(scales.shape[1]):
                at = (slice(row * outs, (row + 1) * outs), slice(column * inputs, (column + 1) * inputs))
                scales[row, column] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
                numbers[at] = codes[at].float() * scales[row, column]
        if options.get("powers"):
            raised = scales.log2().ceil().exp2()
            spread = raised.repeat_interleave(outs, 0)[: len(weight)].repeat_interleave(inputs, 1)[:, : weight.shape[1]]
            codes = (weight / spread).to(torch.float8_e4m3fn)
            small = raised.to(torch.float8_e8m0fnu)
            small = small.view(torch.uint8) if options["powers"] == "as bytes" else small
            return codes.float() * spread, {"weight": codes, "weight_scale_inv": small}
        if block:
            deep = scales[:, None, :, None] if options.get("deep") else scales
            return numbers, {"weight": codes, "weight_scale_inv": deep}
        return numbers, {"weight": codes, "weight_scale": scales[0, 0], "input_scale": torch.tensor(1.0)}

    return quantise, config


def _compressed(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    kind, bits = options.get("format", "pack-quantized"), options.get("bits", 4)
    group, sym = options.get("group", 32), options.get("sym", True)
    weights = {
        "num_bits": bits, "type": "float" if kind == "float-quantized" else "int", "symmetric": sym,
        "group_size": group, "strategy": "group" if kind == "pack-quantized" else "channel", "dynamic": False,
        "block_structure": options.get("block"),
        "actorder": None,
    }  # fmt: skip
    one = {"weights": weights, "input_activations": None, "output_activations": None, "targets": ["Linear"]}
    config = {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": one}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.5,
    }  # fmt: skip

    def whole(codes: torch.Tensor) -> torch.Tensor:
        """Words without a code that goes on in the next."""
        return torch.cat([packed(some.t().numpy(), bits) for some in codes.split(32 // bits, 1)])

    def in_groups(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        order = torch.arange(weight.shape[1]) // group
        codes, zeros, scales = grouped(weight, bits, group, not sym, order)
        parts = {
            "weight_packed": whole(codes).t(),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            parts["weight_zero_point"] = whole(zeros.t())
        return _numbers(codes, zeros, scales, order), parts

    def by_output(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        if options.get("block"):
            numbers, parts = _fp8({})[0](weight, {})
            return numbers, {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}
        top = 448 if kind == "float-quantized" else 127
        scale = (weight.abs().amax(1, keepdim=True) / top).bfloat16()
        steps = weight / scale.float()
        codes = steps.clamp(-448, 448).to(torch.float8_e4m3fn) if top == 448 else steps.round().clamp(-128, 127).char()
        return codes.float() * scale.float(), {"weight": codes, "weight_scale": scale}

    def in_floats(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        if kind.startswith("mx"):
            powers = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
            numbers, codes = four_bit_floats(weight, powers.exp2())
            return numbers, {"weight_packed": codes, "weight_scale": (powers + 127).to(torch.uint8)}
        numbers, codes, scales, factor = nvfp4(weight, 8.0)
        parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": torch.tensor([8.0])}
        return numbers * (1 / factor), parts | {"input_global_scale": torch.tensor([3.0])}

    kinds = {"pack-quantized": in_groups, "nvfp4-pack-quantized": in_floats, "mxfp4-pack-quantized": in_floats}
    return kinds.get(kind, by_output), config


FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of four bits, behind a sign


def four_bit_floats(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [out, in], and codes [out, in / 2], the first of two in the lower half. scales: [out, groups]."""
    table = torch.tensor([*FLOATS, *(-one for one in FLOATS)])
    groups = weight.unflatten(1, (scales.shape[1], -1)) / scales[..., None]
    index = (groups[..., None] - table).abs().argmin(-1)
    codes = index.flatten(1)
    return (table[index] * scales[..., None]).flatten(1), (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def nvfp4(weight: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers without the matrix's factor, codes, and E4M3 scales of 16 inputs, for weights times the factor."""
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * factor).to(torch.float8_e4m3fn)
    return *four_bit_floats(weight * factor, scales.float()), scales, torch.tensor(factor)


def _bitnet(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    linear, mode = options.get("linear", "bitlinear"), options.get("mode", "offline")
    config = {
        "quant_method": "bitnet", "linear_class": linear, "modules_to_not_convert": None,
        "quantization_mode": "online" if mode == "online" else "offline",
    }  # fmt: skip

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        mean = weight.double().abs().mean().float()
        signs = (weight / mean).round().clamp(-1, 1)
        if mode == "online":
            return signs * (1 / (1 / mean)), {"weight": weight}
        scale = (1 / mean if linear == "bitlinear" else mean).bfloat16().reshape(1)
        factor = 1 / scale.float() if linear == "bitlinear" else scale.float()
        if mode == "unpacked":
            return signs * factor, {"weight": signs.bfloat16(), "weight_scale": scale}
        stored = (signs + 1).to(torch.uint8).unflatten(0, (4, -1))  # outputs of a quarter each
        codes = sum(stored[at] << 2 * at for at in range(4))
        return signs * factor, {"weight": codes, "weight_scale": scale}

    return quantise, config


def _nf4(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    nested = options.get("nested", True)
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
        "_load_in_4bit": True, "_load_in_8bit": False, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None,
    }  # fmt: skip

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        table = torch.tensor(NF4)
        blocks = weight.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        index = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
        codes = (index[0::2] << 4 | index[1::2]).to(torch.uint8)[:, None]
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        parts: Tensors = {"weight": codes, "weight.absmax": absmax, "weight.quant_map": table}
        if nested:
            offset = float(absmax.mean())
            levels = torch.linspace(-1, 1, 256)
            chunks = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            top = chunks.abs().amax(1)
            small = (chunks / top[:, None])[..., None].sub(levels).abs().argmin(-1).flatten()[: len(absmax)]
            absmax = levels[small] * top.repeat_interleave(256)[: len(absmax)] + offset
            parts |= {
                "weight.absmax": small.to(torch.uint8),
                "weight.nested_absmax": top,
                "weight.nested_quant_map": levels,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts["weight"] = codes.view(-1).view(options.get("storage", torch.uint8))[:, None]
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return (table[index].view(-1, 64) * absmax[:, None]).view(weight.shape), parts

    return quantise, config


def _int8(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        absmax = weight.abs().amax(1)
        codes = (weight * 127 / absmax[:, None]).round().char()
        parts = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return codes.float() * (absmax * (1 / 127))[:, None], parts

    return quantise, config


def _modelopt(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    kind = options.get("algorithm", "FP8")
    config = {"quantization": {"quant_algo": kind, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        if kind.endswith("NVFP4"):
            numbers, codes, scales, _ = nvfp4(weight, 0.25)
            parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(4.0)}
            return numbers * 4, parts | {"input_scale": torch.tensor(1.0), "k_scale": torch.tensor(1.0)}
        scale = (weight.abs().max() if kind == "FP8" else weight.abs().amax(1)) / 448
        codes = (weight / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
        return codes.float() * scale.reshape(-1, 1), parts | {"k_scale": torch.tensor(1.0)}

    return quantise, config


def _mlx(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    bits, group = options.get("bits", 4), options.get("group", 64)
    config = {"group_size": group, "bits": bits, "model.layers.0.mlp.down_proj": {"group_size": group, "bits": bits}}

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        bits = 8 if options.get("wide", "none") in options["name"] else config["bits"]
        groups = weight.unflatten(1, (-1, group))
        low, high = groups.amin(-1).half(), groups.amax(-1)
        scales = ((high - low.float()) / ((1 << bits) - 1)).half()
        codes = ((groups - low.float()[..., None]) / scales.float()[..., None]).round().clamp(0, (1 << bits) - 1)
        numbers = codes * scales.float()[..., None] + low.float()[..., None]
        stream = (codes.flatten(1).int()[..., None] >> torch.arange(bits)) & 1  # the bits of a row, the lowest first
        places = stream.flatten(1).unflatten(1, (-1, 32)).numpy().astype(numpy.uint64) << numpy.arange(
            32, dtype=numpy.uint64
        )
        words = torch.from_numpy(places.sum(-1).astype(numpy.uint32).view(numpy.int32)).view(torch.uint32)
        return numbers.flatten(1), {"weight": words, "scales": scales, "biases": low}

    return quantise, config


def powers_of_two(weight: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of groups of 32 inputs, and their bytes (E8M0)."""
    powers = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / most).log2().ceil()
    return powers.exp2(), (powers + 127).to(torch.uint8)


def _mlx_floats(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    mode = options["mode"]

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        if mode == "nvfp4":
            numbers, codes, scales, _ = nvfp4(weight, 1.0)
            stored = scales.view(torch.uint8)
        else:
            scales, stored = powers_of_two(weight, 6 if mode == "mxfp4" else 448)
            spread = scales.repeat_interleave(32, 1)
            eights = (weight / spread).to(torch.float8_e4m3fn)
            numbers, codes = eights.float() * spread, eights.view(torch.uint8)
            if mode == "mxfp4":
                numbers, codes = four_bit_floats(weight, scales)
        return numbers, {"weight": codes.contiguous().view(torch.uint32), "scales": stored}

    return quantise, {"group_size": 16 if mode == "nvfp4" else 32, "bits": 8 if mode == "mxfp8" else 4, "mode": mode}


def _metal(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    inner, config = _mlx(options)

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        numbers, parts = inner(weight, options)
        return numbers, {"qbiases" if part == "biases" else part: one for part, one in parts.items()}

    return quantise, {"quant_method": "metal", "bits": config["bits"], "group_size": 64, "modules_to_not_convert": None}


def _quark(options: dict[str, Any]) -> tuple[Callable[..., Written], dict[str, Any]]:
    """MXFP4, as Quark has it or, signed, as DeepSeek V4 has its experts."""
    signed = options.get("signed", False)

    def quantise(weight: torch.Tensor, options: dict[str, Any]) -> Written:
        scales, stored = powers_of_two(weight, 6)
        numbers, codes = four_bit_floats(weight, scales)
        if signed:
            return numbers, {"weight": codes.view(torch.int8), "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
        return numbers, {"weight": codes, "weight_scale": stored}

    expert = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return quantise, expert if signed else {"quant_method": "quark", "export": {"pack_method": "reorder"}}


METHODS: dict[str, Callable[[dict[str, Any]], tuple[Callable[..., Written], dict[str, Any]]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed": _compressed,
    "nf4": _nf4,
    "int8": _int8,
    "modelopt": _modelopt,
    "bitnet": _bitnet,
    "mlx": _mlx,
    "mlx floats": _mlx_floats,
    "metal": _metal,
    "quark": _quark,
}
