"""Small checkpoints with a layer that predicts one token further (MTP), and its oracle: transformers' decoder layer.

made = make_next_layer(folder, "glm4.5")
made.logits(tokens)      the layer's logits over a text, by a plain loop in fp32
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.fixtures import make_checkpoint, write_json

LAYERS = 3  # of the model, before the one that is made its next layer


@dataclass(frozen=True)
class Form:
    """How files have the layer: what they name its parts, and what is added to the weights of norms."""

    project: str
    token_norm: str
    hidden_norm: str
    norm: str
    at: str = f"model.layers.{LAYERS}"  # before the names of the other layers
    parts: str = f"model.layers.{LAYERS}"  # before the names above
    plus: float = 0.0
    hidden_first: bool = False  # the projection reads the state before the embedding
    changes: dict[str, Any] = field(default_factory=dict)  # of config.json


ROUTED = Form("eh_proj", "enorm", "hnorm", "shared_head.norm", changes={"num_nextn_predict_layers": 1})
QWEN = Form("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "mtp.layers.0", "mtp", 1.0)
MIMO = Form(
    *("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    at="model.mtp_layers.0",
    parts="model.mtp_layers.0",
    hidden_first=True,
    changes=ROUTED.changes | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
)
FORMS = {
    "mimo": MIMO,
    "deepseek3": ROUTED,
    "glm4.5": ROUTED,
    "qwen3-next": replace(QWEN, changes={"full_attention_interval": 2}),
    "qwen3.5": replace(QWEN, changes={"layer_types": ["linear_attention", "full_attention"] * 2}),
    "qwen3.5-moe": replace(QWEN, changes={"layer_types": ["linear_attention", "full_attention"] * 2}),
}


@dataclass(frozen=True)
class MadeNext:
    """path: the folder. model: transformers', of which the last layer is the next layer. extra: its other weights."""

    path: Path
    model: Any
    extra: dict[str, torch.Tensor]
    form: Form

    @torch.no_grad()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """The model's hidden states [T, width] behind its final norm."""
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([tokens]))
        for layer in inner.layers[:LAYERS]:
            x = self._through(layer, x)
        return inner.norm(x)[0]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """The next layer's logits [T, vocabulary]: row p from token p and the state of token p - 1 (none: 0)."""
        states = self.states(tokens)
        before = torch.cat((torch.zeros_like(states[:1]), states[:-1]))
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        halves = [self._normed(embedded, self.form.token_norm), self._normed(before, self.form.hidden_norm)]
        x = torch.cat(halves[::-1] if self.form.hidden_first else halves, -1) @ self.extra[self.form.project].T
        x = self._through(self.model.model.layers[LAYERS], x[None])[0]
        return self._normed(x, self.form.norm) @ self.model.lm_head.weight.T

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        length = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return x * length * (self.extra[name] + self.form.plus)

    def _through(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        turns = self.model.model.rotary_emb(x, positions)
        attends = "linear_attn" not in dict(layer.named_children())
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None] if attends else None
        found = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return found[0] if isinstance(found, tuple) else found


def make_next_layer(
    folder: Path, kind: str, *, copies: bool = False, apart: bool = False, changes: dict[str, Any] | None = None
) -> MadeNext:
    """Write the folder of a model whose files have a next layer, in the form of its kind.

    copies: the model's next token depends on its last one alone, and the layer predicts it from that. apart: the
    layer's experts lie one by one. changes: of config.json, before the model is made.
    """
    form = FORMS[kind]
    types = {key: one for key, one in form.changes.items() if key in ("layer_types", "full_attention_interval")}
    made = "qwen2" if kind == "mimo" else kind  # its layers are Qwen2's
    path, model = make_checkpoint(folder, made, changes={**types, **(changes or {}), "num_hidden_layers": LAYERS + 1})
    file, width = path / "model.safetensors", model.config.hidden_size
    tensors = {name: one for name, one in load_file(file).items() if not name.startswith(f"model.layers.{LAYERS + 1}.")}
    extra = _extra(form, width, tensors) if copies else _random_extra(form, width)
    if copies:
        for name, one in tensors.items():
            if re.search(r"(o_proj|out_proj|down_proj)(\.weight)?$", name):
                one.zero_()
    last = f"model.layers.{LAYERS}."
    tensors = {name.replace(last, f"{form.at}."): one for name, one in tensors.items()}
    if form is ROUTED:
        tensors |= {f"{form.at}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        tensors |= {f"{form.at}.shared_head.head.weight": tensors["lm_head.weight"].clone()}
    if apart:
        tensors = _apart(tensors, form.at)
    tensors |= {f"{form.parts}.{name}.weight": one for name, one in extra.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8")) | form.changes
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    write_json(path / "config.json", config | {"num_hidden_layers": LAYERS})
    return MadeNext(path, model, extra, form)


def _random_extra(form: Form, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    norms = (form.token_norm, form.hidden_norm, form.norm)
    extra = {name: 1 - form.plus + 0.2 * torch.randn(width, generator=generator) for name in norms}
    return extra | {form.project: torch.randn(width, 2 * width, generator=generator) / width**0.5}


def _extra(form: Form, width: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a layer that passes the token on, to the model's own norm."""
    extra = {name: torch.ones(width) - form.plus for name in (form.token_norm, form.hidden_norm)}
    extra |= {form.norm: tensors["model.norm.weight"].clone()}
    halves = (torch.eye(width), torch.zeros(width, width))
    return extra | {form.project: torch.cat(halves[::-1] if form.hidden_first else halves, 1)}


def _apart(tensors: Mapping[str, torch.Tensor], at: str) -> dict[str, torch.Tensor]:
    """The tensors with the layer's experts one by one."""
    experts, found = f"{at}.mlp.experts", dict(tensors)
    both, down = found.pop(f"{experts}.gate_up_proj"), found.pop(f"{experts}.down_proj")
    for i, (one, other) in enumerate(zip(both, down, strict=True)):
        gate, up = one.chunk(2)
        parts = {"gate": gate, "up": up, "down": other}
        found |= {f"{experts}.{i}.{name}_proj.weight": part.contiguous() for name, part in parts.items()}
    return found
