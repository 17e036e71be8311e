"""Finds missing tensors under other programs' names and shapes, if the sizes agree.

transformers 5 unstacks or stacks experts; mlx-lm writes `switch_mlp`, transposes convolutions, adds 1 to norms, cuts
latent attention into heads; some writers join q, k and v, or gate and up.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count, takewhile
from math import prod
from typing import NamedTuple

from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.safetensors import Stored, slices
from tokenwright.checkpoints.quantised.codecs import concatenated
from tokenwright.models.graph import Graph

HEAD = "lm_head.weight"  # in every family
_PARTS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3", "fc1"), "down": ("down_proj", "w2", "fc2")}
# A published name, and transformers 5's or mlx-lm's.
_RENAMED = tuple(
    (re.compile(published), written)
    for published, written in (
        (r"(layers\.\d+)\.block_sparse_moe\.(gate\.weight|shared_experts\..+)", r"\1.mlp.\2"),
        (r"(layers\.\d+\.mlp)\.router\.gate\.weight", r"\1.gate.weight"),
        (r"(layers\.\d+)\.block_sparse_moe\.((?:gate\.)?e_score_correction_bias)\.weight", r"\1.mlp.\2"),
        (r"(layers\.\d+)\.block_sparse_moe\.gate\.(e_score_correction_bias)\.weight", r"\1.mlp.\2"),
        (r"(layers\.\d+\.mlp)\.expert_bias\.weight", r"\1.e_score_correction_bias"),
        (r"(layers\.\d+\.mlp)\.(moe_statics\.e_score_correction_bias)\.weight", r"\1.gate.\2"),
        (r"(layers\.\d+\.mlp)\.shared_mlp\.(.+)", r"\1.shared_experts.\2"),
        (r"(layers\.\d+\.self_attn)\.gate_proj\.weight", r"\1.g_proj.weight"),
        (r"(layers\.\d+\.linear_attn)\.out_norm\.weight", r"\1.norm.weight"),
        (r"(layers\.\d+\.self_attn\.[qkv]_conv)1d\.weight", r"\1.conv.weight"),
        *((rf"(layers\.\d+\.feed_forward)\.{w}\.weight", rf"\1.{name}.weight") for name, w, *_ in _PARTS.values()),
    )
)
_BOTH = "gate_up_proj"
_OURS = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)\.(weight|bias)")
_JOINED = {  # parts of a layer, and names of their joined tensor
    ("q", "k", "v"): ("qkv_proj", "W_pack", "query_key_value", "Wqkv", "wqkv", "c_attn", "qkv"),
    ("gate", "up"): ("gate_up_proj", "gate_up", "gate_and_up_proj"),
    ("conv_q", "conv_k", "conv_v"): ("conv1d",),
}
_AT = r"layers\.(?P<layer>\d+)\.(?:[\w.]+\.)?"
_EXPERTS = r"(?:experts|switch_mlp|switch_glu)"
_STACK = re.compile(rf"({_AT}{_EXPERTS}\.\w+?)(?:\.(weight|bias))?")
_SLICE = re.compile(rf"{_AT}{_EXPERTS}\.(?P<part>\w+)\.(?P<expert>\d+)\.(?P<kind>weight|bias)")
_EACH = re.compile(rf"{_AT}experts\.(?P<expert>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_HEADS = "kv_b_proj.weight", ("embed_q", "unembed_out")  # of latent attention; mlx-lm's for each head, the first turned


class Respelled(NamedTuple):
    sources: dict[str, TensorSource]
    stored: dict[str, Stored]
    writers: tuple[str, ...]  # the programs with these names and shapes


def respelled(graph: Graph, sources: Mapping[str, TensorSource], stored: Mapping[str, Stored]) -> Respelled:
    kept, found, writers = dict(sources), dict(stored), set[str]()
    for name, shape in {one.name: one.stored(graph.shapes[ours]) for ours, one in sources.items()}.items():
        if name in found and found[name].shape == (*shape, 1):  # a convolution [channels, taps, 1]
            found[name] = replace(found[name], shape=shape)
            writers.add("mlx-lm")
        elif name not in found and (other := _second_name(name, found)) and prod(found[other].shape) == prod(shape):
            found[name] = replace(found.pop(other), shape=shape)
            writers.add("transformers 5")
    if writers & {"mlx-lm"}:
        kept = {ours: replace(one, plus=0.0) for ours, one in kept.items()}
    _rejoin(graph, sources, found)
    for name in {one.name for one in sources.values() if one.name.endswith(_HEADS[0]) and one.name not in found}:
        _join_heads(name, found)
    missing = [ours for ours, one in sources.items() if one.name not in found]
    if "embed.weight" in missing and graph.tied_head and HEAD in found:
        kept["embed.weight"] = TensorSource(HEAD)
    for ours in missing:
        kept |= _joined(ours, sources[ours], graph, found)
    experts = {ours: match for ours in missing if (match := _OURS.fullmatch(ours))}
    if experts:
        layers = {match[1] for match in experts.values()}
        there = _experts_in(found, layers)
        for ours, match in experts.items():
            if source := _expert(match, graph.shapes[ours], there, found):
                kept[ours] = source
                writers.add("mlx-lm" if ".switch_mlp." in source.name else "transformers 5")
    return Respelled(kept, found, tuple(sorted(writers)))


def _rejoin(graph: Graph, sources: Mapping[str, TensorSource], stored: dict[str, Stored]) -> None:
    """Join the taps of q, k and v, which transformers 5 cuts into three equal parts even if their sizes differ."""
    for ours in (one for one in sources if one.endswith(".conv_q.weight")):
        names = {sources[one].name: graph.shapes[one] for one in (ours.replace("_q", f"_{part}") for part in "qkv")}
        if names.keys() <= stored.keys() and any(stored[name].shape != shape for name, shape in names.items()):
            name = sources[ours].name.replace(".q_", ".")
            stored[name] = concatenated({one: stored.pop(one) for one in names})


def _join_heads(name: str, stored: dict[str, Stored]) -> None:
    each = [f"{name.removesuffix(_HEADS[0])}{one}" for one in _HEADS[1]]
    for one in (one for one in each if f"{one}.weight" in stored):
        stored |= {f"{one}.{at}.weight": part for at, part in enumerate(slices(stored.pop(f"{one}.weight")))}
    heads = takewhile(lambda some: stored.keys() >= {*some}, ([f"{one}.{at}.weight" for one in each] for at in count()))
    if parts := {one: stored.pop(one) for some in [*heads] for one in some}:
        stored[name] = concatenated(parts, frozenset(one for one in parts if one.startswith(each[0])))


def _joined(ours: str, source: TensorSource, graph: Graph, stored: Mapping[str, Stored]) -> dict[str, TensorSource]:
    base, part, kind = (*ours.rsplit(".", 2), "")[:3]
    apart = f"{source.name.removesuffix(f'.{kind}')}_{part}.{kind}"
    if source.fused and apart in stored and stored[apart].shape == graph.shapes[ours]:
        return {ours: TensorSource(apart)}
    for parts, names in _JOINED.items():
        shapes = [graph.shapes.get(f"{base}.{one}.{kind}", (0,)) for one in parts]
        at, shape = source.name.rsplit(".", 2)[0], (sum(one[0] for one in shapes), *shapes[0][1:])
        for name in (f"{at}.{one}.{kind}" for one in names if part in parts):
            if name in stored and stored[name].shape == shape:
                first = sum(one[0] for one in shapes[: parts.index(part)])
                rows = (first, first + graph.shapes[ours][0], shape[0])
                return {ours: replace(source, name=name, fused=True, rows=rows)}
    return {}


def _second_name(name: str, stored: Mapping[str, Stored]) -> str | None:
    others = (pattern.sub(written, name) for pattern, written in _RENAMED if pattern.fullmatch(name))
    return next((one for one in others if one in stored), None)


def _experts_in(stored: dict[str, Stored], layers: Collection[str]) -> dict[tuple[str, str, str], str]:
    """The experts' matrices by layer, number and name. Stacks are cut into slices."""
    for name in [*stored]:
        match = _STACK.fullmatch(name)
        kind = (match and match[3]) or "weight"
        if match and match["layer"] in layers and len(stored[name].shape) == (3 if kind == "weight" else 2):
            stored |= {f"{match[1]}.{at}.{kind}": one for at, one in enumerate(slices(stored.pop(name)))}
    found = ((name, match) for name in stored if (match := _SLICE.fullmatch(name) or _EACH.fullmatch(name)))
    return {(match["layer"], match["expert"], f"{match['part']}.{match['kind']}"): name for name, match in found}


