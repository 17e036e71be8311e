"""Small random models that see, as transformers writes them, with a tokenizer of bytes and a chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB, START, END, IMAGE, BEFORE, AFTER, VIDEO = 300, 280, 281, 290, 292, 293, 291
_SPECIAL = {"<start>": START, "<end>": END, "<img>": IMAGE, "<video>": VIDEO, "<in>": BEFORE, "<out>": AFTER}
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "pad_token_id": 0,
    "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2, "max_position_embeddings": 512,
}  # fmt: skip
_TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 4,
    "image_size": 32,
}  # fmt: skip
_WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
}
# The model's class, its config's other keys, and the settings of its processor and what the template prints for one.
KINDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": _TEXT | _WINDOWS,
            "vision_config": _TOWER | {"vision_use_head": False},
            "mm_tokens_per_image": 16,
            "image_token_id": IMAGE,
            "boi_token_id": BEFORE,
            "eoi_token_id": AFTER,
        },
        {"size": {"height": 32, "width": 32}, "resample": 2},
        "<in>",
    ),
}
_TEMPLATE = """{%% for m in messages %%}<start>{{ m['role'] }}
{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}{%% for i in m['content'] %%}\
{%% if i['type'] == 'image' %%}%s{%% elif i['type'] == 'text' %%}{{ i['text'] }}{%% endif %%}{%% endfor %%}\
{%% endif %%}<end>
{%% endfor %%}{%% if add_generation_prompt %%}<start>model
{%% endif %%}"""


def make_model(folder: Path, kind: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Write a folder with a model, and return the oracle."""
    name, config, processor, placeholder = KINDS[kind]
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, f"{name}Config")(**config))
    with torch.no_grad():
        for weight in made.parameters():
            wide = weight.dim() > 1
            weight.copy_(torch.randn(weight.shape) * (0.2 if wide else 0.1) + (0 if wide or weight.mean() < 0.5 else 1))
    made.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    names = {at: name for name, at in _SPECIAL.items()}
    vocabulary |= {names.get(at, f"<unused{at}>"): at for at in range(len(letters), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": _TEMPLATE % placeholder, "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return made.float().eval()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture, smooth enough that its resized forms differ little between filters."""
    rough = np.random.default_rng(seed).integers(0, 255, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR)


def question(*parts: object, role: str = "user") -> list[dict[str, Any]]:
    """A conversation of one message: texts and pictures."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one} for one in parts
    ]
    return [{"role": role, "content": content}]
