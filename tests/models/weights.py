"""The weights of the random checkpoints in `fixtures.py`, and their oracle: transformers' model, made by torch.

`python -m tests.models.weights` makes checkpoints for a process that has no torch: for each line on stdin, the JSON of
`write_checkpoint`'s arguments, it writes a folder and prints a line.
"""

import copy
import json
import shutil
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tests.models import hybrids
from tests.models.fixtures import MXFP4, VOCAB, make_config, write_json, write_tokenizer


def make_model(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """transformers' model for a config.json, its attention peaked and its logits wide."""
    made = AutoConfig.for_model(**json.loads(json.dumps(config)))
    made._attn_implementation = "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    hybrids.token_by_token(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random)
            weight.copy_(_shaped(name, noise, config))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=random))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=random))
    return model.eval()


_OUT = ("o_proj", "out_proj", "w2", "down_proj", "c_proj", "attention.dense", "dense_4h_to_h", ".linear.")


def _shaped(name: str, noise: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Unit noise turned into a weight: the gain depends on the tensor's part in the block."""
    if name.endswith("bias"):
        return 0.2 * noise
    if noise.dim() == 1 or "_norm" in name:
        return _shaped_norm(name, noise, config)
    if any(part in name for part in ("embed_tokens", "wte", "lm_head", "embed_in", "embed_out")):
        return 0.16 * noise
    if "wpe" in name:
        return 0.1 * noise
    weight = noise / noise.shape[0 if config["model_type"] == "gpt2" else -1] ** 0.5
    if any(part in name for part in ("c_attn", "qkv_proj", "query_key_value")):
        _scale_fused(name, weight, config)
    elif "kv_a_proj" in name or "kv_b_proj" in name:
        _scale_latent(name, weight, config)
    elif any(part in name for part in ("q_proj", "k_proj", "q_b_proj")):
        weight = 1.8 * weight
    elif "mlp.experts." in name and config["model_type"] == "gpt_oss":  # [E, in, out], in numbers that MXFP4 has
        weight = noise / noise.shape[1] ** 0.5 * (0.4 if "down_proj" in name else 1)
        weight = mxfp4(weight.transpose(1, 2))[0].transpose(1, 2)
    elif "mlp.experts." in name:  # down_proj: more than that of an MLP, since a row's weights sum to one at most
        weight = 0.4 * weight if "down_proj" in name else weight
    elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
        weight = 2 * weight
    elif any(part in name for part in _OUT):
        weight = 0.15 * weight
    return weight


def _scale_fused(name: str, weight: torch.Tensor, config: dict[str, Any]) -> None:
    """Scale q and k in one tensor of q, k and v."""
    heads = config.get("n_head") or config["num_attention_heads"]
    if config["model_type"] in ("codegen", "falcon"):  # in groups
        weight *= 1.8
    elif "c_attn" in name:  # [in, 3 x width]: q and k are the first two thirds
        weight[:, : 2 * weight.shape[1] // 3] *= 2.4
    elif "qkv_proj" in name:  # [q, k and v, in]; the last rows are those of v
        kv_heads = config["num_key_value_heads"]
        weight[: len(weight) // (heads + 2 * kv_heads) * (heads + kv_heads)] *= 1.8
    else:  # the rows of q, k and v of each head in turn
        weight.view(heads, 3, -1, weight.shape[1])[:, :2] *= 2.6


def _shaped_norm(name: str, noise: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    unscaled = config["model_type"].startswith(("gemma3n", "gemma4"))  # its scores are q k alone
    centred = not unscaled and any(kind in config["model_type"] for kind in ("gemma", "qwen3_next", "qwen3_5"))
    one = 0.0 if centred and "linear_attn" not in name else 1.0  # such norms multiply by 1 + weight
    if any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "y_layernorm")):
        return one + (-0.4 if unscaled else 0.85) + 0.1 * noise
    return one + 0.1 * noise


def _scale_latent(name: str, weight: torch.Tensor, config: dict[str, Any]) -> None:
    """Scale the rows that make keys: in kv_b the first ones of each head, in kv_a the last ones, which turn."""
    if "kv_b_proj" in name:
        weight.view(config["num_attention_heads"], -1, weight.shape[1])[:, : config["qk_nope_head_dim"]] *= 1.8
    else:
        weight[config["kv_lora_rank"] :] *= 1.8


def stored_tensors(
    model: PreTrainedModel, config: dict[str, Any], spelling: str, quantised: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors under the names, and with the buffers, that the original files have."""
    whole: dict[int, tuple[str, torch.Tensor]] = {}  # a tensor with several names is there once, by the first
    for name, value in model.state_dict().items():
        whole.setdefault(value.data_ptr(), (name, value.detach().clone()))
    tensors = dict(whole.values())
    kind = config["model_type"]
    if kind == "kimi_linear":
        return {name: one.clone() for name, one in revert_weight_conversion(model, tensors).items()}
    tensors = {name: one for pair in tensors.items() for name, one in _each_expert(kind, *pair, quantised)}
    if spelling == "new" or kind in hybrids.TYPES:
        return tensors
    if config["model_type"] == "gpt2":
        mask = torch.ones(config["n_positions"], config["n_positions"]).tril()[None, None]
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        tensors |= {f"h.{i}.attn.bias": mask.clone() for i in range(config["n_layer"])}
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    elif config["model_type"] == "gpt_neox":
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
        for i in range(config["num_hidden_layers"]):
            tensors[f"gpt_neox.layers.{i}.attention.bias"] = torch.ones(1, 1, 8, 8).tril()
            tensors[f"gpt_neox.layers.{i}.attention.masked_bias"] = torch.tensor(-1e9)
    elif config["model_type"] == "deepseek_v3":
        tensors |= _next_layer(config)
    elif config["model_type"] in ("gemma3n_text", "gemma4_text"):  # as published, with K and V that nothing reads
        for i in range(config["num_hidden_layers"] - config["num_kv_shared_layers"], config["num_hidden_layers"]):
            at = f"model.layers.{i}.self_attn"
            tensors |= {f"{at}.{one}.weight": torch.zeros(1, 1) for one in ("k_proj", "v_proj")}
            tensors[f"{at}.k_norm.weight"] = torch.zeros(1)
    elif config["model_type"] == "gemma3":  # as published; transformers renames them when it loads them
        tensors = {_as_published(name): value for name, value in tensors.items()}
    else:
        size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        inverse = 10000.0 ** -(torch.arange(0, size, 2) / size)
        for i in range(config["num_hidden_layers"]):
            tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = inverse.clone()
    return tensors


def _each_expert(
    model_type: str, name: str, value: torch.Tensor, quantised: bool = True
) -> list[tuple[str, torch.Tensor]]:
    """A tensor as published: transformers has the experts of a layer in one tensor, the files each in its own."""
    of_mixtral = model_type in ("mixtral", "minimax_m2")
    if of_mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if model_type in ("ernie4_5_moe", "exaone_moe") and name.endswith("e_score_correction_bias"):
        name = name.replace(".gate.", ".")
    at, experts, part = name.partition(".experts.")
    if model_type == "gpt_oss" and quantised and part in ("gate_up_proj", "down_proj"):
        _, blocks, scales = mxfp4(value.transpose(1, 2))
        return [(f"{name}_blocks", blocks), (f"{name}_scales", scales)]
    if model_type == "granitemoehybrid" and not experts:
        return [(name.replace("router.weight", "router.layer.weight"), value)]
    if not experts or model_type in ("gpt_oss", "qwen3_5_moe_text", "gemma4_text"):
        return [(name, value)]
    if model_type == "granitemoehybrid":  # as published: the experts of a layer in one tensor
        return [(f"{at}.{'input' if part == 'gate_up_proj' else 'output'}_linear.weight", value)]
    names = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
    pieces: list[tuple[str, torch.Tensor]] = []
    for i, one in enumerate(value):
        pairs = [(names[2], one)] if part == "down_proj" else zip(names, one.chunk(2), strict=False)
        pieces += [(f"{at}.experts.{i}.{its}.weight", piece.clone()) for its, piece in pairs]
    return pieces


def _next_layer(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Some tensors of the layer that predicts a second token, which lies behind the last one."""
    at, width = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    shapes = {"embed_tokens": (VOCAB, width), "enorm": (width,), "eh_proj": (width, 2 * width)}
    shapes |= {"shared_head.head": (VOCAB, width), "input_layernorm": (width,)}
    return {f"{at}.{name}.weight": torch.full(shape, 0.5) for name, shape in shapes.items()}


def _as_published(name: str) -> str:
    bare = name.removeprefix("model.")
    return bare.replace("language_model.", "language_model.model.") if bare.startswith("language_model.") else bare


def mxfp4(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [E, out, in] rounded to MXFP4, its blocks [E, out, in / 32, 16] and its scales [E, out, in / 32]."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = numbers.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    small = groups / exponents.exp2()[..., None]
    codes = (small.abs()[..., None] - table).abs().argmin(-1)
    rounded = table[codes] * small.sign() * exponents.exp2()[..., None]
    signed = (codes + 8 * (small < 0)).to(torch.uint8)
    blocks = signed[..., ::2] | signed[..., 1::2] << 4
    return rounded.flatten(-2), blocks, (exponents + 127).to(torch.uint8)


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """One model.safetensors, or several with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _as_made(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor has a dtype of its own in the files."""
    return tensor.dtype == torch.uint8 or name.endswith("e_score_correction_bias")


_MADE = TemporaryDirectory()  # a folder for each checkpoint


def write_checkpoint(
    folder: Path, kind: str, spelling: str, dtype: str, shards: int, changes: dict[str, Any] | None, seed: int
) -> PreTrainedModel:
    """Write the folder of `fixtures.make_checkpoint`. Returns the oracle.

    Each is made once in a process, since transformers takes most of the time: folder and oracle are copies.
    """
    made, model = _checkpoint(kind, spelling, dtype, shards, json.dumps(changes), seed)
    shutil.copytree(made, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return copy.deepcopy(model)


@cache
def _checkpoint(
    kind: str, spelling: str, dtype: str, shards: int, changes: str, seed: int
) -> tuple[Path, PreTrainedModel]:
    """A folder that lasts as long as the process, and the oracle. changes: in JSON."""
    config, quantised = make_config(kind, spelling, json.loads(changes)), kind != "gpt-oss-plain"
    model = make_model(config, seed)
    stored: torch.dtype = getattr(torch, dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(stored).float())
    published = stored_tensors(model, config, spelling, quantised)
    tensors = {name: one if _as_made(name, one) else one.to(stored) for name, one in published.items()}
    if config["model_type"] == "gpt_oss" and quantised:
        config["quantization_config"] = copy.deepcopy(MXFP4)
    if "torch_dtype" in config or "dtype" in config:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    folder = Path(mkdtemp(dir=_MADE.name)) / "model"
    folder.mkdir()
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.31.0"},
    )
    write_weights(folder, tensors, shards)
    write_tokenizer(folder)
    return folder, model


if __name__ == "__main__":
    for line in sys.stdin:
        folder, *more = json.loads(line)
        write_checkpoint(Path(folder), *more)
        print("made", flush=True)
