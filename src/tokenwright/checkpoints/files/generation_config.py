"""Reads generation defaults from two files. End tokens are their union: chat models often list some in one file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tokenwright.checkpoints.files.json_keys import JsonKeys

_NEUTRAL: Mapping[str, object] = {
    "begin_suppress_tokens": [], "bad_words_ids": [], "diversity_penalty": 0.0, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "guidance_scale": 1.0, "length_penalty": 1.0, "min_length": 0, "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "remove_invalid_values": False,
    "renormalize_logits": False, "sequence_bias": {}, "token_healing": False,
}  # fmt: skip

_KNOWN = frozenset(  # read, or without effect
    (
        "eos_token_id", "bos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p",
        "repetition_penalty", "suppress_tokens", "min_new_tokens",
        "transformers_version", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens",
        "use_cache", "cache_implementation", "cache_config", "return_dict_in_generate", "output_attentions",
        "output_hidden_states", "output_scores", "output_logits", "chat_format", "max_window_size",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A checkpoint's defaults; None for sampling fields that its file does not set."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    banned_ids: tuple[int, ...] | None = None
    min_tokens: int | None = None
    unsupported: tuple[str, ...] = field(default=())  # sampling keys that we do not support

    @property
    def sampling(self) -> dict[str, Any]:
        others = ("bos_id", "eos_ids", "unsupported")
        named = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in others}
        return {name: value for name, value in named.items() if value not in (None, ())}


def parse_generation(
    suggested: Mapping[str, Any], config: Mapping[str, Any], where: str = "generation_config.json"
) -> GenerationDefaults:
    """The defaults of both files; `suggested` may be empty."""
    keys = JsonKeys({key: value for key, value in suggested.items() if not key.startswith("_")}, where)
    model = JsonKeys(config, "config.json")
    eos = dict.fromkeys([*_ids(keys, "eos_token_id"), *_ids(model, "eos_token_id")])
    bos = [*_ids(keys, "bos_token_id"), *_ids(model, "bos_token_id")]
    return GenerationDefaults(
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(eos),
        # 0 (greedy) if do_sample is false, even if the file gives another
        temperature=_number(keys, "temperature", least=0.0, most=1e6) if keys.flag("do_sample", True) else 0.0,
        top_k=None if keys.raw("top_k") in (None, -1) else keys.whole("top_k", least=0),  # -1 elsewhere: all tokens
        top_p=_number(keys, "top_p", most=1.0),
        min_p=_number(keys, "min_p", least=0.0, most=1.0),
        typical_p=_number(keys, "typical_p", most=1.0),
        repetition_penalty=_number(keys, "repetition_penalty", most=100.0),
        banned_ids=tuple(sorted(set(_ids(keys, "suppress_tokens")))) or None,
        min_tokens=None if keys.raw("min_new_tokens") is None else keys.whole("min_new_tokens", least=0),
        unsupported=_unsupported(suggested),
    )


def _ids(keys: JsonKeys, key: str) -> list[int]:
    """The ids of a key; -1 is an old spelling of none."""
    value = keys.raw(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int and one >= -1 for one in ids):
        raise keys.error(f"{key} must be a token id or a list of token ids")
    return [one for one in ids if one >= 0]


def _number(keys: JsonKeys, key: str, *, most: float, least: float | None = None) -> float | None:
    if keys.raw(key) is None:
        return None
    value = keys.number(key, least=least)
    if value > most:
        raise keys.error(f"{key} must be at most {most:g}, not {value:g}")
    return value + 0.0  # no negative zero


def _unsupported(suggested: Mapping[str, Any]) -> tuple[str, ...]:
    found = (key for key, value in suggested.items() if value is not None and key not in _KNOWN and key[:1] != "_")
    return tuple(sorted(key for key in found if key not in _NEUTRAL or suggested[key] != _NEUTRAL[key]))
