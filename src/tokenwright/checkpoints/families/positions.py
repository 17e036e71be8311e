"""Parse the positions of a llama-like checkpoint: rotary scaling, NoPE layers and attention windows.

Llama 3 and LongRoPE keep max_position_embeddings as the context; YaRN multiplies its original context; linear and
dynamic scaling multiply max_position_embeddings, the trained length.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tokenwright import config
from tokenwright.checkpoints.files.json_keys import JsonKeys
from tokenwright.checks import MAX_TOKENS

ORIGINAL = "original_max_position_embeddings"

# LongRoPE's first name; and mrope, for which time, height and width of a text are one position.
_SAME_TYPE: Mapping[str, str] = {"su": "longrope", "mrope": "default"}

# Layers with a window. given: all, if sliding_window is set. flagged: all, and even: even ones below max_window_layers,
# if use_sliding_window. alternate: even ones. pattern: all but every fourth, or sliding_window_pattern, if
# sliding_window is set. By layer_types, and without it typed: all, listed: none, fourth, cwm: all but 0, 4, 8...
Slides = Literal[
    "none", "all", "given", "flagged", "upper", "even", "alternate", "nope", "pattern", "typed", "every", "listed",
    "fourth", "cwm",
]  # fmt: skip
Windows = Callable[[JsonKeys, int], tuple[int | None, ...]]  # of the layers, as many as the second argument


def read_rope(
    keys: JsonKeys, theta: float, head_size: int, context: int, partial: float | None = None, alpha: bool = False
) -> tuple[config.Rope, int]:
    """The rotary positions and the context in tokens.

    theta, partial: the default base and share of dimensions that rotate. alpha: dynamic scaling may have one (Hunyuan).
    """
    part, kind = _spelled(keys)
    rotated = _rotated(keys, part, head_size, partial)
    if rotated % 2 or head_size % 2 or rotated < (4 if kind == "dynamic" else 2):
        raise keys.error(f"rotary positions turn pairs of dimensions, but a head has {rotated} of them")
    base = part.number("rope_theta", keys.number("rope_theta", theta, above=1.0), above=1.0)
    scaling: config.RopeScaling = config.NoScaling()
    reach: float = context
    if alpha and kind == "dynamic" and part.raw("alpha"):
        base, kind = base * part.number("alpha") ** (head_size / (head_size - 2)), "default"
        for key in ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"):
            part.raw(key)
    if kind != "default":
        scaling, reach = _READERS[kind](part, context)
    if isinstance(scaling, config.LongScaling) and {len(scaling.short), len(scaling.long)} != {rotated // 2}:
        raise part.error(
            f"short_factor and long_factor must have {rotated // 2} numbers, one for each pair of dimensions that turn"
        )
    sections, interleaved = _sections(part, rotated // 2)
    part.finish(("finetuned",), f"rope type {kind!r} does not know it: correct config.json, or remove the key")
    if not 1 <= reach <= MAX_TOKENS:
        raise part.error(f"the scaling gives a context of {reach:,.0f} tokens; correct its factor")
    turned = None if rotated == head_size else rotated
    return config.Rope(base, scaling, turned, sections=sections, interleaved=interleaved), int(reach)


def read_both_ropes(
    keys: JsonKeys, theta: float, local: float | None, head_size: int, context: int
) -> tuple[config.Rope, int, config.Rope]:
    """The rotation of full attention, the context, and the rotation of layers with a window.

    theta, local: the default bases; None: the same. A scaling beside rope_theta applies only to full attention.
    """
    both = keys.raw("rope_parameters")
    if not isinstance(both, dict) or not both.keys() & {"full_attention", "sliding_attention"}:
        full, reach = read_rope(keys, theta, head_size, context)
        return full, reach, config.Rope(full.theta if local is None else local)
    if keys.raw("rope_scaling") is not None:
        raise keys.error("rope_scaling and rope_parameters are both there; keep the one that is right")
    full_keys, sliding_keys = (
        JsonKeys(
            {"rope_parameters": both.get(f"{kind}_attention")}, f"{keys.where}: {kind}_attention of rope_parameters"
        )
        for kind in ("full", "sliding")
    )
    full, reach = read_rope(full_keys, theta, head_size, context)
    return full, reach, read_rope(sliding_keys, theta if local is None else local, head_size, context)[0]


def read_bases(
    keys: JsonKeys, rope: config.Rope, windows: Sequence[int | None]
) -> tuple[config.Rope, config.Rope | None, tuple[bool, ...]]:
    """The two rotations by layer_rope_theta, and whether each layer has one."""
    given = keys.raw("layer_rope_theta")
    bases = [rope.theta] * len(windows) if given is None else given
    if not isinstance(bases, list) or len(bases) != len(windows) or not all(type(one) in (int, float) for one in bases):
        raise keys.error(f"layer_rope_theta must be a list with a number for each of the {len(windows)} layers")
    full, sliding = (
        {base for base, window in zip(bases, windows, strict=True) if base and (window is None) is whole}
        for whole in (True, False)
    )
    if len(full) > 1 or len(sliding) > 1:
        raise keys.error("layer_rope_theta asks for several bases in layers of one kind, which Tokenwright lacks")
    first = replace(rope, theta=float(next(iter(full or sliding), rope.theta)))
    return first, replace(rope, theta=float(next(iter(sliding), first.theta))), tuple(base > 0 for base in bases)


def _rotated(keys: JsonKeys, part: JsonKeys, head_size: int, partial: float | None) -> int:
    if partial is None:
        for place in (keys, part):
            place.only("partial_rotary_factor", 1, 1.0, why="rotation of a part of each head in this architecture")
        return head_size
    share = part.number("partial_rotary_factor", keys.number("partial_rotary_factor", partial))
    if share > 1:
        raise keys.error(f"partial_rotary_factor must be at most 1, not {share:g}")
    return int(head_size * share)


def _spelled(keys: JsonKeys) -> tuple[JsonKeys, str]:
    """The object with the scaling, and its rope type. As in transformers, rope_scaling comes before rope_parameters."""
    new, old = keys.raw("rope_parameters"), keys.raw("rope_scaling")
    name, values = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    if not isinstance(values, dict):
        raise keys.error(f"{name} must be an object, not a {type(values).__name__}")
    part = JsonKeys(values, f"{keys.where}: {name}")
    older = part.text("type", "default")
    kind = part.text("rope_type", older)
    if part.raw("type") is not None and _SAME_TYPE.get(older, older) != _SAME_TYPE.get(kind, kind):
        raise part.error(f"type is {older!r} but rope_type is {kind!r}; keep the right one")
    kind = _SAME_TYPE.get(kind, kind)
    if kind != "default" and kind not in _READERS:
        raise part.error(f"Tokenwright lacks rope type {kind!r}; it has default, {', '.join(_READERS)}")
    return _with_original(keys, values, part.where, kind), kind


def _with_original(keys: JsonKeys, values: Mapping[str, Any], where: str, kind: str) -> JsonKeys:
    """For llama3, yarn and longrope, the config's original context overrides the scaling object's."""
    beside = keys.raw(ORIGINAL)
    if beside is not None and kind in ("llama3", "yarn", "longrope"):
        values = {**values, ORIGINAL: beside}
    part = JsonKeys(values, where)
    unscaled = ("factor",) if kind == "default" and values.get("factor") == 1 else ()
    for key in ("type", "rope_type", "mrope_section", "mrope_interleaved", *unscaled):
        part.raw(key)
    return part


def _sections(part: JsonKeys, pairs: int) -> tuple[tuple[int, ...], bool]:
    given = part.raw("mrope_section")
    if given is None:
        return (), False
    if not isinstance(given, list) or not all(type(one) is int and one >= 0 for one in given) or len(given) != 3:
        raise part.error("mrope_section must be a list of three whole numbers")
    if sum(given) != pairs:
        raise part.error(f"mrope_section has {sum(given)} pairs, and a head turns {pairs}; correct config.json")
    return tuple(given), part.flag("mrope_interleaved", False)


def _factor(part: JsonKeys, default: float | None = None) -> float:
    factor = part.number("factor", default)
    if factor < 1:
        raise part.error(f"factor must be at least 1, not {factor:g}")
    return factor


def _whole_reach(part: JsonKeys, context: int) -> tuple[float, float]:
    original = part.whole(ORIGINAL, context, most=MAX_TOKENS)
    if original != context:
        raise part.error(
            f"{ORIGINAL} is {original:,} but max_position_embeddings is {context:,}; this rope type scales "
            "the latter: make them equal"
        )
    factor = _factor(part)
    return factor, context * factor


def _linear(part: JsonKeys, context: int) -> tuple[config.RopeScaling, float]:
    factor, reach = _whole_reach(part, context)
    return config.LinearScaling(factor), reach


def _dynamic(part: JsonKeys, context: int) -> tuple[config.RopeScaling, float]:
    factor, reach = _whole_reach(part, context)
    return config.DynamicScaling(factor, context), reach


def _llama3(part: JsonKeys, context: int) -> tuple[config.RopeScaling, float]:
    original = part.whole(ORIGINAL, context, most=MAX_TOKENS)
    low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
    if high <= low:
        raise part.error(f"high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    return config.Llama3Scaling(_factor(part), low, high, original), context


def _yarn(part: JsonKeys, context: int) -> tuple[config.RopeScaling, float]:
    original = part.whole(ORIGINAL, context, most=MAX_TOKENS)
    factor = _factor(part, max(1.0, context / original))
    fast, slow = part.number("beta_fast", 32.0), part.number("beta_slow", 1.0)
    if fast < slow:
        raise part.error(f"beta_fast ({fast:g}) must not be below beta_slow ({slow:g})")
    usual = _attention_factor(part, factor) * part.number("attn_factor", 1.0)  # as vLLM and llama.cpp multiply
    attention = part.number("attention_factor", usual)
    truncate = part.flag("truncate", True)
    part.raw("max_position_embeddings")
    scaled = part.number("llama_4_scaling_beta", 0.0, least=0.0)  # queries beyond the original context are scaled
    return config.YarnScaling(factor, original, fast, slow, attention, truncate), original * (1 if scaled else factor)


def _longrope(part: JsonKeys, context: int) -> tuple[config.RopeScaling, float]:
    original = part.whole(ORIGINAL, context, least=2, most=MAX_TOKENS)
    factor = _factor(part, max(1.0, context / original))
    attention = part.number("attention_factor", math.sqrt(1 + math.log(factor) / math.log(original)))
    return config.LongScaling(
        original, _numbers(part, "short_factor"), _numbers(part, "long_factor"), attention
    ), context


def _numbers(part: JsonKeys, key: str) -> tuple[float, ...]:
    listed = part.raw(key)
    if not isinstance(listed, list) or not all(type(one) in (int, float) and 0 < one < math.inf for one in listed):
        raise part.error(f"{key} must be a list of numbers above 0")
    return tuple(float(one) for one in listed)


def _attention_factor(part: JsonKeys, factor: float) -> float:
    """YaRN's factor on cos and sin: 0.1 ln(s) + 1 (arXiv 2309.00071, 3.4); the two mscales apply only together."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    scales = [part.number(name, 0.0, above=-1.0) for name in ("mscale", "mscale_all_dim")]
    return magnitude(scales[0]) / magnitude(scales[1]) if all(scales) else magnitude(1.0)


