"""Layers and projectors of towers, from the facts of their configs, with their names in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenwright.checkpoints.families.family import TensorSource, activation
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.config import Rope
from tokenwright.models.graph import MLP, Attention
from tokenwright.models.op import Activation, Matrix, Norm, Scoring
from tokenwright.models.tower import JoinRows, Pool, Projector, Step, TowerLayer

Kind = Literal["layer", "rms"]
MOST_SIDE = 1 << 14


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of a layer's parts in files. {i} is its number. qkv: of q, k and v, or of the fused matrix."""

    at: str
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.out_proj"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")  # gate, up, down if gated
    scales: tuple[str, str] | None = None  # of what attention and MLP add (InternVL)


_SIGLIP = (12, 768, 12, 3072)
SIGLIP = LayerNames("vision_tower.encoder.layers.{i}")
PIXTRAL = LayerNames(
    "vision_tower.transformer.layers.{i}",
    tuple(f"attention.{one}_proj" for one in "qkv"),
    "attention.o_proj",
    ("attention_norm", "ffn_norm"),
    ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
)
INTERN = LayerNames(
    "vision_tower.encoder.layer.{i}",
    tuple(f"attention.{one}_proj" for one in "qkv"),
    "attention.projection_layer",
    ("layernorm_before", "layernorm_after"),
    scales=("lambda_1", "lambda_2"),
)
QWEN = LayerNames("visual.blocks.{i}", ("attn.qkv",), "attn.proj", ("norm1", "norm2"))


@dataclass(frozen=True, slots=True)
class LayerFacts:
    layers: int
    width: int
    heads: int
    mlp_width: int
    activation: Activation
    eps: float = 1e-6
    norm: Kind = "layer"
    qkv_bias: bool = True
    bias: bool = True  # of the other matrices
    gated: bool = False
    rope: Rope | None = None
    full: frozenset[int] | None = None  # the layers without windows; None: all
    head_size: int | None = None
    scaled: bool = False

    @classmethod
    def read(
        cls, keys: JsonKeys, sizes: tuple[int, int, int, int] = _SIGLIP, kind: str = "gelu_pytorch_tanh", **more: object
    ) -> "LayerFacts":
        """The facts from common keys of vision configs. sizes (layers, width, heads, MLP), kind: of absent keys."""
        found = {
            "layers": keys.whole("num_hidden_layers", sizes[0], most=1 << 10),
            "width": keys.whole("hidden_size", sizes[1], most=1 << 16),
            "heads": keys.whole("num_attention_heads", sizes[2], most=1 << 10),
            "mlp_width": keys.whole("intermediate_size", sizes[3], most=1 << 18),
            "activation": activation(keys, "hidden_act", kind),
            "eps": keys.number("layer_norm_eps", 1e-6),
        }
        return cls(**(found | more))  # type: ignore[arg-type]

    def layer(self, number: int) -> TowerLayer:
        at, width, size = f"layers.{number}", self.width, self.head_size or self.width // self.heads
        norms = [Norm(f"{at}.{one}", self.norm, width, self.eps) for one in ("norm1", "norm2")]
        qkv = Matrix(f"{at}.qkv", tuple((f"{at}.{one}", self.heads * size) for one in "qkv"), width, self.qkv_bias)
        out = Matrix.single(f"{at}.out", width, self.heads * size, self.bias)
        names = ("gate", "up") if self.gated else ("up",)
        up = Matrix(f"{at}.hidden", tuple((f"{at}.{one}", self.mlp_width) for one in names), width, self.bias)
        down = Matrix.single(f"{at}.down", width, self.mlp_width, self.bias)
        heads = (self.heads, self.heads, size, Scoring(size**-0.5))
        attention = Attention(0, *heads, norms[0], qkv, out, rotary=self.rope)
        mlp = MLP(0, norms[1], up, down, self.activation, self.gated)
        scales = tuple(f"{at}.scale{place}" for place in (1, 2)) if self.scaled else ()
        return TowerLayer(attention, mlp, self.full is not None and number not in self.full, scales)

    def made(self, count: int | None = None) -> tuple[TowerLayer, ...]:
        return tuple(self.layer(number) for number in range(self.layers if count is None else count))

    def names(self, of: LayerNames) -> dict[str, TensorSource]:
        at, theirs = "layers.{i}", of.at
        found = {
            f"{at}.{ours}": TensorSource(f"{theirs}.{one}")
            for ours, one in zip(("norm1", "norm2"), of.norms, strict=True)
        }
        if of.scales is not None:
            found |= {f"{at}.scale{at_}": TensorSource(f"{theirs}.{one}!") for at_, one in enumerate(of.scales, 1)}
        found[f"{at}.out"] = TensorSource(f"{theirs}.{of.out}")
        parts = ("gate", "up", "down") if self.gated else ("up", "down")
        found |= {f"{at}.{ours}": TensorSource(f"{theirs}.{one}") for ours, one in zip(parts, of.mlp, strict=True)}
        if len(of.qkv) == 3:
            return found | {
                f"{at}.{one}": TensorSource(f"{theirs}.{name}") for one, name in zip("qkv", of.qkv, strict=True)
            }
        size = self.heads * (self.head_size or self.width // self.heads)
        for place, one in enumerate("qkv"):
            rows = (place * size, (place + 1) * size, 3 * size)
            found[f"{at}.{one}"] = TensorSource(f"{theirs}.{of.qkv[0]}", rows=rows)
        return found


@dataclass(frozen=True, slots=True)
class NamedSteps:
    """A projector with the names of its steps in files. at: the prefix of our names of its tensors."""

    at: str
    steps: list[Step] = field(default_factory=list)
    names: dict[str, TensorSource] = field(default_factory=dict)

    def linear(self, file: str, out: int, inner: int, bias: bool = True) -> "NamedSteps":
        name = f"{self.at}.{len(self.steps)}"
        self.names[name] = TensorSource(file)
        self.steps.append(Matrix.single(name, out, inner, bias))
        return self

    def norm(self, file: str, size: int, eps: float, kind: Kind = "layer", plus: float = 0) -> "NamedSteps":
        name = f"{self.at}.{len(self.steps)}"
        self.names[name] = TensorSource(file, plus=plus)
        self.steps.append(Norm(name, kind, size, eps))
        return self

    def then(self, *steps: "JoinRows | Pool | Activation") -> "NamedSteps":
        self.steps.extend(steps)
        return self

    def made(self) -> Projector:
        return Projector(tuple(self.steps))


def perceptron(
    made: NamedSteps, inner: int, hidden: int, out: int, kind: Activation = "gelu", bias: bool = True
) -> NamedSteps:
    first, last = (f"multi_modal_projector.linear_{number}" for number in (1, 2))
    return made.linear(first, hidden, inner, bias).then(kind).linear(last, out, hidden, bias)


def of_patches(conv: str, positions: str | None = None, first: str | None = None) -> Mapping[str, TensorSource]:
    found = {"patches": TensorSource(conv)}
    for ours, theirs in (("positions", positions), ("class", first)):
        if theirs is not None:
            found[ours] = TensorSource(theirs)
    return found
