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
    "temperature": _option(_NUMBER, DRAW, "0 takes the most probable token; higher values randomise more."),
    "top_k": _option(_WHOLE, DRAW, "Sample from the k most probable tokens; 0: from all."),
    "top_p": _option(_NUMBER, DRAW, "Sample from the most probable tokens that together have this probability."),
    "min_p": _option(_NUMBER, DRAW, "Sample from tokens with at least this fraction of the highest probability."),
    "typical_p": _option(_NUMBER, DRAW, "Sample from tokens of typical surprisal, up to this probability."),
    "top_n_sigma": _option(_NUMBER, DRAW, "Sample from logits within n standard deviations of the highest; 0: off."),
    "xtc_probability": _option(_NUMBER, DRAW, "XTC: the chance that the most probable tokens are excluded; 0: off."),
    "xtc_threshold": _option(_NUMBER, DRAW, "XTC excludes tokens this probable, except the least of them."),
    "mirostat": _option(_WHOLE, DRAW, "Mirostat 1 or 2 in place of top-k and the other filters; 0: off."),
    "mirostat_tau": _option(_NUMBER, DRAW, "The mean surprisal of a token that Mirostat aims at, in bits."),
    "mirostat_eta": _option(_NUMBER, DRAW, "Mirostat's learning rate."),
    "seed": Seed,
    "repetition_penalty": _option(_NUMBER, PENALTIES, "Above 1, tokens of the text so far become less probable."),
    "repetition_window": _option(_WHOLE, PENALTIES, "Apply it to this many last tokens; 0: to the whole text."),
    "presence_penalty": _option(_NUMBER, PENALTIES, "Subtracted from the logit of every token that the text has."),
    "frequency_penalty": _option(_NUMBER, PENALTIES, "The same, once for each time that the text has it."),
    "dry_multiplier": _option(_NUMBER, PENALTIES, "DRY: subtracted from logits that continue a repetition; 0: off."),
    "dry_base": _option(_NUMBER, PENALTIES, "DRY's penalty grows by this factor with each repeated token."),
    "dry_allowed_length": _option(_WHOLE, PENALTIES, "DRY's penalty grows from repetitions of this many tokens on."),
    "dry_breakers": _option(_TEXTS, PENALTIES, "DRY sees no repetition across it; may be repeated.", "--dry-breaker"),
    "dry_window": _option(_WHOLE, PENALTIES, "DRY looks at this many last tokens; 0: at the whole text."),
    "logit_bias": _option(_TEXTS, IDS, "ID:NUMBER: add NUMBER to this token's logit; may be repeated."),
    "allowed_ids": _option(_IDS, IDS, "Generate only these token ids; may be repeated.", "--allow-id"),
    "banned_ids": _option(_IDS, IDS, "Never generate this token id; may be repeated.", "--ban-id"),
    "bad_words": _option(_TEXTS, IDS, "Never generate the tokens of this text; may be repeated.", "--bad-word"),
    "stop": _option(_TEXTS, STOPPING, "End where this string appears; may be repeated."),
    "stop_ids": _option(_IDS, STOPPING, "End at this token id; may be repeated.", "--stop-id"),
    "include_stop": _option(bool, STOPPING, "Keep the stop string or stop token in the text.", "--include-stop"),
    "ignore_eos": _option(bool, STOPPING, "Go on after an end token.", "--ignore-eos"),
    "min_tokens": _option(_WHOLE, STOPPING, "Do not end the text before this many tokens."),
    "max_seconds": _option(_NUMBER, STOPPING, "End the text after this many seconds."),
    "json_schema": _option(str, FORMAT, "Write JSON of this schema: the schema, or @FILE."),
    "regex": _option(str, FORMAT, "Write what this regular expression matches as a whole."),
    "lark": _option(str, FORMAT, "Write what this Lark grammar allows: the grammar, or @FILE."),
    "choice": _option(_TEXTS, FORMAT, "Write this text or another given so; may be repeated."),
}  # fmt: skip
MORE: dict[str, Any] = {
    "n": _option(_WHOLE, SEVERAL, "The number of texts; with --beams, the number of beams that are shown.", "--texts"),
    "best_of": _option(_WHOLE, SEVERAL, "Generate this many texts, and show the most probable ones."),
    "beams": _option(_WHOLE, SEVERAL, "Use beam search with this many beams in place of sampling."),
    "length_penalty": _option(_NUMBER, SEVERAL, "A beam's score is divided by its length to this power."),
    "early_stopping": _option(
        str,
        SEVERAL,
        "true, false or never: stop the search once enough beams end, or none better is likely, or possible.",
    ),
    "logprobs": _option(_WHOLE, SEVERAL, "Show each token's log-probability, and those of this many top tokens."),
}


def sampled(*, several: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `chosen` by these options; it receives the SamplingParams fields that were set."""
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
    """The user's default sampling options; a beam search takes none of those for random draws."""
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