_READERS: Mapping[str, Callable[[JsonKeys, int], tuple[config.RopeScaling, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def read_rotary(keys: JsonKeys, layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates q and k: those with a 1 in no_rope_layers; by default all but every fourth."""
    interval = keys.whole("no_rope_layer_interval", 4)
    listed = keys.raw("no_rope_layers")
    if listed is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or not all(one in (0, 1) for one in listed):
        raise keys.error(f"no_rope_layers must list {layers} times 0 or 1, one for each layer")
    return tuple(bool(one) for one in listed)


def read_windows(keys: JsonKeys, slides: Slides, rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The attention window of each layer in tokens; None for full attention."""
    layers = len(rotary)
    window = _window(keys, slides)
    border = keys.whole("max_window_layers", 28, least=0)
    first = {"none": layers, "listed": layers, "upper": border}.get(slides, 0)
    sliding = [i >= first and not (slides == "nope" and rotary[i]) for i in range(layers)]
    types = keys.raw("layer_types")
    if slides == "pattern" and types is None and window is not None:
        sliding = _pattern(keys, layers)
    elif slides == "pattern":
        keys.raw("sliding_window_pattern")
    if slides in ("even", "alternate"):
        sliding = [i % 2 == 0 and (slides == "alternate" or i < border) for i in range(layers)]
    if slides in ("fourth", "cwm"):
        sliding = [i % 4 != 0 for i in range(layers)]
    if slides == "every":
        every = keys.whole("global_attn_every_n_layers", 4)
        sliding = [(i + 1) % every != 0 for i in range(layers)]
    if types is not None:
        listed = read_layer_types(keys, types, layers)
        if any(listed) and window is None:
            raise keys.error("layer_types names sliding layers, but no sliding_window is in use")
        if slides in ("none", "all", "given", "flagged") and window is not None and listed != sliding:
            raise keys.error("layer_types disagrees with sliding_window, which rules in this architecture")
        sliding = listed
    return tuple(window if slide else None for slide in sliding)


def windows_but(every: int, window: int, key: str | None = None) -> Windows:
    """A reader of windows in all layers but each one of `every`, or by layer_types. `key` overrides `every`."""

    def read(keys: JsonKeys, layers: int) -> tuple[int | None, ...]:
        size, types = keys.whole("sliding_window", window, most=MAX_TOKENS), keys.raw("layer_types")
        apart = every if key is None else keys.whole(key, every)
        listed = (
            [(i + 1) % apart != 0 for i in range(layers)] if types is None else read_layer_types(keys, types, layers)
        )
        return tuple(size if slides else None for slides in listed)

    return read


def flint_windows(keys: JsonKeys, layers: int) -> tuple[int | None, ...]:
    """Windows in all layers but the first two, every fourth and the last, or by layer_types."""
    size, types = keys.whole("sliding_window", 513, most=MAX_TOKENS), keys.raw("layer_types")
    slides = [i >= 2 and i % 4 != 1 and i != layers - 1 for i in range(layers)]
    listed = slides if types is None else read_layer_types(keys, types, layers)
    return tuple(size if one else None for one in listed)


def _pattern(keys: JsonKeys, layers: int) -> list[bool]:
    pattern = keys.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise keys.error("sliding_window_pattern must be a number, or the letters L and G, one for each layer")
        return [pattern[i % len(pattern)] == "L" for i in range(layers)]
    every = keys.whole("sliding_window_pattern", 4)
    return [(i + 1) % every != 0 for i in range(layers)]


def read_states(
    keys: JsonKeys, types: object, layers: int, states: tuple[str, ...], attention: tuple[str, ...]
) -> list[bool]:
    if not isinstance(types, list) or len(types) != layers or not all(one in states + attention for one in types):
        raise keys.error(f"layer_types must list {layers} times {states[0]} or {attention[0]}, one for each layer")
    return [one in states for one in types]


def read_layer_types(keys: JsonKeys, types: object, layers: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != layers:
        raise keys.error(f"layer_types must be a list with a type for each of the {layers} layers")
    known = ("full_attention", "sliding_attention")
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise keys.error(f"layer_types has {unknown[0]!r}; Tokenwright has {' and '.join(known)}")
    return [kind == "sliding_attention" for kind in types]


def _window(keys: JsonKeys, slides: Slides) -> int | None:
    given = keys.raw("sliding_window")
    if slides == "none":
        keys.only("sliding_window", why="a sliding window in this architecture")
        keys.only("use_sliding_window", False, why="a sliding window in this architecture")
        return None
    if slides not in ("flagged", "upper", "even", "nope"):
        keys.only("use_sliding_window", True, why="this architecture without its window")
    elif not keys.flag("use_sliding_window", False):
        return None
    if given is None and (keys.is_null("sliding_window") or slides in ("given", "nope")):
        return None
    return keys.whole(
        "sliding_window",
        {"alternate": 128, "every": 1024, "listed": 1024, "fourth": 128, "cwm": 8192}.get(slides, 4096),
        most=MAX_TOKENS,
    )
