"""Reads LoRA adapters of PEFT. A setting that changes the arithmetic is implemented or refused.

The name of the base model is not compared, since folders are renamed.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tokenwright.arrays import Floats, finite, widened
from tokenwright.backends.adapters import Update
from tokenwright.checkpoints.families.family import TensorSource
from tokenwright.checkpoints.files.json_keys import JsonKeys, read_json, shown
from tokenwright.checkpoints.files.safetensors import Stored, read_header
from tokenwright.checkpoints.fit import few
from tokenwright.checkpoints.tensor_reader import DTYPES, piece_of, read_rows
from tokenwright.errors import CheckpointError
from tokenwright.models.graph import Graph

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 1 << 14

# The only supported values of settings (besides null), and the feature that other values need.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "peft_type": (("LORA",), "another kind of adapter than LoRA"),
    "task_type": (("CAUSAL_LM",), "another head than a language model's"), "bias": (("none",), "trained biases"),
    "lora_bias": ((False,), "biases of the adapter"), "use_dora": ((False,), "DoRA"),
    "modules_to_save": (([],), "whole modules in place of the model's"), "use_qalora": ((False,), "QA-LoRA"),
    "use_bdlora": ((False,), "block-diagonal LoRA"), "layer_replication": (([],), "repeated layers"),
    "trainable_token_indices": (([],), "trained rows of the embedding"), "kasa_config": ((), "KaSA"),
    "alora_invocation_tokens": (([],), "an adapter that some tokens switch on"), "velora_config": ((), "VeLoRA"),
    "megatron_config": (({},), "layers of Megatron"), "arrow_config": ((), "a router of adapters"),
    "monteclora_config": ((), "MonteCLoRA"),
    "ensure_weight_tying": ((False,), "an adapter that a tied head shares"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal"), "base weights that the start of its training changed",
    ),
}  # fmt: skip
# Names, paths, and settings of training; fan_in_fan_out follows from the model, as in PEFT.
_INERT = (
    "auto_mapping", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config",
)  # fmt: skip
_ADVICE = "Tokenwright cannot tell whether that changes the arithmetic; the adapter needs a newer Tokenwright"
_MERGE = "; merge it into the model's files, if PEFT can (merge_and_unload), and give those"
_PATTERN = re.compile(r"\^?(?:[\w.-]|\\[.d])+")  # nothing that could take long to match
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Parameters [experts, ...] of all experts of a layer; PEFT wraps their module once for each.
_PARAMETERS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_EXPERTS = re.compile(r"(?:.*\.)?(layers\.\d+)\.(?:\w+\.)?experts(?:\.base_layer)*")
_EXPERT_PART = re.compile(r"(layers\.\d+)\.(?:\w+\.)*experts\.\d+\.(\w+)")


@dataclass(frozen=True, eq=False)
class Adapter:
    path: Path
    updates: Mapping[str, Update] = field(repr=False)
    digest: str
    modules: tuple[str, ...] = field(repr=False, default=())
    base: str | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({len(one.down) for one in self.updates.values()}))

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(sorted({one.scale for one in self.updates.values()}))

    @property
    def targets(self) -> tuple[str, ...]:
        """The last parts of the updated layers' names."""
        return tuple(sorted({module.rpartition(".")[2] for module in self.modules}))


@dataclass(frozen=True)
class _Settings:
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool  # use_rslora: alpha / sqrt(rank) instead of alpha / rank
    targets: tuple[str, ...] | None  # None: a regular expression, or all linear layers
    parameters: tuple[str, ...]  # that hold all experts of a layer
    every: bool  # whether the targets are updated in all layers
    base: str | None  # the model that the adapter was trained on

    def scale(self, module: str) -> tuple[int, float]:
        rank = _matched(self.ranks, module, self.rank)
        return rank, _matched(self.alphas, module, self.alpha) / (rank**0.5 if self.root else rank)

    def meant(self, module: str) -> bool:
        if _EXPERTS.fullmatch(module):
            return bool(self.parameters)
        return self.targets is None or any(module == one or module.endswith(f".{one}") for one in self.targets)


