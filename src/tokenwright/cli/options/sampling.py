"""Command-line options for the fields of SamplingParams, shared by the commands that generate text."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tokenwright.cli.options import defaults as settings
from tokenwright.cli.options.shared import Seed, given, replaced
from tokenwright.errors import RequestError
from tokenwright.sampling_params import DRAWING, Grammar, SamplingParams

DRAWN = (*DRAWING, "seed")  # not for beam search
DRAW, PENALTIES, IDS, STOPPING = "Sampling", "Penalties", "Allowed and forbidden tokens", "Stopping"
FORMAT, SEVERAL = "Format", "Several texts and beam search"


def _option(kind: Any, panel: str, help_: str, *names: str) -> Any:
    return Annotated[kind | None, Option(*names, help=help_, rich_help_panel=panel)]


def _max_tokens(default: int | None) -> Any:
    more = "" if default is None else f"; by default {default}"
    return _option(int, DRAW, f"The most tokens to write{more}.", "-n", "--max-tokens", "--new-tokens")


_NUMBER, _WHOLE, _TEXTS, _IDS = float, int, list[str], list[int]
COMMON: dict[str, Any] = {
    "max_tokens": _max_tokens(None),  # each command has its own default
    "temperature": _option(_NUMBER, DRAW, "0 takes the most probable token; higher values spread the draws."),
    "top_k": _option(_WHOLE, DRAW, "Draw among the k most probable tokens; 0 is all of them."),
    "top_p": _option(_NUMBER, DRAW, "Draw among the most probable tokens that together have this probability."),
    "min_p": _option(_NUMBER, DRAW, "Draw among tokens at least this share as probable as the most probable one."),
    "typical_p": _option(_NUMBER, DRAW, "Keep tokens of a surprisal closest to the entropy, up to this probability."),
    "top_n_sigma": _option(_NUMBER, DRAW, "Draw among logits within n standard deviations of the highest; 0 is off."),
    "xtc_probability": _option(_NUMBER, DRAW, "XTC: the chance that the most probable tokens are left out; 0 is off."),
    "xtc_threshold": _option(_NUMBER, DRAW, "XTC leaves out tokens at least this probable, but for the last of them."),
    "mirostat": _option(_WHOLE, DRAW, "Mirostat 1 or 2 instead of top-k and the other filters; 0 is off."),
    "mirostat_tau": _option(_NUMBER, DRAW, "The mean surprise of a token that Mirostat holds, in bits."),
    "mirostat_eta": _option(_NUMBER, DRAW, "The share of a token's error by which Mirostat corrects itself."),
    "seed": Seed,
    "repetition_penalty": _option(_NUMBER, PENALTIES, "Above 1, tokens of the text so far become less likely."),
    "repetition_window": _option(_WHOLE, PENALTIES, "Count this many of the last tokens for it; 0 is the whole text."),
    "presence_penalty": _option(_NUMBER, PENALTIES, "Subtracted from the logits of tokens that were written."),
    "frequency_penalty": _option(_NUMBER, PENALTIES, "The same, once for each time that they were written."),
    "dry_multiplier": _option(_NUMBER, PENALTIES, "DRY: subtracted from logits that continue a repetition; 0 is off."),
    "dry_base": _option(_NUMBER, PENALTIES, "The factor of DRY's penalty for each further token of a repetition."),
    "dry_allowed_length": _option(_WHOLE, PENALTIES, "The length in tokens from which DRY's penalty grows."),
    "dry_breakers": _option(_TEXTS, PENALTIES, "DRY sees no repetition across it; may be repeated.", "--dry-breaker"),
    "dry_window": _option(_WHOLE, PENALTIES, "DRY sees this many of the last tokens; 0 is the whole text."),
    "logit_bias": _option(_TEXTS, IDS, "ID:NUMBER, added to the token's logit; may be repeated."),
    "allowed_ids": _option(_IDS, IDS, "Only these token ids may be written; may be repeated.", "--allow-id"),
    "banned_ids": _option(_IDS, IDS, "This token id is not written; may be repeated.", "--ban-id"),
    "bad_words": _option(_TEXTS, IDS, "The token sequence of this text is not written; may be repeated.", "--bad-word"),
    "stop": _option(_TEXTS, STOPPING, "End where this string appears; may be repeated."),
    "stop_ids": _option(_IDS, STOPPING, "End at this token id; may be repeated.", "--stop-id"),
    "include_stop": _option(bool, STOPPING, "Keep the stop string or stop token in the text.", "--include-stop"),
    "ignore_eos": _option(bool, STOPPING, "Go on after an end token.", "--ignore-eos"),
    "min_tokens": _option(_WHOLE, STOPPING, "Do not end the text before this many tokens."),
    "max_seconds": _option(_NUMBER, STOPPING, "End the text after this many seconds."),
    "json_schema": _option(str, FORMAT, "Write JSON of this schema: the schema, or @FILE."),
    "regex": _option(str, FORMAT, "Write what this regular expression matches as a whole."),
    "lark": _option(str, FORMAT, "Write what this Lark grammar allows: the grammar, or @FILE."),
    "choice": _option(_TEXTS, FORMAT, "Write one of these texts; may be repeated."),
}  # fmt: skip
MORE: dict[str, Any] = {
    "n": _option(_WHOLE, SEVERAL, "Texts to write; with --beams, the number of beams to show.", "--texts"),
    "best_of": _option(_WHOLE, SEVERAL, "Write this many texts and show the most probable of them."),
    "beams": _option(_WHOLE, SEVERAL, "Beam search of this width: the most probable text that it finds."),
    "length_penalty": _option(_NUMBER, SEVERAL, "A beam's score is divided by its length to this power."),
    "early_stopping": _option(str, SEVERAL, "true, false or never: when the beams that have ended are enough."),
    "logprobs": _option(_WHOLE, SEVERAL, "Show each token's log-probability, and this many of the most probable ones."),
}


def sampled(*, several: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `chosen` by these options: it gets the SamplingParams fields that were set."""
    table = COMMON | MORE if several else COMMON

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        default = inspect.signature(command).parameters["chosen"].default["max_tokens"]

        def chosen(typed: dict[str, Any]) -> dict[str, Any]:
            found = {"max_tokens": default} | _set_defaults(typed) | chosen_from(typed)
            SamplingParams(**found)  # refuses invalid values before a model is loaded
            return found

        options = table | {"max_tokens": _max_tokens(default)}
        return replaced(command, "chosen", {name: (kind, None) for name, kind in options.items()}, chosen)

    return wrap


