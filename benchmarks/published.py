"""Folders that the quantisers' own libraries make on a CPU: do we read the numbers that they compute with?

    python -m benchmarks.published

Run it in an environment that has them besides ours (none of them needs a GPU): autoawq, auto-gptq, compressed-tensors,
bitsandbytes. Each quantises the linear layers of a small random model, by its own packing; the folder is opened here,
and every matrix is compared with what the library makes of an identity. Prints a line for each library, and exits with
1 if one differs. A library that does not import is named and left out.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tokenwright.checkpoints.folder import Checkpoint

GROUP = 32
Made = tuple[dict[str, torch.Tensor], torch.Tensor]  # a layer's tensors by the ends of their names, and its numbers


def chosen(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [out, groups] of four bits, from the extremes of each group."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def awq(linear: torch.nn.Linear) -> Made:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    scales, zeros = chosen(linear.weight.data)
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.t(), zeros=zeros.t())
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    return parts, dequantize_gemm(*(parts[name] for name in ("qweight", "qzeros", "scales")), 4, GROUP).t()


def gptq(linear: torch.nn.Linear) -> Made:
    package = find_spec("auto_gptq")
    if package is None or package.origin is None:
        raise ImportError("no module named auto_gptq")
    # The file alone: the package itself asks for an older transformers.
    file = Path(package.origin).parent / "nn_modules/qlinear/qlinear_cuda_old.py"
    spec = spec_from_file_location("auto_gptq_linear", file)
    assert spec is not None and spec.loader is not None, "the file is there"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    scales, zeros = chosen(linear.weight.data)
    layer = module.QuantLinear(4, GROUP, linear.in_features, linear.out_features, False)
    half = torch.nn.Linear(linear.in_features, linear.out_features, False, dtype=torch.float16)
    half.weight.data = linear.weight.data.half()
    layer.pack(half, scales.half(), zeros.half(), None)
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return parts, layer(torch.eye(linear.in_features, dtype=torch.float16)).t()


def compressed(linear: torch.nn.Linear) -> Made:
    from compressed_tensors.compressors import pack_to_int32, unpack_from_int32

    scales, _ = chosen(linear.weight.data)
    steps = (linear.weight.data.unflatten(1, (-1, GROUP)) / scales[..., None]).round().clamp(-8, 7).flatten(1)
    packed = pack_to_int32(steps.to(torch.int8), 4)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(steps.shape)}
    codes = unpack_from_int32(packed, 4, steps.shape).float()
    return parts, codes * scales.repeat_interleave(GROUP, 1)


def nf4(linear: torch.nn.Linear) -> Made:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(linear.weight.data.contiguous(), quant_type="nf4", compress_statistics=True)
    described = {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    return {"weight": packed, **described}, dequantize_4bit(packed, state)


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group"}
TOOLS: dict[str, tuple[Callable[[torch.nn.Linear], Made], dict[str, Any]]] = {
    "autoawq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "auto-gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": WEIGHTS, "targets": ["Linear"]}},
        },
    ),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def differing(folder: Path, quantise: Callable[[torch.nn.Linear], Made], about: dict[str, Any]) -> tuple[int, int]:
    """Quantise a model into a folder; how many of its matrices we read otherwise, and how many there are."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=320, num_key_value_heads=2, **sizes))
    tensors, expected = {**model.state_dict()}, {}
    for name, one in model.named_modules():
        if isinstance(one, torch.nn.Linear) and name != "lm_head":
            del tensors[f"{name}.weight"]
            parts, numbers = quantise(one)
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
            expected[name.removeprefix("model.")] = numbers
    save_file(tensors, folder / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": about}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    found = Checkpoint.open(folder)
    ours = found.tensors(torch.float32)
    wrong = 0
    for name, source in found.sources.items():
        if (numbers := expected.get(source.name.removesuffix(".weight"))) is not None:
            wrong += not torch.equal(ours[name].to(numbers.dtype), numbers)
    return wrong, len(expected)


def main() -> int:
    warnings.simplefilter("ignore")
    good = True
    for tool, (quantise, about) in TOOLS.items():
        with tempfile.TemporaryDirectory() as home:
            try:
                wrong, count = differing(Path(home), quantise, about)
            except ImportError as error:
                print(f"{tool}: not here ({str(error)[:100]})")
                continue
        good &= not wrong
        print(f"{tool}: {count - wrong} of {count} matrices are read as the library computes them")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