def read_adapter(
    folder: Path,
    graph: Graph,
    sources: Mapping[str, TensorSource],
    bare: Callable[[str], str],
    copied: Callable[[str, Stored], bool],
) -> Adapter:
    """Read and check a folder for a model. Raises CheckpointError.

    `bare` gives a tensor's name without a file's prefixes; `copied` says whether the model has an equal tensor.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give the adapter's, with {CONFIG} and {WEIGHTS}")
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(f"{folder} has its weights in a pickle, which can run code; save them as {WEIGHTS}")
    if not (folder / WEIGHTS).exists() and (folder / "adapters.safetensors").exists():
        raise CheckpointError(f"{folder} has an adapter of mlx-lm (adapters.safetensors); Tokenwright reads PEFT's")
    settings = _read_settings(JsonKeys(read_json(folder / CONFIG), str(folder / CONFIG)))
    pairs = _pairs(folder / WEIGHTS, settings, lambda name, one: copied(bare(name), one))
    experts = {module: pairs.pop(module) for module in sorted(pairs) if _EXPERTS.fullmatch(module)}
    layers = _layers(graph, sources)
    homes = {module: bare(f"{module}.weight").removesuffix(".weight") for module in pairs}
    unknown = [module for module in pairs if homes[module] not in layers]
    if unknown:
        raise CheckpointError(
            f"{folder / WEIGHTS} updates {few(map(shown, unknown))}, no linear layer of this {graph.architecture} "
            "(the head is none where it is tied to the embedding); give an adapter of this model"
        )
    turned = {part for part, one in sources.items() if one.order is not None and one.order.turned}
    if absorbed := [one for one in pairs if not turned.isdisjoint(f"{part}.weight" for part in layers[homes[one]])]:
        raise CheckpointError(
            f"{folder / WEIGHTS} updates {few(map(shown, absorbed))}, which latent attention holds transposed by "
            "heads; merge the adapter into the model's files with PEFT, and give those"
        )
    _check_complete(folder, settings, set(homes.values()), layers)
    updates: dict[str, Update] = {}
    for module, (a, b) in sorted(pairs.items()):
        rank, scale = settings.scale(module)
        parts = layers[homes[module]]
        places = {part: replace(sources[f"{part}.weight"], transpose=False) for part in parts}  # B is [out, rank]
        _check_shapes(module, (a, b), rank, places[parts[0]].stored(graph.shapes[f"{parts[0]}.weight"]))
        down, up = _values(a, module), _values(b, module)
        for part in parts:
            updates[part] = Update(down, np.ascontiguousarray(piece_of(up, places[part])), scale)
    for module, (a, b) in experts.items():
        updates |= _expert_updates(module, a, b, settings, graph, sources)
    digest = sha256()
    for part, update in updates.items():
        digest.update(f"{part} {update.scale!r} {update.down.shape} {update.up.shape} ".encode())
        digest.update(update.down.tobytes() + update.up.tobytes())
    return Adapter(folder, updates, digest.hexdigest(), tuple(sorted([*pairs, *experts])), settings.base)


def _expert_updates(
    module: str, a: Stored, b: Stored, settings: _Settings, graph: Graph, sources: Mapping[str, TensorSource]
) -> dict[str, Update]:
    """A layer's experts from A [experts rank, in] and B [out, rank experts]; only the shapes tell the parameter."""
    match, parts = _EXPERTS.fullmatch(module), dict[str, list[str]]()
    for part in (part for matrix in graph.matrices.values() for part, _ in matrix.parts):
        if match and (own := _EXPERT_PART.fullmatch(part)) and own[1] == match[1]:
            parts.setdefault(own[2], []).append(part)
    count = len(parts.get("gate", ()))
    for parameter in settings.parameters:
        name = parameter.rpartition(".")[2]
        kinds = _PARAMETERS[name]
        rank, scale = settings.scale(f"{module.replace('.base_layer', '')}.{name}")
        shapes = [graph.shapes[f"{parts[kind][0]}.weight"] for kind in kinds if kind in parts]
        wanted = (count * rank, shapes[0][1] if shapes else 0), (sum(out for out, _ in shapes), rank * count)
        if (a.shape, b.shape) != wanted:
            continue
        down = _values(a, module).reshape(count, rank, -1)
        up = _values(b, module).reshape(-1, rank, count)
        order = sources[f"{parts[kinds[0]][0]}.weight"].order
        rows = up.reshape(*((len(kinds), -1) if order is None else (-1, 2)), rank, count)
        rows = rows if order is None else rows.swapaxes(0, 1)
        return {
            part: Update(down[e], np.ascontiguousarray(rows[at, :, :, e]), scale)
            for at, kind in enumerate(kinds)
            for e, part in enumerate(parts[kind])
        }
    raise CheckpointError(
        f"{shown(module)} in {a.file} has {list(a.shape)} and {list(b.shape)}, which are the shapes of none of the "
        f"target_parameters of {CONFIG} in this model ({few(settings.parameters)}); give an adapter of this model"
    )


