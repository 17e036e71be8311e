"""`tokenwright generate`: continue a prompt."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenwright.cli import options as opt
from tokenwright.cli.facts import facts, facts_line, memory_line
from tokenwright.cli.output import remark, show_anything, write, write_json
from tokenwright.cli.sampling import SEVERAL, sampled
from tokenwright.cli.tree import picture
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from tokenwright.completion import Completion
    from tokenwright.engine.step import TopLogprob
    from tokenwright.llm import LLM
    from tokenwright.sampling_params import SamplingParams

Tree = Annotated[bool, typer.Option("--tree", help="Draw what the beams have tried.", rich_help_panel=SEVERAL)]
CacheFile = Annotated[
    Path | None,
    typer.Option(
        help="Keep the KV cache here: a prompt that begins like the saved text is not read again.",
        rich_help_panel=opt.ENGINE,
    ),
]


@sampled(several=True)
def generate(
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    chosen: dict[str, Any] = {"max_tokens": 128},  # noqa: B006  (the options of SamplingParams, see `sampled`)
    tree: Tree = False,
    model: opt.Model = "stories",
    revision: opt.Revision = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    weights: opt.Weights = "native",
    no_cache: opt.NoCache = False,
    kv: opt.Kv = "native",
    window: opt.Window = None,
    sinks: opt.Sinks = 0,
    cache_file: CacheFile = None,
    page_size: opt.PageSize = 16,
    token_budget: opt.TokenBudget = 512,
    json_: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Continue PROMPT: stream the text, then print one line with its cost.

    Sampling options that are not given come from the model's generation_config.json.
    """
    from tokenwright.cache.snapshot import check_place

    text = opt.read_prompt(prompt, file)
    several = max(chosen.get(name) or 1 for name in ("n", "best_of", "beams"))
    if tree and chosen.get("beams", 1) == 1:
        raise RequestError("--tree draws a beam search; give it --beams as well")
    if cache_file is not None and several > 1:
        raise RequestError("--cache-file keeps the KV cache of one text; leave --choices, --best-of and --beams out")
    if cache_file is not None and no_cache:
        raise RequestError("--cache-file keeps the KV cache and --no-cache has none; leave one of them out")
    if cache_file is not None:
        check_place(cache_file)
    with opt.opened(
        model,
        quiet=quiet or json_,
        revision=revision,
        device=device,
        dtype=dtype,
        weights=weights,
        kv=kv,
        window=window,
        sinks=sinks,
        page_size=page_size,
        token_budget=token_budget,
        max_sequences=several,
    ) as llm:
        there = llm.load_cache(cache_file) if cache_file is not None and os.path.lexists(cache_file) else 0
        run = Run(llm, text, llm.sampling(**chosen), cache=not no_cache)
        if json_:
            run.go(lambda _: True)
            write_json({"model": model, **run.as_json()})
        else:
            if not quiet:
                remark(memory_line(llm))
            run.to_stdout(echo=not quiet)
            run.remarks(tree=tree)
            if not (quiet or run.unread):
                remark(facts_line(llm, run.completion))
        if cache_file is not None:
            other = there and not run.completion.usage.reused_tokens
            saved = 0 if other else llm.save_cache(cache_file, run.tokens)
            if other:
                remark(f"{cache_file} is left as it was: it holds {there:,} tokens of another text")
            elif not quiet and not json_:
                remark(_saved(saved, cache_file))
    if run.interrupted:
        raise typer.Exit(130)


def _saved(tokens: int, path: Path) -> str:
    if not tokens:
        return f"nothing was saved to {path}: the text fills no page of the KV cache"
    return f"the K and V of {tokens:,} tokens are in {path}; a prompt that begins like this text starts behind them"


