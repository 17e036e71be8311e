"""`tokenwright inspect`: a model's facts, from its config.json and the headers of its weight files."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenwright.checkpoints.files.local import local_folder
from tokenwright.cli.options import shared as opt
from tokenwright.cli.terminal.output import show_anything, write, write_json
from tokenwright.config import ModelConfig, NoScaling, Rope, RopeScaling
from tokenwright.formats import WeightFormat
from tokenwright.units import binary

if TYPE_CHECKING:
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.models.graph import Graph


def inspect(
    named: opt.ModelName = None,
    model: opt.Model = None,
    revision: opt.Revision = None,
    weights: opt.Weights = "native",
    lora: opt.Lora = None,
    json_: opt.Json = False,
) -> None:
    """Show the facts of the model: shape, size, KV bytes per token, chat template. Loads no weights.

    With --lora also show what the adapters update, and whether they can be merged or served beside the weights.
    """
    asked, model = WeightFormat.parse(weights), opt.the_model(named, model)
    local_folder(model, revision)
    from tokenwright.backends.layout import weight_bytes
    from tokenwright.backends.native.compile import compiles
    from tokenwright.cache.spec import layer_specs
    from tokenwright.checkpoints.folder import Checkpoint
    from tokenwright.checkpoints.packing.packer import own_form
    from tokenwright.checkpoints.packing.weight_cache import WeightCache

    opened = Checkpoint.open(model, revision, progress=sys.stderr.isatty())
    adapters = [_adapter_facts(opened, folder, asked) for folder in lora or []]
    checkpoint = opened if opened.packed else opened.merged(lora or [])
    config, graph, cache = checkpoint.config, checkpoint.graph, WeightCache.default()
    form, kept = own_form(checkpoint, asked).resolved(config.dtype), checkpoint.kept(asked)
    tokenizer, types = checkpoint.tokenizer(), [str(row) for row in checkpoint.held(asked, config.dtype)]
    facts = {
        **_shape(config, graph),
        "native_step": compiles(graph),
        "parameters": graph.parameters,
        "active_parameters": graph.active_parameters,
        "dtype": config.dtype,
        "weights": str(checkpoint.main_format(asked, config.dtype)),
        "weight_bytes": checkpoint.nbytes
        if form == WeightFormat(config.dtype) and not types
        else weight_bytes(graph, form, kept),
        "skipped": dict(checkpoint.skipped),
        "types": types,
        "adapters": adapters,
        "weight_cache": {"folder": str(cache.folder), "bytes": cache.nbytes},
        "kv_bytes_per_token": sum(spec.bytes_per_token for spec in layer_specs(graph, config.dtype)),
        "bos_id": tokenizer.bos_id if checkpoint.generation.bos_id is None else checkpoint.generation.bos_id,
        "eos_ids": sorted({*checkpoint.generation.eos_ids, *tokenizer.eos_ids}),
        "suggested_sampling": checkpoint.generation.sampling,
        "unsupported_sampling": list(checkpoint.generation.unsupported),
        "chat_template": tokenizer.chat_template,
    }
    if json_:
        write_json({"model": model, **facts}, indent=2)
    else:
        show_anything()
        write(_page(model, facts) + "\n")


def _shape(config: ModelConfig, graph: "Graph") -> dict[str, Any]:
    def named(*names: str) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    return {
        "architecture": graph.architecture,
        "layers": graph.layers,
        **named("heads", "kv_heads", "head_size"),
        "latent": config.latent and asdict(config.latent),
        "width": graph.width,
        "mlp_width": config.mlp_width,
        "gated_mlp": config.gated,
        "activation": config.activation,
        "experts": config.mixture and asdict(config.mixture),
        **named("norm", "pre_norm", "post_norm", "norm_bias", "norm_weights"),
        **named("parallel", "score_cap", "logit_cap", "qk_norm"),
        "scales": asdict(config.scales),
        "vocab_size": graph.vocab_size,
        "context": graph.context,
        "positions": _positions(graph),
        "windows": [layer.window for layer in graph.kv],
        "recurrent": list(graph.recurrent),
        "tied_head": graph.tied_head,
    }


def _positions(graph: "Graph") -> str:
    positions = graph.positions
    if not isinstance(positions, Rope):
        return "none" if positions is None else "learned"
    scaled = "" if isinstance(positions.scaling, NoScaling) else f", {_scaling(positions.scaling)}"
    bare = sum(op.rope is None for op in graph.attention) - len(graph.recurrent)
    without = f", none in {bare} of {graph.layers} layers" if bare else ""
    part = "" if positions.rotated is None else f", {positions.rotated} dimensions of each head"
    others = "".join(f"; base {rope.theta:,.0f} in layers with a window" for rope in graph.ropes[1:])
    return f"rotary, base {positions.theta:,.0f}{part}{scaled}{without}{others}"


def _scaling(scaling: RopeScaling) -> str:
    kind = type(scaling).__name__.removesuffix("Scaling")
    values = {field.name: getattr(scaling, field.name) for field in fields(scaling)}
    shown = {name: f"{len(one)} factors" if isinstance(one, tuple) else f"{one:g}" for name, one in values.items()}
    numbers = ", ".join(f"{name} {one}" for name, one in shown.items())
    return f"{kind} scaling ({numbers})"


def _windows(windows: Sequence[int | None], recurrent: Sequence[int]) -> str:
    counts = Counter(window for layer, window in enumerate(windows) if layer not in recurrent)
    if counts.keys() == {None} and not recurrent:
        return "full attention in every layer"
    words = {window: f"a window of {window:,} tokens" if window else "full" for window in counts}
    found = [f"{words[window]} in {count} of {len(windows)} layers" for window, count in counts.items()]
    return ", ".join(found + ([f"a state in {len(recurrent)} of {len(windows)} layers"] if recurrent else []))


def _page(model: str, facts: dict[str, Any]) -> str:
    heads = facts["heads"]
    tied = ", head tied to the embedding" if facts["tied_head"] else ""
    context, per_token, dtype = facts["context"], facts["kv_bytes_per_token"], facts["dtype"]
    mlp = f"{facts['mlp_width']:,} wide, {facts['activation']}{', gated' if facts['gated_mlp'] else ''}"
    rows = {
        "model": f"{model} ({facts['architecture']})",
        "layers": f"{facts['layers']}",
        "heads": f"{heads} of size {facts['head_size']}, over {_rows(facts)}",
        "width": f"{facts['width']:,}",
        **({"block": "attention and MLP side by side"} if facts["parallel"] else {}),
        **({} if facts["experts"] and all(facts["experts"]["layers"]) else {"MLP": mlp}),
        **({"experts": _experts(facts["experts"])} if facts["experts"] else {}),
        "norm": _norms(facts),
        **({"scales": scales} if (scales := _factors(facts["scales"])) else {}),
        **({"soft caps": caps} if (caps := _caps(facts)) else {}),
        "positions": facts["positions"],
        "attention": _windows(facts["windows"], facts["recurrent"]),
        "context": f"{context:,} tokens",
        "vocabulary": f"{facts['vocab_size']:,} ids{tied}",
        "BOS, EOS": f"{_ids([facts['bos_id']])}, {_ids(facts['eos_ids'])}",
        "parameters": f"{facts['parameters']:,}{_active(facts)}",
        "step": "one call of the native kernels, where compiled" if facts["native_step"] else "op by op",
        "weights": f"{binary(facts['weight_bytes'])} ({facts['weights']})",
        **({"in the file": "; ".join(facts["types"])} if facts["types"] else {}),
        **({"skipped": _skipped(facts["skipped"])} if facts["skipped"] else {}),
        **_adapters(facts["adapters"]),
        "weight cache": f"{binary(facts['weight_cache']['bytes'])} of all models, in {facts['weight_cache']['folder']}",
        "KV cache": f"{binary(per_token)} a token, {binary(per_token * context)} a context ({dtype})",
        "sampling": _sampling(facts["suggested_sampling"], facts["unsupported_sampling"]),
        "chat template": "none" if facts["chat_template"] is None else "",
    }
    lines = [f"{name:<14} {value}".rstrip() for name, value in rows.items()]
    if facts["chat_template"] is not None:
        lines += ["", facts["chat_template"]]
    return "\n".join(lines)


def _adapter_facts(checkpoint: "Checkpoint", folder: Path, form: WeightFormat) -> dict[str, Any]:
    from tokenwright.backends.adapters import beside_bytes, not_beside

    adapter, kept = checkpoint.adapter(folder), checkpoint.kept(form)
    unable = not_beside(checkpoint.graph, adapter.updates)
    merged = kept if checkpoint.packed else checkpoint.merged([folder]).kept(form)
    return {
        "folder": str(folder),
        "base": adapter.base,
        "ranks": list(adapter.ranks),
        "scales": list(adapter.scales),
        "targets": list(adapter.targets),
        "modules": len(adapter.modules),
        "merges": checkpoint.packed is None,
        "decoded": len(kept) - len(merged),
        "beside_bytes": None if unable else beside_bytes(checkpoint.graph, adapter.updates),
        "only_merged": unable,
    }


def _adapters(adapters: Sequence[dict[str, Any]]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for number, one in enumerate(adapters, 1):
        ranks, scales = (", ".join(f"{value:g}" for value in one[key]) for key in ("ranks", "scales"))
        of = f", trained on {one['base']}" if one["base"] else ""
        what = f"rank {ranks}, scale {scales}, {one['modules']} linear layers ({', '.join(one['targets'])}){of}"
        decoded = f"; {one['decoded']} matrices are then decoded, not copied" if one["decoded"] else ""
        merged = f"added to the weights as they are read{decoded}" if one["merges"] else "not into packed weights"
        beside = f"not possible: it updates {', '.join(one['only_merged'][:3])}"
        if one["beside_bytes"] is not None:
            beside = f"{binary(one['beside_bytes'])} in float32, chosen by each request (serve --adapter)"
        which = f" {number}" if len(adapters) > 1 else ""
        rows |= {f"adapter{which}": f"{one['folder']}: {what}", f"merged{which}": merged, f"beside{which}": beside}
    return rows


def _rows(facts: dict[str, Any]) -> str:
    if latent := facts["latent"]:
        return f"one latent of {latent['rank']} and {latent['rope']} numbers that turn"
    return f"{facts['kv_heads']} KV heads ({facts['heads'] // facts['kv_heads']} to one)"


def _norms(facts: dict[str, Any]) -> str:
    plain = {"rms": "RMSNorm", "layer": "LayerNorm"}[facts["norm"]]
    kind = plain if facts["norm"] == "rms" or facts["norm_bias"] else f"{plain} without bias"
    kind = kind if facts["norm_weights"] else f"{plain} without weights"
    places = [name for name, key in (("before", "pre_norm"), ("after", "post_norm")) if facts[key]]
    place = f"{' and '.join(places)} attention and MLP"
    over = {"head": "; of each head of q and k", "whole": "; of the whole q and k", "own": "; of each head of q and k"}
    return f"{kind} {place}{over.get(facts['qk_norm'], '')}"


def _experts(mixture: dict[str, Any]) -> str:
    layers = mixture["layers"]
    shared = f", and one of {mixture['shared_width']:,} that all tokens meet" if mixture["shared_width"] else ""
    where = "" if all(layers) else f"; in {sum(layers)} of {len(layers)} layers"
    return f"{mixture['experts']}, {mixture['width']:,} wide, {mixture['chosen']} for each token{shared}{where}"


def _active(facts: dict[str, Any]) -> str:
    active: int = facts["active_parameters"]
    return "" if active == facts["parameters"] else f", of which a token meets {active:,}"


def _caps(facts: dict[str, Any]) -> str:
    caps = {"attention scores": facts["score_cap"], "logits": facts["logit_cap"]}
    return ", ".join(f"{name} {cap:g}" for name, cap in caps.items() if cap is not None)


def _skipped(towers: dict[str, int]) -> str:
    parts = ", ".join(f"{tower} ({count} tensors)" for tower, count in towers.items())
    return f"{parts}: the text model runs alone"


def _factors(scales: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {one:g}" for name, one in scales.items() if one not in (None, 1.0))


def _sampling(suggested: dict[str, Any], unsupported: Sequence[str]) -> str:
    many = {"banned_ids": lambda ids: f"{len(ids)} of them"}
    each = (f"{name} {many.get(name, '{:g}'.format)(value)}" for name, value in suggested.items())
    words = ", ".join(each) or "no suggestions"
    return f"{words}; not available here: {', '.join(unsupported)}" if unsupported else words


def _ids(ids: Sequence[int | None]) -> str:
    return " or ".join(str(at) for at in ids if at is not None) or "none"
