"""The naive run itself against the definition: attention written out in fp64, row by row, from positions alone.

What the matrix compares with must be right in itself. Native kinds without sinks, and all with a latent, are held to
transformers (tests/oracle); this covers the rest: sinks with their second query, codecs, formats of mixed parts.
Activations of the engine are fp32 and codes are discrete, so a code may turn over where fp64 and fp32 differ: with
quantised formats rows are compared by their median difference, with native ones by the largest.
"""

from collections.abc import Callable, Mapping
from itertools import product

import pytest
import torch
from torch.nn.functional import gelu, silu

from tests.equality.harness import FORMATS, MIXED, PROMPT, Case
from tests.equality.kinds import KINDS
from tests.profiles import some
from tests.tensors import decode, encode
from tokenwright.cache.codec import CODECS
from tokenwright.config import Learned, LinearScaling, ModelConfig, Rope
from tokenwright.formats import KVFormat

NATIVE_TOLERANCE = 2e-5
CODED_TOLERANCE = 1e-3


def normed(x: torch.Tensor, w: Mapping[str, torch.Tensor], name: str, config: ModelConfig) -> torch.Tensor:
    """RMSNorm or LayerNorm; x itself if the model has no norm of that name."""
    if f"{name}.weight" not in w:
        return x
    bias = w.get(f"{name}.bias")
    x = x if config.norm == "rms" else x - x.mean(-1, keepdim=True)
    scaled = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * w[f"{name}.weight"].double()
    return scaled if bias is None else scaled + bias.double()


def over_heads(x: torch.Tensor, w: Mapping[str, torch.Tensor], name: str, config: ModelConfig) -> torch.Tensor:
    """The norm of q or k [t, H D]: over as many numbers as it has weights."""
    size = w[f"{name}.weight"].numel() if f"{name}.weight" in w else x.shape[-1]
    return normed(x.unflatten(-1, (-1, size)), w, name, config).flatten(-2)