class Run:
    """One prompt's continuation. `interrupted`: Ctrl-C ended it. `unread`: stdout was closed before its end.

    A single text is streamed; several texts, whose order or number is known at the end, are written at the end.
    """

    def __init__(self, llm: LLM, prompt: str, params: SamplingParams, *, cache: bool) -> None:
        self.llm = llm
        self.prompt = prompt
        self.params = params
        self.interrupted = self.unread = False
        self._cache = cache
        alone = params.choices == params.beams == 1
        self._stream = llm.stream(prompt, params, cache=cache) if alone else None
        self._done: Completion | None = None

    @property
    def tokens(self) -> list[int]:
        """The token ids so far, the prompt's included."""
        return [*self.llm.tokenizer.encode(self.prompt), *self.completion.token_ids]

    @property
    def completion(self) -> Completion:
        """The completion so far."""
        done = self._done if self._stream is None else self._stream.completion
        assert done is not None, "several texts are there when they have ended"
        return done

    def go(self, write: Callable[[str], bool]) -> None:
        """Stream the text to `write` until it ends, Ctrl-C is pressed or stdout is closed."""
        if self._stream is None:
            self._several(write)
            return
        with self._stream:
            try:
                self.unread = not all(write(piece.text) for piece in self._stream)
            except KeyboardInterrupt:
                self.interrupted = True

    def _several(self, write: Callable[[str], bool]) -> None:
        from rich.console import Console

        what = f"searching with {self.params.beams} beams" if self.params.beams > 1 else "writing"
        with Console(stderr=True).status(f"[dim]{what}"):
            [self._done] = self.llm.generate([self.prompt], self.params, cache=self._cache)
        texts = self._done.choices
        shown = [one.text if len(texts) == 1 else f"[{place}] {one.text}" for place, one in enumerate(texts, 1)]
        self.unread = not write("\n".join(shown))

    def remarks(self, *, tree: bool) -> None:
        """Print the requested extras to stderr: the beam tree and log-probabilities."""
        done, tokens = self.completion, self.llm.tokenizer
        if tree:
            for line in picture(done.tree, lambda ids: tokens.decode(ids, skip_special=False), done.ends):
                remark(line)
        for one in done.choices if self.params.logprobs is not None else ():
            for token, logprob, top in zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True):
                others = "  ".join(f"{tokens.token_text(other.token)!r} {other.logprob:.2f}" for other in top)
                remark(f"{logprob:8.3f}  {tokens.token_text(token)!r:<16} {others}".rstrip())

    def to_stdout(self, *, echo: bool) -> None:
        """Stream the text to stdout with a final newline; on a terminal the prompt comes first, dimmed."""
        from rich.console import Console
        from rich.text import Text

        show_anything()
        if echo and sys.stdout.isatty():
            Console().print(Text(self.prompt, style="dim"), end="", soft_wrap=True)
        try:
            self.go(write)
        finally:
            write("\n")

    def as_json(self) -> dict[str, Any]:
        done = self.completion
        texts = [self._one(one) for one in done.choices]
        more = {"choices": texts} if len(texts) > 1 else {}
        if done.tree:
            more["tree"] = [asdict(token) for token in done.tree]
        return {"prompt": self.prompt, **texts[0], **more, "facts": facts(self.llm, done)}

    def _one(self, one: Completion) -> dict[str, Any]:
        record: dict[str, Any] = {
            "text": one.text,
            "token_ids": list(one.token_ids),
            "finish_reason": str(one.finish_reason),
        }
        if one.stopped is not None:
            record["stopped"] = one.stopped
        if one.score is not None:
            record["score"] = one.score
        if self.params.logprobs is not None:
            record["logprobs"] = list(one.logprobs)
            record["sampler_logprobs"] = [_finite(value) for value in one.sampler_logprobs]
            record["top_logprobs"] = [[_likely(other) for other in top] for top in one.top_logprobs]
        return record


def _likely(one: TopLogprob) -> dict[str, Any]:
    return {"token_id": one.token, "logprob": one.logprob, "sampler_logprob": _finite(one.sampler_logprob)}


def _finite(value: float) -> float | None:
    """None for an infinity, which JSON lacks: a filtered token has no log-probability there."""
    return value if math.isfinite(value) else None
