"""From a checkpoint to a folder that any Llama runtime loads: config, weights in bf16, tokenizer, chat template."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from recipes.stories.data import BOS, END, EOS
from recipes.stories.model import Model, ModelConfig

# A system message has no header of its own: it precedes the first user message, with two newlines between them.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set system = namespace(text='') -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {%- set system.text = message.content ~ '\\n\\n' -%}
  {%- elif message.role == 'user' -%}
    {{- '<|user|>' ~ system.text ~ message.content ~ '<|end|>' -}}
    {%- set system.text = '' -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<|assistant|>' ~ message.content ~ '<|end|>' -}}
  {%- else -%}
    {{- raise_exception('unknown role: ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def llama_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context,
        "rope_theta": config.theta,
        "rope_scaling": None,
        "rms_norm_eps": config.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": [1, 4],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


# At temperature 1 a model this small becomes incoherent at once; these settings gave the best text.
GENERATION_CONFIG: dict[str, object] = {
    "bos_token_id": 0,
    "eos_token_id": [1, 4],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
}
TOKENIZER_CONFIG: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "additional_special_tokens": ["<|user|>", "<|assistant|>", END],
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def load_model(folder: Path, config: ModelConfig, rounded: bool = True) -> Model:
    """The trained model in fp32; `rounded`: with its weights rounded to bf16, as shipped."""
    model = Model(config)
    weights = load_file(folder / "weights.safetensors")
    if rounded:
        weights = {name: weight.bfloat16().float() for name, weight in weights.items()}
    model.load_state_dict(weights, strict=True)
    return model.eval()


def export(folder: Path, target: Path, config: ModelConfig) -> str:
    """Write the checkpoint in `folder` to `target`. Returns the SHA-256 of the weights file."""
    target.mkdir(parents=True, exist_ok=True)
    weights = load_file(folder / "weights.safetensors")
    tensors = {f"model.{name}": weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": llama_config(config),
        "generation_config.json": GENERATION_CONFIG,
        "tokenizer_config.json": {**TOKENIZER_CONFIG, "model_max_length": config.context},
    }
    for name, content in documents.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (target / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    return hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