def turned(x: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:
    """Each head [heads, D] of one token turned to a position, where positions are rotary."""
    half, rotated = x.shape[-1] // 2, rope.rotated or x.shape[-1]
    place = position / (rope.scaling.factor if isinstance(rope.scaling, LinearScaling) else 1)
    turns = [rope.theta ** (-2 * i / rotated) if i < rotated // 2 else 0.0 for i in range(half)]
    angles = place * torch.tensor(turns, dtype=torch.float64)
    first, second = x[:, :half], x[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def kept(x: torch.Tensor, name: str, layer: int, config: ModelConfig, form: KVFormat) -> torch.Tensor:
    """K or V [t, G, D] of a text as it is read back, `name` being what its side is kept as."""
    codec, plain = CODECS["float32" if name == "native" else name], CODECS["float32"]
    first = len(x) if layer in {one % config.layers for one in form.native} else form.first
    parts = ((plain, x[:first]), (codec, x[first:]))
    return torch.cat([decode(one, encode(one, rows.float()), x.shape[-1], torch.float64) for one, rows in parts])


def defined(case: Case, tokens: list[int]) -> torch.Tensor:
    """Logits [t, V] of every position."""
    subject, kind = case.subject, KINDS[case.kind]
    config, w = subject.config, subject.weights
    form = KVFormat.parse(case.kv)

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ w[f"{name}.weight"].double().T
        return out + w[f"{name}.bias"].double() if f"{name}.bias" in w else out

    scales = config.scales
    x = normed(scales.embedding * w["embed.weight"].double()[tokens], w, "embed_norm", config)  # [t, width]
    for layer in range(config.layers):
        at = f"layers.{layer}"
        rope = config.positions if config.local is None or config.windows[layer] is None else config.local
        assert not isinstance(rope, Learned)
        before = x
        y = normed(x, w, f"{at}.attention_norm", config)
        sides = (
            over_heads(product(y, f"{at}.attention.{side}"), w, f"{at}.attention.{side}_norm", config) for side in "qkv"
        )
        most = config.qkv_clip or torch.inf
        q, k, v = (side.view(len(tokens), -1, config.head_size).clamp(-most, most) for side in sides)
        window = min((one for one in (config.windows[layer], kind.window) if one is not None), default=None)
        near = torch.stack([turned(q[p], p, rope) for p in range(len(tokens))])  # [t, H, D]
        bias = torch.zeros(
            len(tokens), config.kv_heads, config.head_size, dtype=torch.float64
        )  # which K is kept without
        if f"{at}.attention.k.bias" in w and f"{at}.attention.k_norm.weight" not in w and not kind.sinks:
            own = w[f"{at}.attention.k.bias"].double().view(config.kv_heads, config.head_size)
            bias = torch.stack([turned(own, p, rope) for p in range(len(tokens))])
        keys = torch.stack([turned(k[p], p, rope) for p in range(len(tokens))]) - bias
        keys = kept(keys, form.k, layer, config, form) + bias
        values = kept(v, form.v, layer, config, form)  # [t, G, D]
        mixed = torch.empty(len(tokens), config.heads, config.head_size, dtype=torch.float64)
        for i in range(len(tokens)):
            read = [p for p in range(i + 1) if window is None or p > i - window or p < kind.sinks]
            far = near[i] if window is None else turned(q[i], min(i, kind.sinks + window - 1), rope)
            for head in range(config.heads):
                group = head // (config.heads // config.kv_heads)
                queries = torch.stack([(far if p < kind.sinks else near[i])[head] for p in read])  # [read, D]
                scores = (queries * keys[read, group]).sum(-1)
                learned = w.get(f"{at}.attention.sinks.weight", torch.empty(config.heads, 0))[head].double().view(-1)
                scored = capped(scores * config.score_scale, config.score_cap)
                share = torch.cat((scored, learned)).softmax(0)[: len(read)]
                mixed[i, head] = share @ values[read, group]
        added = product(mixed.flatten(1), f"{at}.attention.o")
        x = x + scales.residual * normed(added, w, f"{at}.attention_post_norm", config)
        read_by_mlp = normed(before if config.parallel else x, w, f"{at}.mlp_norm", config)
        if config.mixture and config.mixture.layers[layer]:
            added = experts(read_by_mlp, f"{at}.mlp", config, product)
        else:
            added = mlp(read_by_mlp, f"{at}.mlp", config, product)
        x = x + scales.residual * normed(added, w, f"{at}.mlp_post_norm", config)
    x = normed(x, w, "norm", config)
    logits = scales.logits * x @ w["embed.weight" if config.tied_head else "head.weight"].double().T
    return capped(logits, config.logit_cap)


Product = Callable[[torch.Tensor, str], torch.Tensor]


def mlp(x: torch.Tensor, at: str, config: ModelConfig, product: Product) -> torch.Tensor:
    up = product(x, f"{at}.up")
    if not config.gated:
        return product(ACTIVATIONS[config.activation](up), f"{at}.down")
    gate = product(x, f"{at}.gate")
    if config.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return product((up + 1) * gate * (1.702 * gate).sigmoid(), f"{at}.down")
    return product(up * ACTIVATIONS[config.activation](gate), f"{at}.down")


def experts(x: torch.Tensor, at: str, config: ModelConfig, product: Product) -> torch.Tensor:
    """Row by row: the experts of the highest scores, and the one that all rows meet."""
    mixture, rows = config.mixture, []
    assert mixture is not None
    for row in x:
        scores = product(row, f"{at}.router").softmax(-1)
        chosen = scores.topk(mixture.chosen)
        total = chosen.values.sum() if mixture.renormalise else 1
        each = zip(chosen.values.tolist(), chosen.indices.tolist(), strict=True)
        added = sum(weight / total * mlp(row, f"{at}.experts.{i}", config, product) for weight, i in each)
        if mixture.shared_width:
            added = added + product(row, f"{at}.shared_gate").sigmoid() * mlp(row, f"{at}.shared", config, product)
        rows.append(added)
    return torch.stack(rows)


# Kinds with recurrent layers, whose definition is tests/backends/test_recurrent.py's.
STATES = ("short", "delta", "state", "selective", "layers of one op")
# Layers of several sizes, or streams: without a codec those are the oracle's to compare.
UNLIKE = ("shared keys", "values from", "residual streams")
ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * (x / cap).tanh()


DEFINED = [name for name in KINDS if not name.startswith(("latent", *STATES, *UNLIKE))]


# In CI each kind with one format or two, and each format with several kinds.
@pytest.mark.parametrize(("kind", "kv"), some(list(product(DEFINED, [*FORMATS, MIXED]))))
def test_the_naive_run_is_the_definition(kind: str, kv: str) -> None:
    case = Case(kind, kv, "greedy")
    naive = case.naive()
    logits = defined(case, list(naive.tokens[:-1]))
    worst = torch.stack([(row - logits[place]).abs().max() for place, row in sorted(naive.rows.items())])
    assert len(worst) == len(naive.tokens) - PROMPT
    if kv == "native":
        assert float(worst.max()) <= NATIVE_TOLERANCE
    else:
        assert float(worst.median()) <= CODED_TOLERANCE


def test_the_definition_would_see_sinks_at_their_true_distance() -> None:
    """The comparison can fail: without the second query the rows are far off."""
    case = Case("window + sinks", "native", "greedy")
    other = Case("hybrid", "native", "greedy")
    naive = case.naive()
    wrong = defined(other, list(naive.tokens[:-1]))
    assert min(float((row - wrong[place]).abs().max()) for place, row in naive.rows.items()) > 0.1
