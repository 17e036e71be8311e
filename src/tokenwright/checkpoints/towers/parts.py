"""Layers and projectors of towers, from the facts of their configs, with their names in files."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenwright.checkpoints.families.family import TensorSource, activation
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Rope
from tokenwright.models.graph import MLP, Attention
from tokenwright.models.op import Activation, Matrix, Norm, Scoring
from tokenwright.models.tower import Projector, Squares, Step, TowerLayer

Kind = Literal["layer", "rms"]
MOST_SIDE = 1 << 14


# Names of a layer's parts, ours and those in files; of towers whose MLPs have gates too, and of others.
SIGLIP = """
    norm1=layer_norm1 norm2=layer_norm2 q=self_attn.q_proj k=self_attn.k_proj v=self_attn.v_proj out=self_attn.out_proj
    up=mlp.fc1 down=mlp.fc2
"""
PIXTRAL = """
    norm1=attention_norm norm2=ffn_norm q=attention.q_proj k=attention.k_proj v=attention.v_proj out=attention.o_proj
    gate=feed_forward.gate_proj up=feed_forward.up_proj down=feed_forward.down_proj
"""
INTERN = """
    norm1=layernorm_before norm2=layernorm_after q=attention.q_proj k=attention.k_proj v=attention.v_proj
    out=attention.projection_layer up=mlp.fc1 down=mlp.fc2 scale1=lambda_1! scale2=lambda_2!
"""
QWEN = "norm1=norm1 norm2=norm2 q=attn.qkv k=attn.qkv v=attn.qkv out=attn.proj"
GEMMA4 = """
    norm1=input_layernorm norm2=pre_feedforward_layernorm post_norm1=post_attention_layernorm
    post_norm2=post_feedforward_layernorm q_norm=self_attn.q_norm k_norm=self_attn.k_norm q=self_attn.q_proj.linear
    k=self_attn.k_proj.linear v=self_attn.v_proj.linear out=self_attn.o_proj.linear gate=mlp.gate_proj.linear
    up=mlp.up_proj.linear down=mlp.down_proj.linear
"""
_SIGLIP = (12, 768, 12, 3072)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    layers: int
    width: int
    heads: int
    size: int  # of a head
    mlp_width: int
    activation: Activation
    eps: float = 1e-6
    norm: Kind = "layer"
    qkv_bias: bool = True
    bias: bool = True  # of the other matrices
    gated: bool = False
    rope: Rope | None = None
    full: frozenset[int] | None = None  # the layers without windows; None: all
    scaled: bool = False
    around: bool = False  # norms after both halves, and of q, k and v
    clipped: bool = False

    @classmethod
    def read(
        cls, keys: JsonKeys, sizes: tuple[int, int, int, int] = _SIGLIP, kind: str = "gelu_pytorch_tanh", **more: object
    ) -> "LayerFacts":
        """The facts from common keys of vision configs. sizes (layers, width, heads, MLP), kind: of absent keys."""
        found: dict[str, Any] = {
            "layers": keys.whole("num_hidden_layers", sizes[0], most=1 << 10),
            "width": keys.whole("hidden_size", sizes[1], most=1 << 16),
            "heads": keys.whole("num_attention_heads", sizes[2], most=1 << 10),
            "mlp_width": keys.whole("intermediate_size", sizes[3], most=1 << 18),
            "activation": activation(keys, "hidden_act", kind),
            "eps": keys.number("layer_norm_eps", 1e-6),
        }
        found["size"] = keys.whole("head_dim", found["width"] // found["heads"], most=1 << 12)
        return cls(**(found | more))

    def layer(self, number: int) -> TowerLayer:
        at, width, size = f"layers.{number}", self.width, self.size
        norms = [Norm(f"{at}.{one}", self.norm, width, self.eps) for one in ("norm1", "norm2")]
        qkv = Matrix(f"{at}.qkv", tuple((f"{at}.{one}", self.heads * size) for one in "qkv"), width, self.qkv_bias)
        out = Matrix.single(f"{at}.out", width, self.heads * size, self.bias)
        names = ("gate", "up") if self.gated else ("up",)
        up = Matrix(f"{at}.hidden", tuple((f"{at}.{one}", self.mlp_width) for one in names), width, self.bias)
        down = Matrix.single(f"{at}.down", width, self.mlp_width, self.bias)
        heads = (self.heads, self.heads, size, Scoring(1.0 if self.around else size**-0.5))
        attention = Attention(0, *heads, norms[0], qkv, out, rotary=self.rope)
        mlp = MLP(0, norms[1], up, down, self.activation, self.gated)
        if self.around:
            first, second = (Norm(f"{at}.post_norm{one}", self.norm, width, self.eps) for one in (1, 2))
            q, k, v = (Norm(f"{at}.{one}_norm", self.norm, size, self.eps, weighted=one != "v") for one in "qkv")
            attention = replace(attention, post_norm=first, q_norm=q, k_norm=k, v_norm=v)
            mlp = replace(mlp, post_norm=second)
        scales = tuple(f"{at}.scale{place}" for place in (1, 2)) if self.scaled else ()
        return TowerLayer(attention, mlp, self.full is not None and number not in self.full, scales, self.clipped)

    def made(self, count: int | None = None) -> tuple[TowerLayer, ...]:
        return tuple(self.layer(number) for number in range(self.layers if count is None else count))


@dataclass(frozen=True, slots=True)
class NamedSteps:
    """A projector with the names of its steps in files. at: the prefix of our names of its tensors."""

    at: str
    steps: list[Step] = field(default_factory=list)
    names: dict[str, TensorSource] = field(default_factory=dict)

    def linear(self, file: str, out: int, inner: int, bias: bool = True, transpose: bool = False) -> "NamedSteps":
        name = f"{self.at}.{len(self.steps)}"
        self.names[name] = TensorSource(file, transpose=transpose)
        self.steps.append(Matrix.single(name, out, inner, bias))
        return self

    def norm(self, file: str, size: int, eps: float, kind: Kind = "layer", plus: float = 0) -> "NamedSteps":
        name = f"{self.at}.{len(self.steps)}"
        self.names[name] = TensorSource(file, plus=plus)
        self.steps.append(Norm(name, kind, size, eps))
        return self

    def then(self, *steps: "Squares | Norm | Activation") -> "NamedSteps":
        self.steps.extend(steps)
        return self

    def made(self) -> Projector:
        return Projector(tuple(self.steps))


def perceptron(made: NamedSteps, inner: int, hidden: int, out: int, outer: JsonKeys, bias: bool = True) -> None:
    kind = activation(outer, "projector_hidden_act", "gelu")
    first, last = (f"multi_modal_projector.linear_{number}" for number in (1, 2))
    made.linear(first, hidden, inner, bias).then(kind).linear(last, out, hidden, bias)