def _expert(
    ours: re.Match[str], shape: tuple[int, ...], there: Mapping[tuple[str, str, str], str], stored: Mapping[str, Stored]
) -> TensorSource | None:
    layer, expert, part, kind = ours.groups()
    if kind == "bias":
        found = (there.get((layer, expert, f"{theirs}.bias"), "") for theirs in _PARTS[part])
        return next((TensorSource(name) for name in found if name and stored[name].shape == shape), None)
    out, inner = shape[::-1] if part == "down" else shape
    shapes = dict.fromkeys((*_PARTS["gate"], *_PARTS["up"]), (out, inner)) | dict.fromkeys(_PARTS["down"], (inner, out))
    shapes[_BOTH] = 2 * out, inner
    names = {one: name for one in shapes if (name := there.get((layer, expert, f"{one}.weight")))}
    # A square matrix is turned as others of its expert are.
    turned = any(stored[name].shape == shapes[one][::-1] != shapes[one] for one, name in names.items())
    for theirs in (*_PARTS[part], *([] if part == "down" else [_BOTH])):
        name, own = names.get(theirs), shapes[theirs]
        if name and stored[name].shape in (own, own[::-1]):
            source = TensorSource(name, transpose=turned if own == own[::-1] else stored[name].shape != own)
            if theirs == _BOTH:
                rows = (0, out, 2 * out) if part == "gate" else (out, 2 * out, 2 * out)
                source = replace(source, fused=True, rows=rows)
            return source
    return None