def _read_settings(keys: JsonKeys) -> _Settings:
    for key, (allowed, why) in _REFUSED.items():
        keys.only(key, *allowed, why=why, advice=_MERGE)
    keys.text("peft_type")
    keys.flag("fan_in_fan_out", False)
    targets, layers = keys.raw("target_modules"), keys.raw("layers_to_transform")
    if not (isinstance(targets, str | None) or _texts(targets)):
        raise keys.error(f"target_modules must be names, not {shown(targets)}")
    if not (_is_layer(layers) or layers is None or (isinstance(layers, list) and all(map(_is_layer, layers)))):
        raise keys.error(f"layers_to_transform must be numbers of layers, not {shown(layers)}")
    parameters = keys.raw("target_parameters") or []
    if not _texts(parameters) or any(one.rpartition(".")[2] not in _PARAMETERS for one in parameters):
        raise keys.error(f"target_parameters must be {few(_PARAMETERS)} of experts, not {shown(parameters)}")
    but, base = keys.raw("exclude_modules"), keys.raw("base_model_name_or_path")
    rank = keys.whole("r", most=MOST_RANK)
    found = _Settings(
        rank=rank,
        alpha=keys.number("lora_alpha", least=0.0),
        ranks=_patterns(keys, "rank", lambda one, key: one.whole(key, most=MOST_RANK)),
        alphas=_patterns(keys, "alpha", lambda one, key: one.number(key, least=0.0)),
        root=keys.flag("use_rslora", False),
        targets=tuple(targets) if isinstance(targets, list) else None,
        parameters=tuple(parameters),
        every=layers in (None, []) and but in (None, []),
        base=base if isinstance(base, str) else None,
    )
    keys.finish(_INERT, _ADVICE)
    return found


def _patterns(keys: JsonKeys, what: str, read: Callable[[JsonKeys, str], Any]) -> dict[str, Any]:
    key = f"{what}_pattern"
    given = keys.raw(key) or {}
    if not isinstance(given, dict):
        raise keys.error(f"{key} must be an object, not {shown(given)}")
    for one in given:
        if not _PATTERN.fullmatch(one):
            raise keys.error(f"{key} has {shown(one)}; Tokenwright reads names of modules, not expressions")
    return {one: read(JsonKeys({one: value}, keys.where), one) for one, value in given.items()}


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_layer(value: object) -> bool:
    return type(value) is int and value >= 0


def _matched(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((one for key, one in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _pairs(file: Path, settings: _Settings, copied: Callable[[str, Stored], bool]) -> dict[str, tuple[Stored, Stored]]:
    """A and B by module. Raises CheckpointError for any other tensor but copies of the model's."""
    found: dict[str, dict[str, Stored]] = {}
    for name, one in read_header(file).items():
        match = _TENSOR.fullmatch(name)
        if match is None and len(one.shape) == 2 and name.endswith(".weight") and "lora_" not in name:
            if copied(name, one):  # PEFT saves tables of tokens where it adapts one
                continue
            raise CheckpointError(
                f"{file} has {shown(name)}, a whole layer in place of the model's, as PEFT saves it where the "
                "vocabulary was resized or the layer was trained; merge the adapter with PEFT and open the merged model"
            )
        if match is None or len(one.shape) != 2 or one.dtype not in DTYPES:
            raise CheckpointError(
                f"{shown(name)} in {file} is {one.dtype} {list(one.shape)}; Tokenwright reads the lora_A.weight and "
                "lora_B.weight of linear layers, in F32, F16 or BF16"
            )
        if not settings.meant(match["module"]):
            raise CheckpointError(f"{shown(name)} in {file} is not among the target_modules of {CONFIG}")
        found.setdefault(match["module"], {})[match["side"]] = one
    if alone := [module for module, sides in found.items() if len(sides) == 1]:
        raise CheckpointError(f"{file} has one of lora_A and lora_B alone for {few(map(shown, alone))}")
    if not found:
        raise CheckpointError(f"{file} has no tensors")
    return {module: (sides["A"], sides["B"]) for module, sides in found.items()}


def _layers(graph: Graph, sources: Mapping[str, TensorSource]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for matrix in graph.matrices.values():
        for part, _ in matrix.parts if matrix != graph.embed.table else ():
            name = sources[f"{part}.weight"].name
            found.setdefault(name.removesuffix(".weight"), []).append(part)
    return found


def _check_complete(folder: Path, settings: _Settings, there: Collection[str], layers: Mapping[str, list[str]]) -> None:
    if settings.targets is None or not settings.every:
        return
    own = [one for one, parts in layers.items() if settings.meant(one) and ".experts." not in parts[0]]
    missing = [one for one in own if one not in there]
    if missing:
        raise CheckpointError(f"{folder / WEIGHTS} lacks {few(missing)}, which target_modules of {CONFIG} names")


def _check_shapes(module: str, pair: tuple[Stored, Stored], rank: int, weight: tuple[int, ...]) -> None:
    out, inner = weight
    for side, one, shape in (("A", pair[0], (rank, inner)), ("B", pair[1], (out, rank))):
        if one.shape != shape:
            raise CheckpointError(
                f"lora_{side} of {shown(module)} in {one.file} is {list(one.shape)}, but {list(shape)} by {CONFIG} and "
                "the model; give an adapter of this model"
            )


def _values(one: Stored, module: str) -> Floats:
    values = widened(read_rows(one, 0, one.shape[0]))
    if not finite(values):
        raise CheckpointError(f"{shown(module)} in {one.file} has values that are not finite; the file is damaged")
    return values