def _set_defaults(typed: Mapping[str, Any]) -> dict[str, Any]:
    """A beam search ignores settings of drawing."""
    chosen = settings.read()
    found = {name.replace("-", "_"): chosen[name] for name in settings.SAMPLING if name in chosen}
    if (typed.get("beams") or 1) == 1:
        return found
    return {name: value for name, value in found.items() if name not in DRAWN}


def chosen_from(options: dict[str, Any]) -> dict[str, Any]:
    chosen = given(**options)
    drawing = [name for name in DRAWN if chosen.get(name) not in (None, 0.0) or (name == "seed" and name in chosen)]
    if chosen.get("beams", 1) != 1 and drawing:
        raise RequestError(f"beam search draws nothing; leave {' and '.join(drawing)} out", *drawing)
    for name, value in chosen.items():
        if isinstance(value, list):
            chosen[name] = tuple(value)
    if "logit_bias" in chosen:
        chosen["logit_bias"] = dict(map(_bias, chosen["logit_bias"]))
    if "early_stopping" in chosen:
        said = chosen["early_stopping"].lower()
        if said not in ("true", "false", "never"):
            raise RequestError(f"--early-stopping must be true, false or never, not {said!r}")
        chosen["early_stopping"] = said if said == "never" else said == "true"
    grammars: dict[str, Callable[[Any], Grammar]] = {"regex": Grammar.regex, "choice": Grammar.choice}
    grammars["json_schema"] = lambda text: Grammar.json_schema(_read(text))
    grammars["lark"] = lambda text: Grammar.lark(_read(text))
    formats = [(name, chosen.pop(name)) for name in grammars if name in chosen]
    if len(formats) > 1:
        raise RequestError(
            f"a text has one format; give only one of {' and '.join('--' + n.replace('_', '-') for n, _ in formats)}"
        )
    for name, value in formats:
        chosen["grammar"] = grammars[name](value)
    return chosen


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError(f"--logit-bias must be ID:NUMBER, such as 42:-100, not {text!r}") from None


def _read(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{text[1:]} is not UTF-8 text (byte {error.start} is wrong)") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RequestError(f"{text[1:]!r} cannot be read: {reason}") from None
