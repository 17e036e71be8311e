"""Small checkpoints with a layer that predicts one token further (MTP), and its oracle: transformers' decoder layer.

made = make_next_layer(folder, "glm4.5")
made.logits(tokens)      the layer's logits over a text, by a plain loop in fp32
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.fixtures import make_checkpoint, write_json

LAYERS = 3  # of the model, before the one that is made its next layer


@dataclass(frozen=True)
class MadeNext:
    """path: the folder. model: transformers', of which the last layer is the next layer. extra: its other weights."""

    path: Path
    model: Any
    extra: dict[str, torch.Tensor]

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
        halves = [self._normed(embedded, "enorm"), self._normed(before, "hnorm")]
        x = torch.cat(halves, -1) @ self.extra["eh_proj"].T
        x = self._through(self.model.model.layers[LAYERS], x[None])[0]
        return self._normed(x, "shared_head.norm") @ self.model.lm_head.weight.T

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * self.extra[name]

    def _through(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        turns = self.model.model.rotary_emb(x, positions)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        found = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return found[0] if isinstance(found, tuple) else found


def make_next_layer(folder: Path, kind: str, *, copies: bool = False) -> MadeNext:
    """Write the folder of a model whose files have a next layer, in the form of DeepSeek V3 and GLM-4.5.

    copies: the model's next token depends on its last one alone, and the layer predicts it from that.
    """
    path, model = make_checkpoint(folder, kind, changes={"num_hidden_layers": LAYERS + 1})
    at, generator = f"model.layers.{LAYERS}", torch.Generator().manual_seed(7)
    file, width = path / "model.safetensors", model.config.hidden_size
    tensors = {name: one for name, one in load_file(file).items() if not name.startswith(f"model.layers.{LAYERS + 1}.")}
    extra = {name: 1 + 0.2 * torch.randn(width, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    extra["eh_proj"] = torch.randn(width, 2 * width, generator=generator) / width**0.5
    if copies:
        for name, one in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                one.zero_()
        extra = {name: torch.ones(width) for name in ("enorm", "hnorm")}
        extra |= {"shared_head.norm": tensors["model.norm.weight"].clone()}
        extra["eh_proj"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    tensors |= {f"{at}.{name}.weight": one for name, one in extra.items()}
    tensors |= {f"{at}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    tensors |= {f"{at}.shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1})
    return MadeNext(path, model, extra)
